"""Which task may start, and which of those goes first. Pure: no clock, no thread, no lock.

The lanes and the simulator both run this, so what one predicts the other does.

[Note: Urgency]
Of the ready tasks a lane takes the most urgent: the smallest key, then the one submitted first. A
task is as urgent as the most urgent that waits for it: who waits for a task of less urgency lends
it its own.

[Note: Passages]
The chunks of an update pass through a few staging slots: the n-th of every ring serves one chunk.
Which chunk gets which is decided as late as can be. The ops of a chunk are one passage; it starts
when all that its ops wait for outside it is done and a slot is free, the most urgent first, and
gives its slot back when its last op is done. So a started passage needs nothing but the lanes, and
slots can never be part of a circle of waits. While passages wait for a slot, the one that is
nearest to its end is as urgent as the most urgent of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from offload.layout import CHUNK_STAGES
from offload.program import Lane
from offload.task import Key, Passage, State, Task


class Schedule:
    """All tasks that are not over, and the staging slots."""

    def __init__(self, on_ready: Callable[[Task, Task | None], None]):
        """Empty.

        Args:
            on_ready: called with a task that has become ready or more urgent, and the one whose
                end made it so, if any.
        """
        self._on_ready = on_ready
        self._queues: dict[Lane, list[tuple[Key, int, Task]]] = {lane: [] for lane in Lane}
        """Heaps; a task may be in one twice, with the urgency that it had and the one lent."""
        self._waiting: list[tuple[Key, int, Passage]] = []
        """A heap of passages that want but a slot, each perhaps twice in the same way."""
        self._free = list(range(CHUNK_STAGES))
        self._started: list[Passage] = []

    # -- tasks --------------------------------------------------------------------------------

    def add(self, task: Task, waits: Iterable[Task]) -> None:
        """Let `task` be ready when `waits` are over, and its passage, if any, has started."""
        passage = task.passage
        if passage is not None:
            assert not passage.started, "a passage is sealed before it starts"
            passage.serial = passage.serial or task.serial
            passage.tasks.append(task)
            passage.left += 1
            passage.key = min(passage.key, task.key)
        for other in waits:
            if other.over:
                task.fences += other.fences
            else:
                self._link(other, task)
                if task.key < other.key:
                    self._hurry(other, task.key)
        if not task.missing:
            self._try(task, None)

    def seal(self, passage: Passage) -> None:
        """All tasks of `passage` are there."""
        assert passage.tasks, "a passage that is sealed has tasks: its end frees its slot"
        for task in passage.tasks:
            for other in task.waits:
                self._hurry(other, passage.key if other.passage is not passage else task.key)
        self._came(passage, None)

    def cancel(self, task: Task) -> None:
        """Take `task` back: whoever waited for it waits for what it was waiting for."""
        assert task.passage is None, "a passage is not taken back"
        task.go(State.CANCELLED)
        for other in task.waits:
            for follower in task.followers if not other.over else ():
                if other not in follower.waits:
                    self._link(other, follower)
        self._release(task)

    def finish(self, task: Task) -> None:
        """`task` is done."""
        task.go(State.DONE)
        self._release(task)
        passage = task.passage
        if passage is not None:
            passage.left -= 1
            if not passage.left:
                self._started.remove(passage)
                passage.tasks = []
                self._free.append(passage.slot)
                self._start(task)

    # -- what goes next -----------------------------------------------------------------------

    def first(self, lane: Lane) -> Task | None:
        """The most urgent task that is ready on `lane`; the user's own are not among them.

        One that the device is not ready for has those behind it go first, if it is for any.
        """
        queue, held = self._queues[lane], list[tuple[Key, int, Task]]()
        while queue:
            task = queue[0][2]
            if task.state is not State.READY:
                heapq.heappop(queue)  # Begun with the urgency that it was lent, or taken back.
            elif task.fenced:
                held.append(heapq.heappop(queue))
            else:
                break
        found = queue[0] if queue else held[0] if held else None
        for one in held:
            heapq.heappush(queue, one)
        return found[2] if found is not None else None

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
        if task.passage is not None and task.passage is not other.passage:
            task.passage.missing += 1

    def _release(self, task: Task) -> None:
        for follower in task.followers:
            follower.fences += task.fences
            follower.missing -= 1
            if follower.passage is not None and follower.passage is not task.passage:
                self._came(follower.passage, task)
            if not follower.missing:
                self._try(follower, task)
        task.followers, task.waits = [], []

    def _try(self, task: Task, last: Task | None) -> None:
        """Make `task` ready if nothing is in its way."""
        if task.missing or task.state is not State.WAITING:
            return
        if task.passage is None or task.passage.started:
            task.go(State.READY)
            self._queue(task, last)

    def _queue(self, task: Task, last: Task | None) -> None:
        if task.run is not None:
            heapq.heappush(self._queues[task.op.lane], (task.key, task.serial, task))
        self._on_ready(task, last)

    def _came(self, passage: Passage, last: Task | None) -> None:
        """One of the things that a passage waits for is there."""
        passage.missing -= 1
        if not passage.missing:
            heapq.heappush(self._waiting, (passage.key, passage.serial, passage))
            self._start(last)

    def _start(self, last: Task | None) -> None:
        """Start the passages for which there are slots."""
        while self._waiting:
            passage = self._waiting[0][2]
            if passage.started:
                heapq.heappop(self._waiting)
            elif self._free:
                heapq.heappop(self._waiting)
                passage.slot = self._free.pop()
                self._started.append(passage)
                for task in passage.tasks:
                    self._try(task, last)
            else:
                ending = min(self._started, key=lambda one: (one.left, one.serial))
                for task in ending.tasks:
                    self._hurry(task, passage.key)
                return

    def _hurry(self, task: Task, key: Key) -> None:
        """Let `task` and all that it waits for be at least as urgent as `key`."""
        found = [task]
        while found:
            one = found.pop()
            if one.over or one.key <= key:
                continue
            one.key = key
            if one.state is State.READY:
                self._queue(one, None)
            found += one.waits
            passage = one.passage
            if passage is None or passage.started or passage.key <= key:
                continue
            passage.key = key
            for inner in passage.tasks:
                found += [other for other in inner.waits if other.passage is not passage]
            if not passage.missing:
                heapq.heappush(self._waiting, (key, passage.serial, passage))
                self._start(None)
