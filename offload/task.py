"""One op in one step: its life, its urgency, and who waits for it. Pure.

[Note: Tasks]
A task is one op in one step. It starts when the tasks it waits for are over, and not before its
passage, if it is one of a chunk's (a passage is a chunk on its way through the staging slots). Its
life:

    WAITING --all waits over, passage started--> READY --lane or user takes it--> RUNNING --> DONE
       |                                           |
       +--------cancel (never in a passage)--------+--> CANCELLED

Who waits for a cancelled task waits for what that was waiting for. Tasks without a function are the
user's own compute: the caller says when they begin and end. `Schedule` moves tasks through this
life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Protocol

from offload.program import IN_RING, Lane, Op, Use


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

LAST: Key = (1 << 62, 0)
"""Less urgent than anything."""


class Fence(Protocol):
    """Work that the device has still to finish (an event)."""

    def synchronize(self) -> None:
        """Block until it has."""

    def wait(self) -> None:
        """Let the current stream wait until it has."""

    def query(self) -> bool:
        """Whether it has."""


Run = Callable[[], Iterator[Fence | None] | None]
"""What a task does: at once, or in pieces, between which its lane may do what is more urgent, once
it has waited for the fence that comes, if any."""


class Task:
    """One op in one step."""

    __slots__ = (
        "began_at",
        "begun",
        "cancelled",
        "fences",
        "followers",
        "history",
        "key",
        "missing",
        "op",
        "over",
        "passage",
        "ready_at",
        "run",
        "serial",
        "state",
        "streams",
        "waits",
    )

    def __init__(
        self,
        op: Op,
        run: Run | None,
        key: Key,
        serial: int,
        passage: Passage | None = None,
    ):
        self.op = op
        self.run = run
        self.key = key
        self.serial = serial
        self.passage = passage
        self.missing = 0
        """How many it waits for."""
        self.followers: list[Task] = []
        self.waits: list[Task] = []
        """Those it still waits for, or waited for."""
        self.state = State.WAITING
        self.begun = self.cancelled = self.over = False
        """Whether it is too late to cancel it, it was taken back, nobody needs to wait for it."""
        self.ready_at = self.began_at = 0.0
        self.history: tuple[tuple[Lane, float], ...] = ()
        self.fences: list[Fence] = []
        """What has to be through on the device before it, and once it is done, of its own."""
        self.streams: list[object] = []
        """Those that the user's compute has used so far, but for the one on which it ends."""

    @property
    def of_user(self) -> bool:
        """Whether it is the user's own compute."""
        return self.run is None

    @property
    def settled(self) -> bool:
        """Whether it is over on the device too."""
        return self.over and not (self.fences and self.fenced)

    @property
    def fenced(self) -> bool:
        """Whether the device has still to finish what comes before it, or once over, of its own."""
        return bool(self.fences) and not all(fence.query() for fence in self.fences)

    def go(self, state: State) -> None:
        """Move to `state`."""
        assert (self.state, state) in _LEGAL, (self.state, state, self.op)
        self.begun = state is _RUNNING or state is _DONE
        self.cancelled = state is _CANCELLED
        self.state = state
        self.over = state is _DONE or state is _CANCELLED


class Passage:
    """A chunk on its way through the staging slots, see [Note: Passages] of `schedule`."""

    __slots__ = ("key", "left", "missing", "serial", "slot", "tasks")

    def __init__(self) -> None:
        self.slot = -1
        """The slot of every staging ring that is its own from start to end; -1 before."""
        self.tasks: list[Task] = []
        self.left = 0
        """Tasks that are not over."""
        self.missing = 1
        """Tasks outside it that its own wait for, and its sealing."""
        self.key = LAST
        """As urgent as the most urgent of its tasks, and of those that wait for it."""
        self.serial = 0

    @property
    def started(self) -> bool:
        """Whether it has its slot."""
        return self.slot >= 0


def in_slot(use: Use, slot: int) -> Use:
    """Where `use` of a chunk's passage really is, once that has its slot."""
    if use.place.number != IN_RING:
        return use
    return Use(use.place._replace(number=slot), use.value)
