"""Signals in the middle of a step: their handlers run when its books are whole again.

Python runs the handler of a signal between any two lines of the main thread, also right behind a
native call that went on for long, and what it raises (KeyboardInterrupt, the SystemExit of a
SIGTERM handler) ends whatever ran there: weights would have moved whose step was not counted. So
while a step writes, signals are only noted, by a C function in the place of every handler that is a
Python object, and the handlers are called when all is written. On other threads Python calls none.
"""

from __future__ import annotations

# What `signal` is made of: its own functions spend microseconds on turning numbers into enums.
import _signal  # type: ignore[import-not-found]
import sys
import threading
from collections.abc import Callable, Sequence
from signal import SIGKILL, SIGSTOP, valid_signals
from types import FrameType
from typing import Any, ParamSpec

Parameters = ParamSpec("Parameters")
Handler = Callable[[int, FrameType | None], object]

_NUMBERS = tuple(sorted(int(number) for number in valid_signals() - {SIGKILL, SIGSTOP}))
_get: Callable[[int], Any] = _signal.getsignal

held: Callable[[], bool] = bool  # Which answers False.
"""Whether signals wait already, for the end of something larger; set by who makes them wait."""

_known: tuple[tuple[Any, ...], tuple[tuple[int, Handler], ...]] = ((), ())
"""What each signal did when last looked at, and those of them that called Python functions."""


def handlers() -> tuple[tuple[int, Handler], ...]:
    """The signals whose handlers are Python functions, with these."""
    global _known
    found = tuple(map(_get, _NUMBERS))
    known, chosen = _known
    if found != known:
        chosen = tuple((n, handler) for n, handler in zip(_NUMBERS, found) if callable(handler))
        _known = found, chosen
    return chosen


def whole(
    function: Callable[Parameters, None], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> None:
    """Call a function to its end, its return or its error, before a signal's handler runs.

    What a handler raises comes from here, then; it may also come before the function was called. A
    signal that comes several times meanwhile is handled once. Handlers are put back by
    `signal.signal`: what `faulthandler.register` or `signal.siginterrupt` laid over one is lost.
    Where they are `held` already, it is by who does that that they are called.
    """
    if threading.current_thread() is not threading.main_thread() or held():
        return function(*args, **kwargs)
    before = handlers()
    came: dict[int, FrameType | None] = {}
    note = came.setdefault
    try:
        for number, _ in before:
            _signal.signal(number, note)
        function(*args, **kwargs)
    finally:
        try:
            put_back(before, note)
        finally:
            call(dict(before), came)


def put_back(before: Sequence[tuple[int, Handler]], note: Any) -> None:
    """Let `note` be the handler of no signal any more; who has set another since keeps it."""
    try:
        for number, handler in before:
            if _get(number) is note:
                _signal.signal(number, handler)
    except BaseException:  # One that was back already has raised: the others are put back, too.
        for number, handler in before:
            if _get(number) is note:
                _signal.signal(number, handler)
        raise


def call(handlers: dict[int, Handler], came: dict[int, FrameType | None]) -> None:
    """Call the handlers of what came; one that raises does not keep the others from it.

    They are handed the frame that calls them. Those where signals came are over, and what was kept
    of them, in the traceback of what a handler raises, would keep their tensors alive.
    """
    if came:
        number = next(iter(came))
        del came[number]
        try:
            handlers[number](number, sys._getframe())
        finally:
            call(handlers, came)
