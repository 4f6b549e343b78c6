"""Ctrl-C inside the engine: it counts when the engine's books are whole again.

Python raises KeyboardInterrupt between any two lines of the main thread. In the middle of a hook
that would leave a unit half in use, or a step half begun, and what follows could hang or be wrong.
So whatever the engine does in a call from outside is `whole`: the interrupt is raised at its end.
What goes on for long is made of calls that are whole each: `attach` takes its memory, then moves
unit by unit, and undoes what it did; `detach` and `stream_weights` read parameter by parameter.
Who cannot wait presses twice: that is raised at once, and no engine of the process can be used any
more, as nobody knows what was left half done.
"""

from __future__ import annotations

# What `signal` is made of: its own functions spend microseconds on turning numbers into enums.
import _signal  # type: ignore[import-not-found]
import functools
import threading
from collections.abc import Callable
from signal import SIGINT
from types import FrameType
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_NUMBER = int(SIGINT)
_MAIN = threading.main_thread().ident

_inside = False
"""Whether something whole is under way."""
_pending = 0
"""How often Ctrl-C was pressed in it."""
_torn = 0


def _note(number: int, frame: FrameType | None) -> None:
    """The handler while something whole is under way. It raises once at most."""
    global _pending, _torn
    _pending += 1
    if _pending == 2 and _inside:
        _torn += 1
        raise KeyboardInterrupt


def torn() -> int:
    """How often something whole was torn by a second Ctrl-C."""
    return _torn


def whole(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let `function` run to its end, its return or its error, before a Ctrl-C counts."""

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        global _inside, _pending
        # Elsewhere Python raises no KeyboardInterrupt.
        if _inside or threading.get_ident() != _MAIN:
            return function(*args, **kwargs)
        handler: Any = _signal.getsignal(_NUMBER)
        if not callable(handler):
            return function(*args, **kwargs)
        _pending = 0
        # A second press raises once, anywhere up to the first `_inside = False`: what it cuts short
        # there is done again below, where presses are only counted.
        try:
            try:
                _inside = True
                _signal.signal(_NUMBER, _note)
                return function(*args, **kwargs)
            finally:
                _inside = False
                _signal.signal(_NUMBER, handler)
        finally:
            if _inside:
                _inside = False
                _signal.signal(_NUMBER, handler)
            if _pending:
                handler(SIGINT, None)

    return run
