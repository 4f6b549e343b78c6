"""Lanes on a paced accelerator: random work gives what the same work gives one by one.

Work is queued as the executor queues it (waits by the scoreboard), on places that hold one number:
homes in CPU memory, slots on the device, staging slots of chunks. Each piece of it makes a number
of those that it reads, by arithmetic in which any other order shows.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from offload.program.ops import Lane, Op, Value, Verb
from offload.program.schedule import Key, Scoreboard, Task
from offload.runtime.executor import ENGINE_LANES
from offload.runtime.lanes import Lanes
from tests.paced import Paced, paced
from tests.submitting import submit

HOMES, SLOTS = 3, 3
OPS = 24

Cell = tuple[str, int]


def mixed(number: Any, other: Any) -> Any:
    """Depends on the order of what is mixed in; wraps around alike for Python and int64."""
    return number * 31 + other * 7 + 1


def wrapped(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def op(lane: Lane) -> Op:
    return Op(lane, Verb.MOVE, Value("weight", 0, 0), (), (), 0, 0)


class Bench:
    """Lanes over some places; and the same work, one piece after the other, as it should be."""

    def __init__(self, device: Paced, random: Random):
        self.device, self.random = device, random
        self.lanes = Lanes(ENGINE_LANES, device=device)
        self.board: Scoreboard[Task] = Scoreboard(
            taken_back=lambda task: task.cancelled,
            fixed=lambda task: task.begun,
            settled=lambda task: task.over,
        )
        self.places: dict[Cell, torch.Tensor] = {}
        for number in range(HOMES):
            self.places["home", number] = torch.full((1,), number)
        for number in range(SLOTS):
            self.places["slot", number] = self._slot()
        device.drain()
        self.serial = 0
        self.log: list[tuple[Task, Cell, tuple[Cell, ...], bool]] = []
        """All that was queued: what it writes, what it reads, and whether it only copies."""
        self.reserved: deque[tuple[Task, Cell, Cell]] = deque()
        self.looked: list[tuple[int, Cell, int]] = []
        """After how much was queued which place held which number."""

    def _slot(self) -> torch.Tensor:
        return self.device.empty((1,), torch.int64).zero_()

    # -- work -----------------------------------------------------------------------------------

    def _submit(
        self,
        lane: Lane,
        into: Cell,
        sources: tuple[Cell, ...],
        run: Callable[[], None] | None,
    ) -> Task:
        self.serial += 1
        key: Key = (0, self.random.randrange(OPS))
        waits = self.board.waits(sources, [into])
        task = submit(self.lanes, op(lane), waits, key, run)
        self.board.note(task, sources, [into])
        return task

    def _copy(self, into: Cell, source: Cell) -> None:
        self.device.copy(self.places[into], self.places[source])

    def _mix(self, into: Cell, other: Cell) -> None:
        place = self.places[into]
        place.copy_(mixed(place, self.places[other]))

    def move(self) -> None:
        """A copy between a home and a slot, by its lane."""
        home, slot = ("home", self.random.randrange(HOMES)), ("slot", self.random.randrange(SLOTS))
        into, source = (slot, home) if self.random.random() < 0.6 else (home, slot)
        lane = Lane.H2D if into is slot else Lane.D2H
        task = self._submit(lane, into, (source,), partial(self._copy, into, source))
        self.log.append((task, into, (source,), True))

    def mix(self, lane: Lane, kind: str, count: int) -> None:
        """Arithmetic by a lane, on homes or on slots."""
        into, other = ((kind, self.random.randrange(count)) for _ in range(2))
        task = self._submit(lane, into, (into, other), partial(self._mix, into, other))
        self.log.append((task, into, (into, other), False))

    def reserve(self) -> None:
        """Arithmetic on slots by the user, later."""
        into, other = (("slot", self.random.randrange(SLOTS)) for _ in range(2))
        task = self._submit(Lane.COMPUTE, into, (into, other), None)
        self.log.append((task, into, (into, other), False))
        self.reserved.append((task, into, other))

    def use(self) -> None:
        """The user does what was reserved first, on one stream or going on on another."""
        while self.reserved:
            task, into, other = self.reserved.popleft()
            if not task.cancelled:
                with self.device.unordered() if self.random.random() < 0.3 else nullcontext():
                    self.lanes.begin(task)
                    if into != other and self.random.random() < 0.3:
                        self._go_on_elsewhere(task, other)
                    self._mix(into, other)
                    self.lanes.finish(task)
                return

    def _go_on_elsewhere(self, task: Task, only_read: Cell) -> None:
        """A part of it, which leaves all as it is, on a stream for which the rest does not wait."""
        with self.device.unordered():
            self.lanes.join(task)
            self.places[only_read].clone()

    def cancel(self) -> None:
        """Take back what was queued last, if it has not begun."""
        self.lanes.cancel([task for task, *_ in self.log[-self.random.randrange(1, 4) :]])

    def look(self) -> None:
        """Wait until a place is through, and read it on the host."""
        while self.reserved:
            self.use()
        cell = self.random.choice(list(self.places))
        self.lanes.wait(self.board.waits([cell], []))
        with self.device.unordered():
            self.looked.append((len(self.log), cell, int(self.places[cell].item())))

    # -- what it should be ----------------------------------------------------------------------

    def check(self) -> None:
        """Hold all that was seen against the work done one by one."""
        while self.reserved:
            self.use()
        self.lanes.wait([task for task, *_ in self.log])
        self.device.timeline.finish()
        assert not self.device.timeline.races, set(self.device.timeline.races)
        held: dict[Cell, int] = dict.fromkeys(self.places, 0)
        held.update({("home", number): number for number in range(HOMES)})
        looked = deque(self.looked)
        for count in range(len(self.log) + 1):
            while looked and looked[0][0] == count:
                _, cell, number = looked.popleft()
                assert number == held[cell]
            if count < len(self.log):
                task, into, sources, copies = self.log[count]
                if not task.cancelled:
                    numbers = [held[source] for source in sources]
                    held[into] = wrapped(numbers[0] if copies else mixed(*numbers))
        for cell, place in self.places.items():
            assert int(place.item()) == held[cell], cell


@contextmanager
def bench(seed: int) -> Iterator[Bench]:
    random = Random(seed)
    with paced() as device:
        device.change(seed, host_pace=random.choice([0.0, 1.0, 30.0]), host_pauses_s=0.0)
        made = Bench(device, random)
        try:
            yield made
        finally:
            made.lanes.close()


def try_schedule(seed: int) -> None:
    """Random work, queued and taken back while it runs."""
    with bench(seed) as made:
        work: list[Callable[[], None]] = [made.move, made.move, made.reserve, made.reserve]
        work += [made.use, made.use, made.cancel, made.look]
        work += [partial(made.mix, Lane.CPU, "home", HOMES)]
        work += [partial(made.mix, Lane.COMPUTE, "slot", SLOTS)]
        for _ in range(OPS):
            made.random.choice(work)()
        made.check()


def schedules(count: int) -> Any:
    """So many; nothing is shrunk, as much depends on threads."""
    drawn = given(seed=st.integers(0, 1 << 32))
    return lambda test: settings(
        max_examples=count, deadline=None, phases=[Phase.generate], derandomize=count < 1000
    )(drawn(test))


@schedules(50)
def test_work_in_lanes_is_as_work_one_by_one(seed: int) -> None:
    try_schedule(seed)


@pytest.mark.slow
@pytest.mark.timeout(0)
@schedules(int(os.environ.get("PACED_SCHEDULES", "10000")))
def test_work_in_lanes_is_as_work_one_by_one_many_times(seed: int) -> None:
    try_schedule(seed)
