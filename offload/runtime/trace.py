"""What the lanes did: totals, and the last ops and waits in ring buffers. Pure.

Lanes record while they hold their lock: a tuple per op, and one per wait of the user's thread for a
lane. A full ring drops its oldest entry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from offload.planning.layout import TierUse
from offload.planning.profile import Profile
from offload.planning.tiers import format_bytes
from offload.program.ops import Lane, Op
from offload.runtime.entry import Call

SPANS_MAX = 1 << 14
"""Ops that a ring keeps: some megabytes, and for most models ten steps or more."""

CHUNK_SPANS_MAX = 48
"""Ops that it keeps per chunk of the model, if that is more: three steps of a large model."""

STEPS_MAX = 1 << 10


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

    lane: Lane
    op: Op
    start: float
    stop: float


class Waited(NamedTuple):
    """A wait of the user's thread for a lane."""

    lane: Lane
    start: float
    stop: float


class Stepped(NamedTuple):
    """A `step()`, and when it was called."""

    number: int
    at: float
    misses: int
    """See `Report.misses`."""


class Trace:
    """The last ops, waits, steps and calls of an engine; `called` returns the calls into all."""

    def __init__(self, called: Callable[[], deque[Call]] = deque, profile: Profile | None = None):
        self.key = object()
        """Identifies the calls into this engine."""
        chunks = sum(len(unit.chunks) for unit in profile.units) if profile else 0
        self.ran: deque[Ran] = deque(maxlen=max(SPANS_MAX, CHUNK_SPANS_MAX * chunks))
        """Ordered by end within a lane, and roughly between lanes."""
        self.waited: deque[Waited] = deque(maxlen=SPANS_MAX)
        self.stepped: deque[Stepped] = deque(maxlen=STEPS_MAX)
        self._called = called

    def copy(self) -> Trace:
        """A copy. Races with recording, so the caller must hold the lanes' lock."""
        called = self._called()
        copied = Trace(lambda: called)
        copied.key = self.key
        copied.ran, copied.waited = self.ran.copy(), self.waited.copy()
        copied.stepped = self.stepped.copy()
        return copied

    @property
    def called(self) -> list[tuple[float, float]]:
        """Start and stop of the calls into this engine."""
        return [(start, stop) for start, stop, of in self._called() if of is self.key]

    @property
    def since(self) -> float:
        """The time after which nothing was dropped; 0.0 if nothing was."""
        full = [ring[0].stop for ring in (self.ran, self.waited) if len(ring) == ring.maxlen]
        if len(called := self._called()) == called.maxlen:
            full.append(called[0][1])
        return max(full, default=0.0)


@dataclass(frozen=True, slots=True)
class Report:
    """What an engine has done since it was attached."""

    steps: int
    misses: int
    """Uses of a unit in another order than in the pass before."""
    lanes: Mapping[str, LaneUse]
    tiers: tuple[TierUse, ...]
    wall_s: float
    """Seconds since the engine was attached."""
    compute_s: float
    """`wall_s` minus the waits of the user's thread for lanes."""

    def __str__(self) -> str:
        lines = [
            f"{self.steps} steps; {self.wall_s:.2f} s since attach, "
            f"{self.wall_s - self.compute_s:.2f} s of them waiting for lanes; "
            f"{self.misses} misses (units used in another order than the one seen before)",
            f"{'lane':8} {'busy':>10} {'exposed':>10} {'moved':>10}",
        ]
        for name, use in self.lanes.items():
            if use.operations:
                spent = f"{use.busy_s:8.2f} s {use.exposed_s:8.2f} s"
                lines.append(f"{name:8} {spent} {format_bytes(use.bytes):>10}")
        return "\n".join([*lines, f"{'tier':8} {'taken':>10} of", *map(str, self.tiers)])
