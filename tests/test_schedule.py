"""The schedule: urgency that is lent, passages that take slots as late as can be."""

from __future__ import annotations

import random

import pytest

from offload.layout import CHUNK_STAGES, Place
from offload.program import IN_RING, Lane, Op, Use, Value, Verb
from offload.schedule import Schedule
from offload.task import Key, Passage, State, Task


def op(lane: Lane = Lane.CPU) -> Op:
    return Op(lane, Verb.UPDATE, Value("state", 0, 0), (), (), 0, 0)


class Run:
    """A schedule, and tasks by name."""

    def __init__(self) -> None:
        self.ready: list[Task] = []
        self.schedule = Schedule(lambda task, last: self.ready.append(task))
        self.serial = 0

    def add(
        self,
        key: Key,
        *waits: Task,
        lane: Lane = Lane.CPU,
        passage: Passage | None = None,
        of_user: bool = False,
    ) -> Task:
        self.serial += 1
        run = None if of_user else lambda: None
        task = Task(op(lane), run, key, self.serial, passage)
        self.schedule.add(task, waits)
        return task

    def passage(self, key: Key, *waits: Task, ops: int = 2) -> Passage:
        """One op after another, the first of them behind `waits`."""
        made = Passage()
        last: tuple[Task, ...] = waits
        for _ in range(ops):
            last = (self.add(key, *last, passage=made),)
        self.schedule.seal(made)
        return made

    def run_next(self, lane: Lane = Lane.CPU) -> Task | None:
        task = self.schedule.take(lane)
        if task is not None:
            self.schedule.finish(task)
        return task


def test_who_waits_lends_its_urgency_through_the_chain() -> None:
    run = Run()
    first = run.add((5, 0))
    second = run.add((6, 0), first, lane=Lane.DISK)
    run.add((3, 0))
    assert run.schedule.first(Lane.CPU) is not first
    run.add((1, 0), second, of_user=True)
    assert (first.key, second.key) == ((1, 0), (1, 0))
    assert run.run_next() is first
    assert run.run_next(Lane.DISK) is second
    assert run.run_next() is not None
    assert run.run_next() is None


def test_passages_start_when_nothing_outside_is_waited_for() -> None:
    run = Run()
    outside = run.add((0, 0), of_user=True)
    passage = run.passage((1, 0), outside)
    assert not passage.started
    outside.go(State.RUNNING)
    run.schedule.finish(outside)
    assert passage.started
    assert passage.at(Use(Place("cpu", "state_chunk", IN_RING), Value("state", 0, 0))) == Use(
        Place("cpu", "state_chunk", passage.slot), Value("state", 0, 0)
    )
    elsewhere = Use(Place("cpu", "home"), Value("state", 0, 0))
    assert passage.at(elsewhere) == elsewhere


def test_the_most_urgent_passage_gets_the_next_slot_whenever_it_came() -> None:
    run = Run()
    early = [run.passage((9, at)) for at in range(CHUNK_STAGES + 3)]
    assert [one.started for one in early] == [True] * CHUNK_STAGES + [False] * 3
    assert sorted(one.slot for one in early[:CHUNK_STAGES]) == list(range(CHUNK_STAGES))
    urgent = run.passage((1, 0))
    assert not urgent.started
    while not urgent.started:
        assert run.run_next() is not None
    assert not any(one.started for one in early[CHUNK_STAGES:])


def test_a_passage_that_waits_hurries_the_one_nearest_to_its_end() -> None:
    run = Run()
    early = [run.passage((9, at), ops=3) for at in range(CHUNK_STAGES)]
    last = early[-1]
    for _ in range(2):
        task = next(t for t in last.tasks if t.state is State.READY)
        task.go(State.RUNNING)
        run.schedule.finish(task)
    run.passage((1, 0))
    left = next(t for t in last.tasks if not t.over)
    assert left.key == (1, 0)
    assert run.schedule.take(Lane.CPU) is left
    assert all(t.key[0] == 9 for one in early[:-1] for t in one.tasks)


def test_urgency_is_lent_to_what_a_passage_waits_for_before_it_starts() -> None:
    run = Run()
    outside = run.add((7, 0), lane=Lane.DISK)
    passage = run.passage((8, 0), outside)
    run.add((2, 0), passage.tasks[-1], of_user=True)
    assert outside.key == passage.key == (2, 0)


def test_who_waits_for_a_cancelled_task_of_the_user_starts_when_it_is_taken_back() -> None:
    run = Run()
    before = run.add((0, 0), lane=Lane.DISK)
    task = run.add((0, 0), before, of_user=True)
    passage = run.passage((1, 0), task)
    run.schedule.cancel(task)
    assert not passage.started
    assert run.run_next(Lane.DISK) is before
    assert passage.started
    with pytest.raises(AssertionError, match="not taken back"):
        run.schedule.cancel(passage.tasks[0])


@pytest.mark.parametrize("seed", range(60))
def test_every_task_runs_once_in_order_whatever_is_waited_for_cancelled_or_lent(seed: int) -> None:
    rng = random.Random(seed)
    run = Run()
    lanes = [Lane.CPU, Lane.DISK, Lane.H2D]
    known: list[Task] = []
    waits: dict[int, list[Task]] = {}
    done: set[int] = set()
    holding = 0

    def some() -> list[Task]:
        return rng.sample(known, min(len(known), rng.choice([0, 0, 1, 2, 3])))

    def add(outside: list[Task], passage: Passage | None) -> Task:
        key = (rng.randrange(4), rng.randrange(5))
        of_user = passage is None and rng.random() < 0.2
        lane = rng.choice(lanes)
        task = run.add(key, *outside, lane=lane, passage=passage, of_user=of_user)
        waits[task.serial] = outside
        return task

    def step() -> bool:
        ready = [t for t in known if t.of_user and t.state is State.READY]
        lane = rng.choice(lanes)
        task = run.schedule.first(lane)
        if ready and rng.random() < 0.5:
            task = rng.choice(ready)
            task.go(State.RUNNING)
        elif task is not None:
            others = [t for t in known if t.op.lane is lane and t.state is State.READY]
            assert task.key == min(t.key for t in others if not t.of_user)
            assert run.schedule.take(lane) is task
        else:
            return any(run.schedule.first(lane) for lane in lanes) or bool(ready)
        assert all(other.over for other in waits[task.serial])
        if task.passage is not None:
            assert task.passage.started
        run.schedule.finish(task)
        done.add(task.serial)
        return True

    for _ in range(rng.randrange(20, 120)):
        if rng.random() < 0.4:
            passage = Passage()
            inner: list[Task] = []
            for _ in range(rng.randrange(1, 5)):
                inner.append(add(some() + inner[-1:], passage))
            known += inner
            run.schedule.seal(passage)
        else:
            known.append(add(some(), None))
        if rng.random() < 0.1:
            task = rng.choice(known)
            if task.passage is None and task.state in (State.WAITING, State.READY):
                run.schedule.cancel(task)
        for _ in range(rng.randrange(3)):
            step()
        started = {id(t.passage): t.passage for t in known if t.passage and t.passage.started}
        holding = sum(one.left > 0 for one in started.values())
        assert holding <= CHUNK_STAGES
        slots = [one.slot for one in started.values() if one.left]
        assert len(slots) == len(set(slots))
    while step():
        pass
    assert all(task.over for task in known), "a task was left behind"
    assert done == {task.serial for task in known if not task.cancelled}
