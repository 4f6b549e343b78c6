"""Streams and events with CUDA's rules of order, in logical time, and who may touch what when.

[Note: Logical time]
Work that is queued on a stream is done when the clock has come to its end, and only then is its
function called: what it reads is what lies in memory then. An item begins when the one before it
on its stream has ended, and takes a random time; the clock moves a little whenever the host calls,
and as far as it must when the host waits. The same calls and seed give the same order.

[Note: Races]
Order that was lucky is still wrong, so every access is also held against what *guarantees* its
order: a stream's own order, the events that it waited for, and what the host had waited for when
it queued the work (vector clocks). An access that overlaps one that is not ordered before it, where
either writes, is a race. The threads of the host count as one: what one has waited for counts for
whoever queues work after that. So waits among threads show in the bits only, or in races that
come of queueing too early.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Clock = dict[int, int]
"""By number of a stream, the item up to which all is ordered before."""

DURATIONS = (0.0, 1.0, 10.0, 100.0)
"""An item takes up to one of these."""


def _none() -> None:
    """Nobody says which stream is current."""


class Access(NamedTuple):
    """Bytes of a memory that some work touches."""

    memory: Hashable
    start: int
    stop: int
    writes: bool
    holder: Any
    """Keeps the memory from being another's."""


class _Item(NamedTuple):
    issued: float
    duration: float
    run: Callable[[], None] | None
    """None: it waits for an event."""
    after: Event | None


@dataclass(eq=False)
class Stream:
    """A queue of work."""

    number: int
    items: deque[_Item] = field(default_factory=deque)
    ends: list[float] = field(default_factory=list)
    """When each item was done."""
    queued: int = 0
    clock: Clock = field(default_factory=dict)
    """What is ordered before what is queued next."""


class Event:
    """A point in a stream (`offload.task.Fence`)."""

    def __init__(self, timeline: Timeline, stream: Stream):
        """After all that is queued there now."""
        self._timeline = timeline
        self.stream = stream
        self.item = stream.queued
        self.clock = {**stream.clock, stream.number: stream.queued}

    @property
    def passed(self) -> bool:
        return len(self.stream.ends) >= self.item

    def synchronize(self) -> None:
        """Let the host wait."""
        self._timeline.host_waits(self)

    def wait(self) -> None:
        """Let the current stream wait."""
        self._timeline.stream_waits(self._timeline.current, self)

    def query(self) -> bool:
        """Whether all before it is done, which the host then knows."""
        return self._timeline.query(self)


class Timeline:
    """All streams of a device, its clock, and what was found wrong."""

    def __init__(self) -> None:
        """Nothing is queued; `change` comes first."""
        self.lock = threading.RLock()
        self.races: list[str] = []
        self._now = 0.0
        self._host: Clock = {}
        """What the host has waited for."""
        self._streams: list[Stream] = []
        self._accesses: dict[Hashable, list[tuple[int, int, str, Access]]] = {}
        """Of every memory those that the host does not know to be over: stream, item, what."""
        self._local = threading.local()
        self.default = self.new_stream()

    def change(self, seed: int, host_pace: float) -> None:
        """Go on by these delays; between two calls of the host `host_pace` passes at most."""
        with self.lock:
            self._random, self._host_pace = random.Random(seed), host_pace

    def new_stream(self) -> Stream:
        with self.lock:
            self._streams.append(Stream(len(self._streams)))
            return self._streams[-1]

    @property
    def current(self) -> Stream:
        """The current stream of the calling thread."""
        chosen = getattr(self._local, "choose", _none)()
        return chosen or getattr(self._local, "stream", self.default)

    @current.setter
    def current(self, stream: Stream) -> None:
        self._local.stream = stream

    def finish(self) -> None:
        """Do all that is queued."""
        with self.lock:
            while self._step(float("inf")):
                pass

    def random(self) -> float:
        with self.lock:
            return self._random.random()

    def choose(self, stream: Callable[[], Stream | None]) -> None:
        """Let `stream()` say what the current stream of the calling thread is, or None."""
        self._local.choose = stream

    # -- what the host calls ------------------------------------------------------------------

    def queue(self, what: str, accesses: Iterable[Access], run: Callable[[], None]) -> None:
        """Queue work on the current stream."""
        with self.lock:
            stream = self.current
            self._order(stream, self._host)
            self._check(what, stream.number, stream.clock, accesses, stream.queued + 1)
            self._append(stream, run, None)

    def host_touches(self, what: str, accesses: Iterable[Access]) -> None:
        """The host itself reads or writes, now."""
        with self.lock:
            self._pass()
            self._check(what, -1, self._host, accesses, None)

    def host_waits(self, event: Event) -> None:
        with self.lock:
            while not event.passed:
                assert self._step(float("inf")), "what is waited for was never queued"
            self._host_knows(event.clock)

    def host_waits_for_all(self) -> None:
        with self.lock:
            for stream in list(self._streams):
                self.host_waits(Event(self, stream))

    def stream_waits(self, stream: Stream, event: Event) -> None:
        with self.lock:
            self._order(stream, event.clock)
            self._append(stream, None, event)

    def query(self, event: Event) -> bool:
        with self.lock:
            self._pass()
            if event.passed:
                self._host_knows(event.clock)
            return event.passed

    # -- time, see [Note: Logical time] -------------------------------------------------------

    def _append(self, stream: Stream, run: Callable[[], None] | None, after: Event | None) -> None:
        duration = self._random.choice(DURATIONS) * self._random.random()
        stream.items.append(_Item(self._now, duration, run, after))
        stream.queued += 1
        self._pass()

    def _pass(self) -> None:
        """Some time passes."""
        until = self._now + self._host_pace * self._random.random()
        while self._step(until):
            pass
        self._now = max(self._now, until)

    def _step(self, until: float) -> bool:
        """Do what ends next, if it ends by `until`."""
        best, best_end = None, until
        for stream in self._streams:
            if not stream.items:
                continue
            item = stream.items[0]
            begin = max(item.issued, stream.ends[-1] if stream.ends else 0.0)
            if item.after is not None:
                if not item.after.passed:
                    continue
                passed = item.after.stream.ends[: item.after.item][-1:]
                end = max([begin, *passed])
            else:
                end = begin + item.duration
            if (best is None and end <= best_end) or end < best_end:
                best, best_end = stream, end
        if best is None:
            return False
        item = best.items.popleft()
        self._now = max(self._now, best_end)
        if item.run is not None:
            item.run()
        best.ends.append(best_end)
        return True

    # -- order, see [Note: Races] -------------------------------------------------------------

    def _order(self, stream: Stream, clock: Clock) -> None:
        for number, item in clock.items():
            if stream.clock.get(number, 0) < item:
                stream.clock[number] = item

    def _host_knows(self, clock: Clock) -> None:
        for number, item in clock.items():
            if self._host.get(number, 0) < item:
                self._host[number] = item
        for memory, accesses in list(self._accesses.items()):
            left = [one for one in accesses if one[1] > self._host.get(one[0], 0)]
            if left:
                self._accesses[memory] = left
            else:
                del self._accesses[memory]

    def _check(
        self, what: str, number: int, clock: Clock, accesses: Iterable[Access], item: int | None
    ) -> None:
        new = []
        for access in accesses:
            for other, at, who, before in self._accesses.get(access.memory, ()):
                if (
                    (access.writes or before.writes)
                    and other != number
                    and at > clock.get(other, 0)
                    and before.start < access.stop
                    and access.start < before.stop
                ):
                    self.races.append(
                        f"{what} {'writes' if access.writes else 'reads'} on stream {number} what "
                        f"{who} on stream {other} {'writes' if before.writes else 'reads'}"
                    )
            if item is not None:
                new.append((number, item, what, access))
        for one in new:
            self._accesses.setdefault(one[3].memory, []).append(one)
