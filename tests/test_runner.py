"""The native runner against the pure reference of its order; both runners on tasks that fail."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from offload.planning.layout import Place
from offload.program.ops import Lane, Op, Use, Value, Verb
from offload.program.schedule import Schedule, Scoreboard, State, Task
from offload.runtime.native import RUNNER_VARIABLE, Native, native_runner
from offload.runtime.works import At, Copy, Work
from tests.submitting import cancel
from tests.training import some_fast

extension = pytest.importorskip("offload.runtime._runner", reason="not compiled here")

LANES = (Lane.H2D, Lane.CPU)
HANGS_S = 20.0
"""Whoever has not returned by then never will."""


def op(
    lane: Lane, deadline: int = 0, *, user: bool = False, reads: Any = (), writes: Any = ()
) -> Op:
    """An op whose places are numbers."""
    uses = [[Use(Place("cpu", "test", n), Value("state", n)) for n in of] for of in (reads, writes)]
    verb = Verb.FORWARD if user else Verb.UPDATE
    return Op(lane, verb, Value("state", 0, 0), tuple(uses[0]), tuple(uses[1]), 0, deadline)


def test_the_scoreboard_keeps_reads_behind_writes_and_writes_behind_both() -> None:
    board: Scoreboard[Task] = Scoreboard()
    write, one, two, again = (Task(op(Lane.CPU), (0, 0), serial) for serial in range(4))
    board.note(write, (), ("a",))
    assert board.waits(("a",), ()) == [write]
    assert board.waits(("b",), ("c",)) == []
    board.note(one, ("a",), ())
    board.note(two, ("a",), ("b",))
    assert board.waits(("a",), ()) == [write]
    assert set(board.waits((), ("a",))) == {write, one, two}
    assert set(board.waits(("b",), ("a",))) == {write, one, two}
    board.note(again, ("a",), ("a",))
    assert board.waits((), ("a",)) == [again]
    again.go(State.CANCELLED)
    assert set(board.waits((), ("a",))) == {write, one, two}
    assert board.waits(("a",), ()) == [write]


# -- order -------------------------------------------------------------------------------------


class Pure:
    """The order of starts, by `Schedule` and `Scoreboard`."""

    def __init__(self) -> None:
        self.schedule = Schedule()
        self.board: Scoreboard[Task] = Scoreboard()
        self.serial = 0

    def start(self, ops: list[Op], number: int) -> list[Task]:
        tasks = []
        for one in ops:
            self.serial += 1
            cells = [use.place for use in one.reads], [use.place for use in one.writes]
            task = Task(one, (number, one.deadline), self.serial)
            self.schedule.add(task, self.board.waits(*cells))
            self.board.note(task, *cells)
            tasks.append(task)
        return tasks


class Pair:
    """The same done to both; whatever they answer must be the same."""

    def __init__(self) -> None:
        self.pure, self.native = Pure(), Native(threads=False)
        self.tasks: list[tuple[Task, Any]] = []
        self.running: list[tuple[Task, Any]] = []
        self.started: list[int] = []

    def start(self, ops: list[Op], number: int) -> None:
        works = [(one, None if one.verb is Verb.FORWARD else Work()) for one in ops]
        others = self.native.start(self.native.phase(works), number)
        self.tasks += zip(self.pure.start(ops, number), others, strict=True)

    def take(self, lane: Lane) -> None:
        task, other = self.pure.schedule.take(lane), self.native.first(lane)
        assert (task and task.serial) == (other and other.serial)
        if task is not None:
            self.begun(task, other)

    def begin(self, pair: tuple[Task, Any]) -> None:
        began = pair[0].state is State.READY
        assert self.native.begin(pair[1], 0.0) == began
        if began:
            pair[0].go(State.RUNNING)
            self.begun(*pair)

    def begun(self, task: Task, other: Any) -> None:
        self.running.append((task, other))
        self.started.append(task.serial)

    def finish(self, pair: tuple[Task, Any]) -> None:
        self.running.remove(pair)
        self.pure.schedule.finish(pair[0])
        self.native.finish(pair[1])

    def cancel(self, pairs: list[tuple[Task, Any]]) -> None:
        for task, _ in pairs:
            if task.state in (State.WAITING, State.READY):
                cancel(self.pure.schedule, task)
        self.native.cancel([other for _, other in pairs])

    def look(self) -> None:
        """All that can be seen of every task, and of the places."""
        board, other_board = ([one.serial for one in of] for of in (self.all(), self.native.all()))
        assert sorted(board) == sorted(other_board)
        for task, other in self.tasks:
            key, other_waits = self.native.look(other)
            assert task.over or task.key == key
            for name in ("over", "begun", "cancelled", "of_user"):
                assert getattr(task, name) == getattr(other, name), name
            if not task.over:
                assert [one.serial for one in task.waits if not one.over] == other_waits

    def all(self) -> list[Task]:
        return self.pure.board.all()


@pytest.mark.parametrize("seed", some_fast(range(60), fast=30))
def test_random_ops_start_in_the_order_of_the_reference(seed: int) -> None:
    luck, pair = random.Random(seed), Pair()
    cells = range(luck.choice([2, 6, 20]))

    def drawn(most: int, *, user: bool = False) -> Op:
        touched = [luck.sample(cells, luck.randrange(most)) for _ in range(2)]
        lane, deadline = luck.choice(LANES), luck.randrange(6)
        return op(lane, deadline, user=user, reads=touched[0], writes=touched[1])

    for step in range(150):
        what = luck.random()
        if what < 0.35:
            pair.start([drawn(3, user=luck.random() < 0.3)], luck.randrange(4))
        elif what < 0.45:
            pair.start([drawn(2) for _ in range(luck.randrange(1, 4))], luck.randrange(4))
        elif what < 0.55:
            pair.cancel(luck.sample(pair.tasks, min(len(pair.tasks), luck.randrange(3))))
        elif what < 0.75:
            pair.take(luck.choice(LANES))
        elif what < 0.85 and (mine := [both for both in pair.tasks if startable(both[0])]):
            pair.begin(luck.choice(mine))
        elif pair.running:
            pair.finish(luck.choice(pair.running))
        if step % 10 == 0:
            pair.look()
    while any(not task.over for task, _ in pair.tasks):
        before = len(pair.started)
        for lane in LANES:
            pair.take(lane)
        for both in [one for one in pair.tasks if startable(one[0])]:
            pair.begin(both)
        assert pair.running or len(pair.started) > before
        while pair.running:
            pair.finish(pair.running[0])
    pair.look()
    assert len(set(pair.started)) == len(pair.started) > 10


def startable(task: Task) -> bool:
    return task.of_user and not task.begun and not task.over


# -- lanes -------------------------------------------------------------------------------------


def copy_of(into: torch.Tensor, source: torch.Tensor) -> Work:
    return Work([Copy(At(into), At(source))])


@contextmanager
def lanes(**options: Any) -> Iterator[Native]:
    threads = len(os.listdir("/proc/self/task"))
    made = Native(**options)
    try:
        yield made
    finally:
        made.stop(closing=True)
        assert len(os.listdir("/proc/self/task")) == threads


def started(made: Native, one: Op, work: Work | None, number: int = 0) -> Any:
    return made.start(made.phase([(one, work)]), number)[0]


def ended(made: Native, task: Any) -> bool:
    until = time.monotonic() + HANGS_S
    while not made.over(task, 0.1) and not made.failed and time.monotonic() < until:
        pass
    return bool(task.over)


def test_copies_are_done_by_the_lane_itself_and_counted() -> None:
    source = torch.arange(5000).to(torch.uint8)
    into = [torch.zeros_like(source) for _ in range(2)]
    with lanes() as made:
        gate = started(made, op(Lane.COMPUTE, user=True, writes=[0]), None)
        copies = [
            started(made, replace(op(Lane.H2D, at, reads=[0]), bytes=5000), copy_of(one, source))
            for at, one in enumerate(into)
        ]
        time.sleep(0.02)
        assert not any(one.begun for one in copies)
        assert made.begin(gate, 0.0)
        made.finish(gate)
        assert all(ended(made, one) for one in copies)
        assert all(torch.equal(one, source) for one in into)
        seconds, moved, operations = made.used(Lane.H2D)
        assert seconds > 0
        assert (moved, operations) == (10000, 2)
        assert [one.op.lane for one in made.ran()] == [Lane.COMPUTE, Lane.H2D, Lane.H2D]


def test_a_small_copy_is_done_by_who_makes_it_ready_where_its_lane_sleeps() -> None:
    source = torch.arange(128 << 10).to(torch.uint8)
    with lanes() as made:
        for number in range(1000):  # The first may come before the lane sleeps.
            into = torch.zeros_like(source)
            task = started(made, op(Lane.H2D, number), copy_of(into, source))
            at_hand = task.over
            assert ended(made, task)
            assert torch.equal(into, source)
            if at_hand:
                return
    pytest.fail("every copy has woken the lane")


def test_what_must_not_be_is_refused_and_changes_nothing() -> None:
    made = Native(threads=False)
    task = started(made, op(Lane.CPU), Work())
    with pytest.raises(RuntimeError, match="what is finished has begun"):
        made.finish(task)
    assert made.first(Lane.CPU) is task
    made.finish(task)
    with pytest.raises(RuntimeError, match="what is finished has begun"):
        made.finish(task)
    with pytest.raises(ValueError, match="was given no memory"):
        extension.copies([((0, 0), (16, 0), 8)], False)
    with pytest.raises(ValueError, match="does not fit the operation"):
        made._sweep("exact", "bfloat16", [(1, 0, 0, 8, 8)], [0, 0], there=False)
    mine = started(made, op(Lane.COMPUTE, user=True), None)
    made.cancel([mine])
    with pytest.raises(RuntimeError, match="what begins has not begun"):
        made.begin(mine, 0.0)


def test_python_serves_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUNNER_VARIABLE, raising=False)
    assert native_runner() is extension
    monkeypatch.setenv(RUNNER_VARIABLE, "python")
    assert native_runner() is None


# -- pace, waits, failures, the end --------------------------------------------------------------


def at_pace(seconds: dict[Lane, float]) -> Callable[[Op, float], float]:
    return lambda op, since: since + seconds.get(op.lane, 0.0)


def test_a_wait_leads_back_to_the_lanes_that_caused_it() -> None:
    into, source = torch.zeros(64), torch.ones(64)
    with lanes(pace=at_pace({Lane.D2H: 0.1, Lane.H2D: 0.04})) as made:
        first = op(Lane.D2H, writes=[0])
        second = op(Lane.H2D, reads=[0], writes=[1])
        mine = op(Lane.COMPUTE, user=True, reads=[1])
        since = time.perf_counter()
        made.start(made.phase([(one, copy_of(into, source)) for one in (first, second)]), 0)
        task = started(made, mine, None)
        while not made.begin(task, 0.1):
            assert time.perf_counter() - since < HANGS_S
        assert time.perf_counter() - since >= 0.14
        path = made.path(task)
        made.finish(task)
        assert [lane for lane, _ in path] == [Lane.H2D, Lane.D2H]
        assert path[0][1] - path[1][1] >= 0.1
        assert made.used(Lane.D2H)[0] >= 0.1
        assert made.used(Lane.H2D)[0] >= 0.04


def test_the_first_failure_ends_everything_and_is_told() -> None:
    class Broken(Exception):
        pass

    def breaks(op: Op, since: float) -> float:
        raise Broken(op.lane.value)

    into, source = torch.zeros(64), torch.ones(64)
    with lanes(pace=breaks) as made:
        failing = op(Lane.D2H, writes=[0])
        after = op(Lane.CPU, reads=[0])
        _, task = made.start(made.phase([(failing, copy_of(into, source)), (after, Work())]), 0)
        assert not ended(made, task)
        assert made.failed
        error = made.failure()
        assert isinstance(error, Broken)
        assert str(error) == "d2h"
        late = started(made, op(Lane.CPU), Work())
        time.sleep(0.02)
        assert not late.begun


def test_closing_ends_waits_and_drops_what_has_not_begun() -> None:
    into, source = torch.zeros(64), torch.ones(64)
    with lanes(pace=at_pace({Lane.H2D: 0.2})) as made:
        copies = made.start(
            made.phase([(op(Lane.H2D, at), copy_of(into, source)) for at in range(3)]), 0
        )
        waited = threading.Thread(target=made.over, args=(copies[2], HANGS_S), daemon=True)
        waited.start()
        while not copies[0].begun:
            time.sleep(0.001)
        made.stop(closing=True)
        waited.join(HANGS_S)
        assert not waited.is_alive()
        assert [one.over for one in copies] == [True, False, False]
