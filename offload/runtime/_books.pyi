"""The compiled books of the lanes, by numbers: see [Note: Compiled books] of `books`.

Tasks and passages are objects of C++ here, with the names of those of `program.schedule` that
others ask for, and typed as those. What lanes change of a task is given by `look`.
"""

from collections.abc import Iterable

from offload.program.ops import Op
from offload.program.schedule import Key, Passage, Run, Task

VERSION: int
"""Of what the module offers; see `cpu_adam.choice.require_version`."""

def make_passage() -> Passage: ...

class Known: ...

def make_known(
    lane: int,
    deadline: int,
    bytes: int,
    op: Op,
    work: Work | None,
    reads: list[int],
    writes: list[int],
) -> Known:
    """An op that comes again, by numbers; `work` its lane does by itself."""

class Work: ...
class Settings: ...
class TransferFailed(OSError): ...

class Books:
    """For so many lanes and staging slots; of what ran without Python the last is told."""

    def __init__(self, lanes: int, slots: int, ran_max: int) -> None: ...
    def issue(
        self,
        known: Known,
        pass_number: int,
        run: Run | None,
        passage: Passage | None,
        waits: Iterable[Task] | None,
        settings: Settings | None = None,
    ) -> Task:
        """A task, queued; `ran` tells of it where there is no `run`."""
    def issue_chunk(
        self, known: list[Known], pass_number: int, staged: bool, settings: Settings | None
    ) -> list[Task]:
        """The tasks of a chunk, with a passage where it is `staged`."""
    def issue_all(
        self,
        known: list[Known],
        pass_number: int,
        runs: list[Run | None],
    ) -> list[Task]:
        """The same for several."""
    def touching(self, reads: list[int], writes: list[int]) -> list[Task]: ...
    def all(self) -> list[Task]: ...
    def most_kept(self) -> int: ...
    def seal(self, passage: Passage) -> None: ...
    def cancel(self, tasks: Iterable[Task]) -> None: ...
    def begin(self, task: Task, seconds: float) -> bool: ...
    def over(self, task: Task, seconds: float) -> bool: ...
    def finish(self, task: Task) -> None: ...
    def look(self, task: Task) -> tuple[Key, list[int], list[tuple[int, float]]]:
        """Its urgency, the serials of what it waits for, and the lanes that led to it."""
    def take(self, lane: int, wait: bool) -> Task | None: ...
    def stop(self, closing: bool) -> None: ...
    def forget(self) -> None:
        """Let go of what lanes would have called."""
    def used(self, lane: int) -> tuple[float, int, int]: ...
    def ran(self) -> list[tuple[Op, float, float]]: ...
