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

[Note: Slots]
What streams ([Note: Streams] of `ops`) has a staging slot from its first task to its last. Its
first is passed by while no slot is free. What a drive has brought to a slot is worked on and
written before all else: slots are few, and while none is free the drive stands still.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from enum import Enum
from itertools import dropwhile
from typing import Any, Generic, TypeVar

from offload.program.ops import OF_USER, Lane, Op


class State(Enum):
    """Where a task is in its life, see [Note: Tasks]."""

    WAITING = "waiting"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


_LEGAL = (
    (State.WAITING, State.READY),
    (State.READY, State.RUNNING),
    (State.RUNNING, State.DONE),
    (State.WAITING, State.CANCELLED),
    (State.READY, State.CANCELLED),
)

FLYING_BYTES_MAX = 64 << 20
"""The lane of the drives begins tasks as long as those under way are of fewer bytes: that keeps a
drive busy, and what is urgent waits for no more. See docs/decisions.md."""

Urgency = tuple[int, int]
"""Urgency: (number of the pass, position in it); smaller goes first."""

AT_ONCE: Urgency = (-1, 0)


class Task:
    """One op in one step."""

    def __init__(self, op: Op, key: Urgency, serial: int):
        self.op, self.key, self.serial = op, key, serial
        self.of_user = op.verb in OF_USER
        """Whether it is the user's own compute."""
        self.takes_slot = self.frees_slot = self.at_once = False
        """See [Note: Slots]."""
        self.missing = 0
        """How many it waits for."""
        self.followers: list[Task] = []
        self.waits: list[Task] = []
        """Those it still waits for, or waited for."""
        self.state = State.WAITING

    def go(self, state: State) -> None:
        """Move to `state`."""
        assert (self.state, state) in _LEGAL, (self.state, state, self.op)
        self.state = state

    @property
    def begun(self) -> bool:
        """Whether it is too late to cancel it."""
        return self.state is State.RUNNING or self.state is State.DONE

    @property
    def cancelled(self) -> bool:
        """Whether it was taken back."""
        return self.state is State.CANCELLED

    @property
    def over(self) -> bool:
        """Whether nobody needs to wait for it."""
        return self.state is State.DONE or self.state is State.CANCELLED


Follower = TypeVar("Follower", bound=Any)
"""A task that tells whether it is `over` and `cancelled`, as `Task` does."""


class Scoreboard(Generic[Follower]):
    """Which tasks last touched every place, and so whom a new one must wait for.

    A task that is taken back orders nobody: who comes after it waits for those before it. So the
    accesses of a place are kept from the first one on that is not over.
    """

    def __init__(self) -> None:
        self._accesses: dict[object, list[tuple[Follower, bool]]] = {}
        """Of every place, in order: the task, and whether it writes."""

    def waits(self, reads: Iterable[object], writes: Iterable[object]) -> list[Follower]:
        """Tasks to wait for: a read waits for the last write, a write for that and all reads."""
        found: dict[Follower, None] = {}
        for cells, writing in ((reads, False), (writes, True)):
            for cell in cells:
                for task, wrote in reversed(self._accesses.get(cell, ())):
                    if (wrote or writing) and not task.cancelled:
                        found[task] = None
                        if wrote:
                            break
        return list(found)

    def all(self) -> list[Follower]:
        """Tasks to wait for before anybody else has the places."""
        return self.waits((), tuple(self._accesses))

    def note(self, task: Follower, reads: Iterable[object], writes: Iterable[object]) -> None:
        """Record that `task` reads and writes these cells, after everything noted before."""
        for cells, writing in ((reads, False), (writes, True)):
            for cell in cells:
                accesses = self._accesses.setdefault(cell, [])
                if accesses and accesses[0][0].over:
                    accesses[:] = dropwhile(lambda access: access[0].over, accesses)
                accesses.append((task, writing))


class Schedule:
    """All tasks that are not over; they share so many staging slots, see [Note: Slots]."""

    def __init__(self, slots: int = 1) -> None:
        self._free_slots = slots
        self._queues = defaultdict[tuple[Lane, bool], list[tuple[Urgency, int, Task]]](list)
        """Heaps, by the lane and whether they take slots; a task may be in one twice, with the
        urgency that it had and the one lent."""

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
        self._free_slots += task.frees_slot
        self._release(task)

    def first(self, lane: Lane) -> Task | None:
        """The most urgent task that is ready on `lane` and has a slot where it takes one; the
        user's own are not among them."""
        found = []
        for takes_slot in (False, True) if self._free_slots else (False,):
            queue = self._queues[lane, takes_slot]
            while queue and queue[0][2].state is not State.READY:
                heapq.heappop(queue)  # Begun with the urgency that it was lent, or taken back.
            found += queue[:1]
        return min(found)[2] if found else None

    def take(self, lane: Lane) -> Task | None:
        """Begin the most urgent task that is ready on `lane`, see `first`."""
        task = self.first(lane)
        if task is not None:
            task.go(State.RUNNING)  # What is left of it in the queue goes when it comes first.
            self._free_slots -= task.takes_slot
        return task

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
        if not task.missing and task.state is State.WAITING:
            task.go(State.READY)
            self._queue(task)

    def _queue(self, task: Task) -> None:
        if not task.of_user:
            queue = self._queues[task.op.lane, task.takes_slot]
            heapq.heappush(queue, (AT_ONCE if task.at_once else task.key, task.serial, task))

    def _hurry(self, task: Task, key: Urgency) -> None:
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
