"""What the lanes did, and who waited for whom: totals, and the last ops and waits in ring buffers.

A full ring drops its oldest entry.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from offload.planning.layout import TierUse
from offload.planning.profile import Profile
from offload.planning.tiers import format_bytes
from offload.program.ops import Lane, Op
from offload.reporting import Wait

SPANS_MAX = 1 << 14
"""Ops that a ring keeps: some megabytes, and for most models ten steps or more."""

CHUNK_SPANS_MAX = 48
"""Ops that it keeps per chunk of the model, if that is more: three steps of a large model."""

STEPS_MAX = 1 << 10

CALLS_MAX = 1 << 16
"""More than ops, as each large gradient is one."""


@dataclass(slots=True)
class LaneUse:
    """The totals of a lane since attach."""

    busy_s: float = 0.0
    exposed_s: float = 0.0
    """Seconds in which the user's thread waited for this lane; of compute, for the device."""
    bytes: int = 0
    operations: int = 0


class Ran(NamedTuple):
    """One op, and when it ran by `time.perf_counter`. The user's compute of a unit is an op of the
    compute lane, from when it could start until the unit was no longer in use."""

    op: Op
    start: float
    stop: float


class Stepped(NamedTuple):
    """A `step()`, and when it was called."""

    number: int
    at: float
    misses: int
    """See `Report.misses`."""


class Trace(NamedTuple):
    """The last ops, waits and steps of an engine, and calls into it."""

    ran: deque[Ran]
    waited: deque[Wait]
    stepped: deque[Stepped]
    called: deque[tuple[float, float]]
    """Start and stop."""

    @property
    def since(self) -> float:
        """The time after which nothing was dropped; 0.0 if nothing was."""
        rings = self.ran, self.waited, self.called
        return max((ring[0][-1] for ring in rings if len(ring) == ring.maxlen), default=0.0)


class LaneStats:
    """What the lanes of an engine have done, and what the user's thread waited for."""

    def __init__(self, profile: Profile):
        """Nothing is done yet."""
        self.lanes: Any = None
        """They tell what they do, and are opened later."""
        chunks = sum(len(unit.chunks) for unit in profile.units)
        self.kept = max(SPANS_MAX, CHUNK_SPANS_MAX * chunks)
        """So many ops they remember."""
        self._waited: deque[Wait] = deque(maxlen=SPANS_MAX)
        self._stepped: deque[Stepped] = deque(maxlen=STEPS_MAX)
        self.called: deque[tuple[float, float]] = deque(maxlen=CALLS_MAX)
        """Calls into the engine: start and stop."""
        self._lock = threading.Lock()
        self._use: dict[Lane, LaneUse] = {lane: LaneUse() for lane in Lane}

    @contextmanager
    def waited(self, lane: Lane) -> Iterator[None]:
        """A context: the user's thread waits inside for the device, and `lane` is the reason."""
        since = time.perf_counter()
        try:
            yield
        finally:
            self._expose(lane, since, time.perf_counter())

    def blame(self, task: Any, since: float) -> None:
        """Book the time since `since` on the lanes that led to `task`, latest first."""
        until = time.perf_counter()
        path = self.lanes.path(task)
        for lane, ready_at in path:
            begin = max(ready_at, since)
            if until > begin:
                self._expose(lane, begin, until)
                until = begin
        if until > since and len(path) > (not task.of_user):
            self._expose(path[-1][0], since, until)

    @property
    def use(self) -> dict[Lane, LaneUse]:
        """What each lane has done so far, with what the user's thread did of its work."""
        found = dict[Lane, LaneUse]()
        with self._lock:
            for lane, own in self._use.items():
                busy_s, size, operations = self.lanes.used(lane)
                found[lane] = LaneUse(
                    own.busy_s + busy_s,
                    own.exposed_s,
                    own.bytes + size,
                    own.operations + operations,
                )
        return found

    def count(self, op: Op, since: float) -> None:
        """Book what the calling thread has done since then of an op's work."""
        use, now = self._use[op.lane], time.perf_counter()
        with self._lock:
            use.busy_s += now - since
            use.bytes += op.bytes
            use.operations += 1

    def _expose(self, lane: Lane, since: float, until: float) -> None:
        with self._lock:
            self._use[lane].exposed_s += until - since
            self._waited.append(Wait(lane, since, until))

    def stepped(self, number: int, misses: int) -> None:
        """The user's `step()` was called, for the `number`-th time."""
        with self._lock:
            self._stepped.append(Stepped(number, time.perf_counter(), misses))

    def traced(self) -> Trace:
        """What was recorded so far."""
        with self._lock:
            rings = self._waited.copy(), self._stepped.copy(), self.called.copy()
            return Trace(deque(self.lanes.ran(), self.kept), *rings)


@dataclass(frozen=True, slots=True)
class Report:
    """What an engine has done since it was attached."""

    steps: int
    """Taken in all, those before a resume too."""
    misses: int
    """Uses of a unit in another order than in the pass before."""
    lanes: Mapping[str, LaneUse]
    tiers: tuple[TierUse, ...]
    wall_s: float
    """Seconds since the engine was attached."""
    compute_s: float
    """`wall_s` minus the waits of the user's thread for lanes."""
    ranks: str
    """How ranks share the model, in words; empty for one process."""

    def __str__(self) -> str:
        lines = [
            f"step {self.steps}; {self.wall_s:.2f} s since attach, "
            f"{self.wall_s - self.compute_s:.2f} s of them waiting for lanes; "
            f"{self.misses} misses (units used in another order than the one seen before)",
            *([self.ranks] if self.ranks else []),
            f"{'lane':8} {'busy':>10} {'exposed':>10} {'moved':>10}",
        ]
        for name, use in self.lanes.items():
            if use.operations:
                spent = f"{use.busy_s:8.2f} s {use.exposed_s:8.2f} s"
                lines.append(f"{name:8} {spent} {format_bytes(use.bytes):>10}")
        return "\n".join([*lines, f"{'tier':8} {'taken':>10} of", *map(str, self.tiers)])
