"""What begins and ends each call into the engine, in C++: see `src/whole.cpp`."""

from collections.abc import Callable, Sequence
from typing import Any

def prepare(thread: int, get: Callable[[int], Any], numbers: Sequence[int]) -> None:
    """The main thread is this one; `get` tells the handler of each of these signals. Once."""

def enter() -> bool:
    """From here on signals wait for `leave`; False where they did already.

    On another thread than the main one, where Python calls no handlers, nothing is done.
    """

def leave() -> None:
    """Call the handlers of what came, in that order.

    One that raises does not keep the others from it: the last error is raised, with the one before
    as its context.
    """

def inside() -> bool:
    """Whether signals wait."""

def torn() -> int:
    """How often Ctrl-C was pressed twice while they did, after which they wait no longer."""

def quiet(*questions: Callable[[], object]) -> Callable[[], bool]:
    """Ask whether the answers to all of these are false, zero or None."""
