"""The schedule: urgency that is lent, passages that take slots as late as can be."""

from __future__ import annotations

import random

import pytest

from offload.planning.layout import CHUNK_STAGES
from offload.program.ops import Lane, Op, Value, Verb
from offload.program.schedule import Key, Passage, Schedule, State, Task
from tests.training import some_fast


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
        run = None if of_user else lambda slot, settings: None
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


def test_a_passage_is_as_urgent_as_the_most_urgent_of_its_ops() -> None:
    run = Run()
    early = [run.passage((8, at)) for at in range(CHUNK_STAGES)]
    made = [Passage() for _ in range(2)]
    for passage, keys in zip(made, ([(9, 0), (9, 1)], [(9, 2), (7, 0), (9, 3)])):
        for key in keys:
            run.add(key, passage=passage)
        run.schedule.seal(passage)
    assert [passage.key for passage in made] == [(9, 0), (7, 0)]
    while not any(passage.started for passage in made):
        assert run.run_next() is not None
    assert made[1].started
    assert sum(one.left > 0 for one in early) == CHUNK_STAGES - 1


def test_a_sealed_passage_lends_the_urgency_of_one_op_to_what_a_sibling_waits_for() -> None:
    run = Run()
    outside = run.add((9, 0), lane=Lane.DISK)
    passage = Passage()
    run.add((9, 1), outside, passage=passage)
    run.add((1, 0), passage=passage)
    assert outside.key == (9, 0)
    run.schedule.seal(passage)
    assert outside.key == (1, 0)


def test_urgency_lent_to_one_op_of_a_passage_goes_to_what_a_sibling_waits_for() -> None:
    run = Run()
    further = run.add((9, 0), lane=Lane.H2D)
    outside = run.add((9, 0), further, lane=Lane.DISK)
    passage = Passage()
    first = run.add((8, 0), passage=passage)
    run.add((8, 0), outside, passage=passage)
    run.schedule.seal(passage)
    run.add((2, 0), first, of_user=True)
    assert first.key == passage.key == outside.key == further.key == (2, 0)


def test_a_waiting_passage_that_is_hurried_goes_before_the_others() -> None:
    run = Run()
    early = [run.passage((5, at)) for at in range(CHUNK_STAGES)]
    waiting = [run.passage((9, at)) for at in range(3)]
    run.add((1, 0), waiting[2].tasks[-1], of_user=True)
    assert waiting[2].key == (1, 0)
    hurried = [one for one in early if all(task.key == (1, 0) for task in one.tasks)]
    assert hurried == early[:1]
    while not any(one.started for one in waiting):
        assert run.run_next() is not None
    assert [one.started for one in waiting] == [False, False, True]
    assert [one.left for one in early] == [0, 2, 2, 2]


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


class Invariants:
    """What holds after every call, by the waits that the test knows itself."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.waits: dict[int, list[Task]] = {}
        """By serial, also what a cancelled task hands on."""
        self.waiting: set[Passage] = set()
        """Passages that wanted but a slot."""

    def cancelled(self, task: Task) -> None:
        for own in self.waits.values():
            if task in own:
                own += self.waits[task.serial]

    def check(self) -> None:
        passages = {t.passage for t in self.tasks if t.passage is not None and t.passage.left}
        started = {one for one in passages if one.started}
        assert len(started) <= CHUNK_STAGES
        assert len({one.slot for one in started}) == len(started)
        waiting = set[Passage]()
        for one in passages - started:
            inner = [task for task in self.tasks if task.passage is one]
            outside = [o for t in inner for o in self.waits[t.serial] if o.passage is not one]
            assert one.key <= min(task.key for task in inner)
            assert all(other.over or other.key <= one.key for other in outside)
            if all(other.over for other in outside):
                waiting.add(one)
        for task in self.tasks:
            if task.state is State.WAITING:
                live = [other for other in self.waits[task.serial] if not other.over]
                assert all(other.key <= task.key for other in live)
        for late in self.waiting & started:
            assert all(late.key <= one.key for one in self.waiting & waiting)
        if waiting:
            assert len(started) == CHUNK_STAGES
            urgent = min(one.key for one in waiting)
            slowest = (max(t.key for t in one.tasks if not t.over) for one in started)
            assert min(slowest) <= urgent, "nobody who has a slot is hurried"
        self.waiting = waiting


@pytest.mark.parametrize("seed", some_fast(range(60), fast=30))
def test_every_task_runs_once_in_order_whatever_is_waited_for_cancelled_or_lent(seed: int) -> None:
    rng = random.Random(seed)
    run = Run()
    lanes = [Lane.CPU, Lane.DISK, Lane.H2D]
    truth = Invariants()
    known, waits = truth.tasks, truth.waits
    done: set[int] = set()

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
        truth.check()
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
                truth.cancelled(task)
                run.schedule.cancel(task)
        truth.check()
        for _ in range(rng.randrange(3)):
            step()
    while step():
        pass
    assert all(task.over for task in known), "a task was left behind"
    assert done == {task.serial for task in known if not task.cancelled}
