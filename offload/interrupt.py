"""Signals inside the engine: their handlers run when the engine's books are whole again.

Python runs the handler of a signal between any two lines of the main thread, and what it raises
(KeyboardInterrupt, the SystemExit of a SIGTERM handler, the timeout of SIGALRM) ends whatever ran
there. In the middle of a hook that would leave a unit half in use, or a step half begun, and what
follows could hang or be wrong. So whatever the engine does in a call from outside is `whole`: every
handler that is a Python function is called at its end. (Blocking the signals would not do: the
kernel hands them to a thread where they are not blocked, and Python still calls the handler here.)
What goes on for long is made of calls that are whole each: `attach` takes its memory, then moves
unit by unit, and undoes what it did; `detach` and `stream_weights` read parameter by parameter.
Who cannot wait presses Ctrl-C twice: its handler is called at once, and no engine of the process
can be used any more, as nobody knows what was left half done.

[Note: Signals that wait]
`src/whole/module.cpp` lays a handler of its own over the one that Python has with the kernel (over
no other's, such as faulthandler's), which only notes what comes while something whole is under way;
`signal.getsignal` tells what the user has set, as ever. Where that was not compiled, or Python's
own could not be found, handlers are exchanged by `signal.signal` at either end.
"""

from __future__ import annotations

# What `signal` is made of: its own functions spend microseconds on turning numbers into enums.
import _signal  # type: ignore[import-not-found]
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from signal import SIGCHLD, SIGINT, SIGKILL, SIGSTOP, SIGURG, SIGWINCH, valid_signals
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from cpu_adam import interrupt as of_steps
from cpu_adam.built import require_version
from cpu_adam.interrupt import Handler, call, handlers, put_back
from offload.aside import QUESTIONS, WHOLE_VERSION, aside, left_alone, usual

try:
    from offload import _whole as _native

    require_version(_native, WHOLE_VERSION)
except ImportError:  # Not compiled: the reference serves.
    _native = None  # type: ignore[assignment]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_now, _thread = time.perf_counter, threading.get_ident
_SIGINT = int(SIGINT)
_HARMLESS = (int(SIGURG), int(SIGWINCH), int(SIGCHLD))
"""Nothing is done for them where nobody handles them."""
_MAIN = threading.main_thread().ident

_inside = False
"""Whether something whole is under way."""
_came: dict[int, FrameType | None] = {}
"""Signals that came in it, in order; of where they came nothing is kept, see `call`."""
_presses = 0
"""How often Ctrl-C was among them."""
_torn: list[str] = []
_TWICE = "Ctrl-C was pressed twice"
_told = [0]
"""How often it was so far, of those times that are told below Python."""

CALLS_MAX = 1 << 16
"""Calls that are kept: more of them than of ops, as each larger gradient is one."""

_calls: deque[tuple[float, float, object]] = deque(maxlen=CALLS_MAX)
owner: object = None
"""Whose the call is that is under way, and those after it that do not say; the module that is
compiled reads it, too."""


def record() -> None:
    """Keep `calls` from now on."""
    if _native is not None:
        _native.record(CALLS_MAX)


def calls() -> deque[tuple[float, float, object]]:
    """When the last calls of `whole` things, of all engines, began and ended (`time.perf_counter`),
    and whose they were, see `owner`. On threads other than the main one those within a call are
    here, too.
    """
    return deque(_calls if _native is None else _native.recorded(), CALLS_MAX)


def torn_times() -> int:
    """How often something whole was torn so far."""
    return len(_torn) if _native is None else len(_torn) + _native.torn() - _told[0]


def _note(number: int, frame: FrameType | None) -> None:
    """The handler while something whole is under way. It raises once at most."""
    global _presses
    _came.setdefault(number, None)
    if number == _SIGINT:
        _presses += 1
        if _presses == 2 and _inside:
            _torn.append(_TWICE)
            raise KeyboardInterrupt


def torn() -> Sequence[str]:
    """What has torn something whole: each time, the reason. It grows."""
    while _native is not None and _native.torn() > _told[0]:
        _told[0] += 1
        _torn.append(_TWICE)
    return _torn


def _forked() -> None:
    """In a child: nothing that was made before is whole. Where C++ counts, it has done so."""
    _torn.append("the process was forked")
    _told[0] += 1


os.register_at_fork(after_in_child=_forked)


def _tear(error: BaseException) -> None:
    """What is no error that the engine meets has ended something whole: no books are for it."""
    if not isinstance(error, Exception):
        _torn.append(f"{type(error).__name__} was raised")


def _prepared() -> bool:
    """Whether it is known where Python's own handler is: by a signal that does nothing else."""
    free = [one for one in _HARMLESS if _signal.getsignal(one) == _signal.SIG_DFL]
    if _native is None or _thread() != _MAIN or not free:
        return False
    _signal.signal(free[0], _note)
    handler = _native.handler_of(free[0])
    _signal.signal(free[0], _signal.SIG_DFL)
    numbers = sorted(int(number) for number in valid_signals() - {SIGKILL, SIGSTOP})
    _native.tell(globals(), _tear)
    _native.prepare(_MAIN, handler, _signal.getsignal, numbers, *QUESTIONS)
    return True


if not _prepared():
    _native = None  # type: ignore[assignment]


def inside() -> bool:
    """Whether something whole is under way."""
    return _inside or (_native is not None and _native.inside())


of_steps.held = inside  # A step within a call of the engine lets no signal in before its end.


def whole(
    function: Callable[Parameters, Result],
    otherwise: Callable[Parameters, Result] | None = None,
) -> Callable[Parameters, Result]:
    """Let `function` run to its end, its return or its error, before a signal counts.

    The user's modes and torch.compile see nothing of it, see `aside`. Or let `otherwise` run where
    it is called with such modes, or where anything else is not as usual.
    """
    run = (by_exchange if _native is None else by_note)(function, otherwise)
    return left_alone(run)  # type: ignore[no-any-return]


def whole_parts(
    function: Callable[Parameters, Result],
    otherwise: Callable[Parameters, Result] | None = None,
) -> tuple[Callable[..., Any], ...]:
    """`whole`, as what to call and its first arguments: for `partial`, without a frame between."""
    if _native is None:
        return (whole(function, otherwise),)
    return _native.call, function, otherwise or aside(function)


def by_note(
    function: Callable[Parameters, Result],
    otherwise: Callable[Parameters, Result] | None = None,
) -> Callable[Parameters, Result]:
    """`whole`, where signals that come are noted below Python."""
    apart = otherwise or aside(function)
    together: Callable[..., Result] = _native.call

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return together(function, apart, *args, **kwargs)

    return run


def by_exchange(
    function: Callable[Parameters, Result],
    otherwise: Callable[Parameters, Result] | None = None,
) -> Callable[Parameters, Result]:
    """`whole`, where the handlers are exchanged at either end."""
    apart = otherwise or aside(function)

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        global _inside, _presses
        work = function if usual() else apart
        if _thread() != _MAIN:  # On other threads Python calls no handlers.
            since = _now()
            try:
                return work(*args, **kwargs)
            finally:
                _calls.append((since, _now(), owner))
        if _inside:
            return work(*args, **kwargs)
        since = _now()
        found = handlers()
        begun, before = False, len(_torn)
        _came.clear()
        _presses = 0
        # A second Ctrl-C raises once, anywhere up to the first `_inside = False`: what it cuts
        # short there is done again below, where signals are only noted.
        try:
            try:
                _inside = True
                for number, _ in found:
                    _signal.signal(number, _note)
                begun = True
                return work(*args, **kwargs)
            except BaseException as error:
                if begun and len(_torn) == before:
                    _tear(error)
                raise
            finally:
                _end(found)
        finally:
            if _inside or _came:
                _end(found)
            _calls.append((since, _now(), owner))

    return run


@whole
def wholly(
    function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Call `function`, whole: one that is known only now, as to make it `whole` takes longer."""
    return function(*args, **kwargs)


def _end(found: Sequence[tuple[int, Handler]]) -> None:
    """Put the handlers back and call those whose signals came."""
    global _inside
    _inside = False
    try:
        put_back(found, _note)
    finally:
        if _came:
            call(dict(found), _came)
