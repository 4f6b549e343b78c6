"""Ctrl-C inside the engine: it counts when the engine's books are whole again.

Python raises KeyboardInterrupt between any two lines of the main thread. In the middle of a hook
that would leave a unit half in use, or a step half begun, and what follows could hang or be wrong.
So whatever the engine does in a call from outside is `whole`: the interrupt is raised at its end.
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


class _Interrupts:
    """What came in while something whole was under way."""

    inside = False
    pending = 0
    torn = 0
    main = threading.main_thread().ident

    @classmethod
    def note(cls, number: int, frame: FrameType | None) -> None:
        cls.pending += 1
        if cls.pending > 1:
            cls.torn += 1
            raise KeyboardInterrupt


def torn() -> int:
    """How often something whole was torn by a second Ctrl-C."""
    return _Interrupts.torn


def whole(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let `function` run to its end, its return or its error, before a Ctrl-C counts."""

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        # Elsewhere Python raises no KeyboardInterrupt.
        if _Interrupts.inside or threading.get_ident() != _Interrupts.main:
            return function(*args, **kwargs)
        handler: Any = _signal.getsignal(_NUMBER)
        if not callable(handler):
            return function(*args, **kwargs)
        _Interrupts.pending = 0
        _signal.signal(_NUMBER, _Interrupts.note)
        _Interrupts.inside = True
        try:
            return function(*args, **kwargs)
        finally:
            _Interrupts.inside = False
            _signal.signal(_NUMBER, handler)
            if _Interrupts.pending:
                handler(SIGINT, None)

    return run
