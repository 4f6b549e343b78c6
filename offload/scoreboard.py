"""The one rule of order: who touches a place waits for who touched it before. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Task = TypeVar("Task")


class Scoreboard(Generic[Task]):
    """Which tasks last wrote and since read every place, and so whom a new op must wait for.

    A task that is taken back orders nobody: who comes after it waits for those before it. So the
    accesses of a place are kept from the last write on that can no longer be taken back.
    """

    def __init__(
        self,
        *,
        taken_back: Callable[[Task], bool] = lambda task: False,
        fixed: Callable[[Task], bool] = lambda task: True,
    ) -> None:
        """No access yet. A task that is `fixed` will never be `taken_back`."""
        self._taken_back = taken_back
        self._fixed = fixed
        self._accesses: dict[object, list[tuple[Task, bool]]] = {}

    def waits(self, reads: Iterable[object], writes: Iterable[object]) -> list[Task]:
        """Tasks to wait for: a read waits for the last write, a write for that and all reads."""
        found: dict[Task, None] = {}
        for cell, writing in (*((c, False) for c in reads), *((c, True) for c in writes)):
            for task, wrote in reversed(self._accesses.get(cell, ())):
                if self._taken_back(task):
                    continue
                if wrote or writing:
                    found[task] = None
                if wrote:
                    break
        return list(found)

    def note(self, task: Task, reads: Iterable[object], writes: Iterable[object]) -> None:
        """Record that `task` reads and writes these cells, after everything noted before."""
        for cell in reads:
            self._accesses.setdefault(cell, []).append((task, False))
        for cell in writes:
            before = self._accesses.setdefault(cell, [])
            before.append((task, True))
            for index in range(len(before) - 1, 0, -1):
                other, wrote = before[index]
                if wrote and self._fixed(other) and not self._taken_back(other):
                    del before[:index]
                    break

    def forget(self, done: Callable[[Task], bool]) -> None:
        """Drop the tasks that are done: nobody waits for them."""
        for cell, accesses in list(self._accesses.items()):
            kept = [(task, wrote) for task, wrote in accesses if not done(task)]
            if kept:
                self._accesses[cell] = kept
            else:
                del self._accesses[cell]
