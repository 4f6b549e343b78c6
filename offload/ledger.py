"""What the lanes have done, and who waited for whom."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter

from offload.books import Books
from offload.compiled import CompiledBooks
from offload.device import Device
from offload.fork import forked
from offload.program import Lane, Op
from offload.task import Task
from offload.trace import Ran, Stepped, Trace, Waited


@dataclass(slots=True)
class LaneUse:
    """What a lane has done so far."""

    busy_s: float = 0.0
    exposed_s: float = 0.0
    """Time that this lane blocked the user's thread; compute did by what a device had to do."""
    bytes: int = 0
    operations: int = 0


class Ledger:
    """What the lanes of an engine have done, and who waited for whom; under a lock of its own."""

    def __init__(self, books: Books | CompiledBooks, device: Device, trace: Trace | None):
        """Nothing is done yet; record in `trace` where given."""
        self._books, self._device, self.trace = books, device, trace
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._use: dict[Lane, LaneUse] = {lane: LaneUse() for lane in Lane if lane != Lane.COMM}

    @contextmanager
    def waited(self, lane: Lane) -> Iterator[None]:
        """A context: the user's thread waits inside for the device, and `lane` is the reason."""
        since = time.perf_counter()
        try:
            yield
        finally:
            if not self._device.is_host:
                self._expose(lane, since, time.perf_counter())

    def blame(self, task: Task, since: float) -> None:
        """Book the time since `since` on the lanes that led to `task`, latest first."""
        until = time.perf_counter()
        path = self._books.path(task)
        for lane, ready_at in path:
            begin = max(ready_at, since)
            if until > begin:
                self._expose(lane, begin, until)
                until = begin
        if until > since and len(path) > (not task.of_user):
            self._expose(path[-1][0], since, until)

    def _require_own(self) -> None:
        """Refuse a forked child what is counted: a lane may have had the lock in that moment.

        Raises:
            RuntimeError: this is one.
        """
        if os.getpid() != self._pid:
            raise forked("its lanes, and what they have done, stay", "ask there")

    @property
    def use(self) -> dict[Lane, LaneUse]:
        """What each lane has done so far; it stays what it was when it was asked for."""
        self._require_own()
        with self._lock:
            for lane, use in self._use.items():
                seconds, moved, operations = self._books.copied(lane)
                use.busy_s += seconds
                use.bytes += moved
                use.operations += operations
            return {lane: replace(use) for lane, use in self._use.items()}

    def count(self, op: Op, since: float) -> float:
        """Book what `op` has done since then on its lane, whoever did it. Returns the time."""
        use, now = self._use[op.lane], time.perf_counter()
        with self._lock:
            use.busy_s += now - since
            use.bytes += op.bytes
            use.operations += 1
        return now

    def _expose(self, lane: Lane, since: float, until: float) -> None:
        with self._lock:
            self._use[lane].exposed_s += until - since
            if self.trace is not None:
                self.trace.waited.append(Waited(lane, since, until))

    def stepped(self, number: int, misses: int) -> None:
        """The user's `step()` was called, for the `number`-th time."""
        if self.trace is not None:
            with self._lock:
                self.trace.stepped.append(Stepped(number, time.perf_counter(), misses))

    def note(self, op: Op, start: float, stop: float) -> None:
        """An op, or something else of the user's own, has run."""
        if self.trace is not None:
            with self._lock:
                self.trace.ran.append(Ran(op.lane, op, start, stop))

    def traced(self) -> Trace | None:
        """What was recorded so far; None where nothing is."""
        self._require_own()
        with self._lock:
            if self.trace is None:
                return None
            if copied := self._books.ran():
                ran = sorted([*self.trace.ran, *copied], key=attrgetter("stop"))
                self.trace.ran.clear()
                self.trace.ran.extend(ran)
            return self.trace.copy()
