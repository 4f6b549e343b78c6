"""What begins and ends each call into the engine, in C++: see `src/whole/module.cpp`."""

from collections.abc import Callable, Sequence
from typing import Any

VERSION: int
"""Of what the module offers; see `built`."""

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

def tell(names: dict[str, Any], tear: Callable[[BaseException], None]) -> None:
    """Of a module with the `owner` of calls; `tear` is told what has ended something whole."""

def record(most: int) -> None:
    """Keep of the last so many calls from now on when each began and ended, and whose it was."""

def recorded() -> list[tuple[float, float, object]]:
    """What is kept of them, the first first."""

def call(
    function: Callable[..., Any], otherwise: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call `function` whole, or `otherwise` where not all is as usual.

    On the main thread signals wait, if they do not already, until it has returned or raised; on
    others, where Python calls no handlers, they go on. Those that came before are called here
    first, and those that came meanwhile at the end, in that order. A handler that raises does not
    keep the others from it: the last error is raised, with the one before as its context.
    """

def inside() -> bool:
    """Whether signals wait."""

def torn() -> int:
    """How often Ctrl-C was pressed twice while they did, after which they wait no longer."""

def quiet(*questions: Callable[[], object]) -> Callable[[], bool]:
    """Ask whether the answers to all of these are false, zero or None."""
