"""The one rule of order: who touches a place waits for who touched it before. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Task = TypeVar("Task")


class Scoreboard(Generic[Task]):
    """Which tasks last wrote and since read every place, and so whom a new op must wait for.

    A task that is taken back orders nobody: who comes after it waits for those before it. So the
    accesses of a place are kept from the last write on that can no longer be taken back.

    Many places are only ever read, so tasks that nobody needs to wait for any more are dropped as
    new ones come: what is kept of a place is what is under way there, and a few.
    """

    def __init__(
        self,
        *,
        taken_back: Callable[[Task], bool] = lambda task: False,
        fixed: Callable[[Task], bool] = lambda task: True,
        settled: Callable[[Task], bool] = lambda task: False,
    ) -> None:
        """No access yet.

        Args:
            taken_back: whether a task will never run.
            fixed: whether it will never be taken back.
            settled: whether it is over, so that waiting for it is waiting for nothing.
        """
        self._taken_back = taken_back
        self._fixed = fixed
        self._settled = settled
        self._accesses: dict[object, list[tuple[Task, bool]]] = {}

    def waits(self, reads: Iterable[object], writes: Iterable[object]) -> list[Task]:
        """Tasks to wait for: a read waits for the last write, a write for that and all reads."""
        found: dict[Task, None] = {}
        get, taken_back = self._accesses.get, self._taken_back
        for cells, writing in ((reads, False), (writes, True)):
            for cell in cells:
                for task, wrote in reversed(get(cell, ())):
                    if taken_back(task):
                        continue
                    if wrote or writing:
                        found[task] = None
                    if wrote:
                        break
        return list(found)

    def all(self) -> list[Task]:
        """Tasks to wait for before anybody else has the places."""
        return self.waits((), tuple(self._accesses))

    @property
    def most_kept(self) -> int:
        """How many accesses are kept of the place of which there are most."""
        return max(map(len, self._accesses.values()), default=0)

    def note(self, task: Task, reads: Iterable[object], writes: Iterable[object]) -> None:
        """Record that `task` reads and writes these cells, after everything noted before."""
        for cell in reads:
            self._unsettled(cell).append((task, False))
        for cell in writes:
            before = self._unsettled(cell)
            before.append((task, True))
            for index in range(len(before) - 1, 0, -1):
                other, wrote = before[index]
                if wrote and self._fixed(other) and not self._taken_back(other):
                    del before[:index]
                    break

    def _unsettled(self, cell: object) -> list[tuple[Task, bool]]:
        """The accesses of a place, from the first one that is not settled."""
        accesses = self._accesses.get(cell)
        if accesses is None:
            accesses = self._accesses[cell] = []
        count = 0
        while count < len(accesses) and self._settled(accesses[count][0]):
            count += 1
        if count:
            del accesses[:count]
        return accesses
