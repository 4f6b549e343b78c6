"""The last ops of an engine, and who waited for whom: plain data in rings of fixed length.

The lanes record where they measure already, under the lock that they hold: one tuple for each op
that has run, one for each stretch in which the user's thread was blocked by a lane. What the ring
has no room for any more is forgotten, the oldest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from offload.intervals import Interval
from offload.profile import Profile
from offload.program import Lane, Op

SPANS_MAX = 1 << 14
"""Ops that are kept: some megabytes, and of most models the last ten steps or more."""

CHUNK_SPANS_MAX = 48
"""Of models with so many chunks that three steps would not fit: as many ops for each of them."""

STEPS_MAX = 1 << 10


class Ran(NamedTuple):
    """One op as it ran; times are of `time.perf_counter`. The user's compute is on the compute
    lane, with the verb forward or backward: from when it could start until the unit was at rest."""

    lane: Lane
    op: Op
    start: float
    stop: float


class Waited(NamedTuple):
    """A stretch in which the user's thread was blocked, and the lane that was the reason."""

    lane: Lane
    start: float
    stop: float


class Stepped(NamedTuple):
    """The moment of a `step()`."""

    number: int
    at: float
    misses: int
    """Uses so far that the compiled order did not foresee."""


Called = tuple[float, float, object]
"""A call into an engine, from when to when, and whose: the key of its trace."""


class Trace:
    """What an engine did last."""

    def __init__(self, called: Callable[[], deque[Called]] = deque, profile: Profile | None = None):
        """Nothing yet; calls into the engine are among those of the ring that `called` gives."""
        self.key = object()
        """Of calls, those with it are this engine's."""
        chunks = sum(len(unit.chunks) for unit in profile.units) if profile else 0
        self.ran: deque[Ran] = deque(maxlen=max(SPANS_MAX, CHUNK_SPANS_MAX * chunks))
        """In the order of their end, but across lanes only nearly so."""
        self.waited: deque[Waited] = deque(maxlen=SPANS_MAX)
        self.stepped: deque[Stepped] = deque(maxlen=STEPS_MAX)
        self._called = called

    def copy(self) -> Trace:
        """The same as of now; whoever records must not do so meanwhile."""
        called = self._called()
        copied = Trace(lambda: called)
        copied.key = self.key
        copied.ran, copied.waited = self.ran.copy(), self.waited.copy()
        copied.stepped = self.stepped.copy()
        return copied

    @property
    def called(self) -> list[Interval]:
        """Calls into this engine."""
        return [(start, stop) for start, stop, of in self._called() if of is self.key]

    @property
    def since(self) -> float:
        """From here on nothing is missing; 0.0 where nothing has been forgotten."""
        full = [ring[0].stop for ring in (self.ran, self.waited) if len(ring) == ring.maxlen]
        if len(called := self._called()) == called.maxlen:
            full.append(called[0][1])
        return max(full, default=0.0)
