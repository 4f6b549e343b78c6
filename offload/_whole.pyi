"""What begins and ends each call into the engine, in C++: see `src/whole/module.cpp`."""

from collections.abc import Callable, Sequence
from typing import Any

VERSION: int
"""Of what the module offers; see `built`."""

BEGUN: int
NESTED: int
UNUSUAL: int

def handler_of(number: int) -> int:
    """Where the handler is that the kernel calls for a signal."""

def prepare(
    thread: int,
    handler: int,
    get: Callable[[int], Any],
    numbers: Sequence[int],
    *questions: Callable[[], object],
) -> None:
    """The main thread is this one, and Python's own handler, for all it handles, is there. Once.

    `get` tells what handles each of these signals. All is as usual while the answers to the
    questions are, see `quiet`.
    """

class UnderWay:
    """A context: what is whole is under way in it, and signals wait until it ends."""

    def __enter__(self) -> int:
        """BEGUN: from here on signals wait; NESTED: they did already. And UNUSUAL.

        On another thread than the main one, where Python calls no handlers, they go on. What came
        before is called here.
        """

    def __exit__(self, *raised: object) -> None:
        """Call the handlers of what came, in that order.

        One that raises does not keep the others from it: the last error is raised, with the one
        before as its context.
        """

def inside() -> bool:
    """Whether signals wait."""

def torn() -> int:
    """How often Ctrl-C was pressed twice while they did, after which they wait no longer."""

def pressed_twice() -> bool:
    """Whether it was in the last that began."""

def quiet(*questions: Callable[[], object]) -> Callable[[], bool]:
    """Ask whether the answers to all of these are false, zero or None."""
