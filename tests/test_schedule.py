"""The schedule: urgency that is lent, passages that take slots as late as can be."""

from __future__ import annotations

import random

import pytest

from offload.program.ops import Lane, Op, Value, Verb
from offload.program.schedule import Schedule, State, Task, Urgency
from tests.submitting import cancel
from tests.training import some_fast


def op(lane: Lane, *, of_user: bool) -> Op:
    return Op(lane, Verb.FORWARD if of_user else Verb.UPDATE, Value("state", 0, 0), (), (), 0, 0)


class Run:
    """A schedule, and tasks by name."""

    def __init__(self, slots: int = 1) -> None:
        self.schedule = Schedule(slots)
        self.serial = 0

    def add(
        self,
        key: Urgency,
        *waits: Task,
        lane: Lane = Lane.CPU,
        of_user: bool = False,
        **slots: bool,
    ) -> Task:
        self.serial += 1
        task = Task(op(lane, of_user=of_user), key, self.serial)
        for name, value in slots.items():
            setattr(task, name, value)
        self.schedule.add(task, waits)
        return task

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


def test_who_takes_a_slot_is_passed_by_while_none_is_free() -> None:
    run = Run(slots=1)
    reads = [run.add((1, 0), lane=Lane.DISK, takes_slot=True) for _ in range(2)]
    works = [run.add((1, 0), read, frees_slot=True, at_once=True) for read in reads]
    other = run.add((2, 0), lane=Lane.DISK)
    assert [run.run_next(Lane.DISK) for _ in range(3)] == [reads[0], other, None]
    urgent = run.add((0, 0))
    assert [run.run_next() for _ in range(2)] == [works[0], urgent]
    assert run.run_next(Lane.DISK) is reads[1]


def test_who_waits_for_a_cancelled_task_of_the_user_starts_when_it_is_taken_back() -> None:
    run = Run()
    before = run.add((0, 0), lane=Lane.DISK)
    task = run.add((0, 0), before, of_user=True)
    after = run.add((1, 0), task)
    cancel(run.schedule, task)
    assert after.state is State.WAITING
    assert run.run_next(Lane.DISK) is before
    assert run.run_next() is after


class Invariants:
    """What holds after every call, by the waits that the test knows itself."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.waits: dict[int, list[Task]] = {}
        """By serial, also what a cancelled task hands on."""

    def cancelled(self, task: Task) -> None:
        for own in self.waits.values():
            if task in own:
                own += self.waits[task.serial]

    def check(self) -> None:
        for task in self.tasks:
            if task.state is State.WAITING:
                live = [other for other in self.waits[task.serial] if not other.over]
                assert all(other.key <= task.key for other in live)


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

    def add(outside: list[Task]) -> Task:
        key = (rng.randrange(4), rng.randrange(5))
        of_user = rng.random() < 0.2
        task = run.add(key, *outside, lane=rng.choice(lanes), of_user=of_user)
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
        run.schedule.finish(task)
        done.add(task.serial)
        truth.check()
        return True

    for _ in range(rng.randrange(20, 120)):
        known.append(add(some()))
        if rng.random() < 0.1:
            task = rng.choice(known)
            if task.state in (State.WAITING, State.READY):
                truth.cancelled(task)
                cancel(run.schedule, task)
        truth.check()
        for _ in range(rng.randrange(3)):
            step()
    while step():
        pass
    assert all(task.over for task in known), "a task was left behind"
    assert done == {task.serial for task in known if not task.cancelled}
