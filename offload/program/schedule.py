"""Which task may start next, and which is most urgent. Pure: no clock, no thread, no lock.

The simulator runs this, and the native runner does the same in C++: so what is predicted is what
the lanes do.

[Note: Tasks]
A task is one op in one step. It is WAITING until the tasks that it waits for are over; READY until
its lane or the user takes it; then RUNNING, and DONE. A cancelled task passes its waits on to the
tasks that waited for it.

[Note: Urgency]
A lane takes the most urgent of its ready tasks: that with the smallest key, then the one submitted
first. Priority is inherited: a task is at least as urgent as every task that waits for it.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import dropwhile
from typing import Generic, TypeVar

from offload.program.ops import OF_USER, Lane, Op


@contextmanager
def uncollected() -> Iterator[None]:
    """For what makes hundreds of thousands of ops and no garbage: scanning takes half its time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class State(Enum):
    """Where a task is in its life, see [Note: Tasks]."""

    WAITING = "waiting"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__
    """Enum's own is a function of Python, and tasks are asked for their state all the time."""


_RUNNING, _DONE, _CANCELLED = State.RUNNING, State.DONE, State.CANCELLED

_LEGAL = {
    (State.WAITING, State.READY),
    (State.READY, State.RUNNING),
    (State.RUNNING, State.DONE),
    (State.WAITING, State.CANCELLED),
    (State.READY, State.CANCELLED),
}

Key = tuple[int, int]
"""Urgency: (number of the pass, position in it); smaller goes first."""


class Task:
    """One op in one step."""

    __slots__ = (
        "begun",
        "cancelled",
        "followers",
        "key",
        "missing",
        "of_user",
        "op",
        "over",
        "serial",
        "state",
        "waits",
    )

    def __init__(self, op: Op, key: Key, serial: int):
        self.op, self.key, self.serial = op, key, serial
        self.of_user = op.verb in OF_USER
        """Whether it is the user's own compute."""
        self.missing = 0
        """How many it waits for."""
        self.followers: list[Task] = []
        self.waits: list[Task] = []
        """Those it still waits for, or waited for."""
        self.state = State.WAITING
        self.begun = self.cancelled = self.over = False
        """Whether it is too late to cancel it, it was taken back, nobody needs to wait for it."""

    def go(self, state: State) -> None:
        """Move to `state`."""
        assert (self.state, state) in _LEGAL, (self.state, state, self.op)
        self.begun = state is _RUNNING or state is _DONE
        self.cancelled = state is _CANCELLED
        self.state = state
        self.over = state is _DONE or state is _CANCELLED


Access = TypeVar("Access")


@dataclass(slots=True)
class _Since(Generic[Access]):
    """A write of a place, None for whatever came before, and the reads since."""

    write: Access | None
    reads: list[Access] = field(default_factory=list)


class Scoreboard(Generic[Access]):
    """Which tasks last wrote and since read every place, and so whom a new op must wait for.

    A task that is taken back orders nobody: who comes after it waits for those before it. So the
    accesses of a place are kept from the last write on that can no longer be taken back.

    Many places are only ever read, so tasks that nobody needs to wait for any more are dropped as
    new ones come: what is kept of a place is what is under way there, and a few.
    """

    def __init__(
        self,
        *,
        taken_back: Callable[[Access], bool] = lambda task: False,
        fixed: Callable[[Access], bool] = lambda task: True,
        settled: Callable[[Access], bool] = lambda task: False,
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
        self._accesses: dict[object, list[_Since[Access]]] = {}

    def waits(self, reads: Iterable[object], writes: Iterable[object]) -> list[Access]:
        """Tasks to wait for: a read waits for the last write, a write for that and all reads."""
        found: dict[Access, None] = {}
        get, taken_back = self._accesses.get, self._taken_back
        for cells, writing in ((reads, False), (writes, True)):
            for cell in cells:
                for since in reversed(get(cell, ())):
                    if writing:
                        for task in reversed(since.reads):
                            if not taken_back(task):
                                found[task] = None
                    if since.write is not None and not taken_back(since.write):
                        found[since.write] = None
                        break
        return list(found)

    def all(self) -> list[Access]:
        """Tasks to wait for before anybody else has the places."""
        return self.waits((), tuple(self._accesses))

    def note(self, task: Access, reads: Iterable[object], writes: Iterable[object]) -> None:
        """Record that `task` reads and writes these cells, after everything noted before."""
        for cell in reads:
            self._unsettled(cell)[-1].reads.append(task)
        for cell in writes:
            before = self._unsettled(cell)
            before.append(_Since(task))
            for index in range(len(before) - 1, 0, -1):
                other = before[index].write
                if other is not None and self._fixed(other) and not self._taken_back(other):
                    del before[:index]
                    break

    def _unsettled(self, cell: object) -> list[_Since[Access]]:
        """The accesses of a place, from the first one that is not settled."""
        accesses = self._accesses.setdefault(cell, [])
        while accesses:
            first, settled = accesses[0], self._settled
            if first.write is not None and not settled(first.write):
                break
            first.write = None
            if first.reads and settled(first.reads[0]):
                first.reads[:] = dropwhile(settled, first.reads)
            if first.reads:
                break
            del accesses[0]
        if not accesses:
            accesses.append(_Since(None))
        return accesses


class Schedule:
    """All tasks that are not over."""

    def __init__(self) -> None:
        """Empty."""
        self._queues: dict[Lane, list[tuple[Key, int, Task]]] = {lane: [] for lane in Lane}
        """Heaps; a task may be in one twice, with the urgency that it had and the one lent."""

    # -- tasks --------------------------------------------------------------------------------

    def add(self, task: Task, waits: Iterable[Task]) -> None:
        """Let `task` be ready when `waits` are over."""
        for other in waits:
            if not other.over:
                self._link(other, task)
                if task.key < other.key:
                    self._hurry(other, task.key)
        self._try(task)

    def finish(self, task: Task) -> None:
        """`task` is done."""
        task.go(State.DONE)
        self._release(task)

    # -- what goes next -----------------------------------------------------------------------

    def first(self, lane: Lane) -> Task | None:
        """The most urgent task that is ready on `lane`; the user's own are not among them."""
        queue = self._queues[lane]
        while queue and queue[0][2].state is not State.READY:
            heapq.heappop(queue)  # Begun with the urgency that it was lent, or taken back.
        return queue[0][2] if queue else None

    def take(self, lane: Lane) -> Task | None:
        """Begin the most urgent task that is ready on `lane`, see `first`."""
        task = self.first(lane)
        if task is not None:
            task.go(State.RUNNING)  # What is left of it in the queue goes when it comes first.
        return task

    # -- inside -------------------------------------------------------------------------------

    def _link(self, other: Task, task: Task) -> None:
        other.followers.append(task)
        task.waits.append(other)
        task.missing += 1

    def _release(self, task: Task) -> None:
        for follower in task.followers:
            follower.missing -= 1
            self._try(follower)
        task.followers, task.waits = [], []

    def _try(self, task: Task) -> None:
        """Make `task` ready if nothing is in its way."""
        if not task.missing and task.state is State.WAITING:
            task.go(State.READY)
            self._queue(task)

    def _queue(self, task: Task) -> None:
        if not task.of_user:
            heapq.heappush(self._queues[task.op.lane], (task.key, task.serial, task))

    def _hurry(self, task: Task, key: Key) -> None:
        """Let `task` and all that it waits for be at least as urgent as `key`."""
        found = [task]
        while found:
            one = found.pop()
            if one.over or one.key <= key:
                continue
            one.key = key
            if one.state is State.READY:
                self._queue(one)
            found += one.waits
