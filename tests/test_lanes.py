"""Lanes: what runs when, who is blamed for waiting, and what happens when a lane fails."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from offload.program.ops import Lane, Op, Value, Verb
from offload.program.schedule import Key, Scoreboard, State, Task
from offload.runtime.device import CPU, Device
from offload.runtime.entry import EngineError
from offload.runtime.lanes import Lanes
from offload.runtime.trace import Trace
from offload.runtime.works import Parts
from tests.submitting import submit

LEGAL = {
    ("WAITING", "READY"),
    ("READY", "RUNNING"),
    ("RUNNING", "DONE"),
    ("WAITING", "CANCELLED"),
    ("READY", "CANCELLED"),
}


def op(lane: Lane = Lane.CPU, size: int = 0) -> Op:
    return Op(lane, Verb.UPDATE, Value("state", 0, 0), (), (), size, 0)


@contextmanager
def lanes(*which: Lane, **options: Any) -> Iterator[Lanes]:
    made = Lanes(which or (Lane.CPU,), **{"device": CPU, **options})
    with nothing_leaks_but(made):
        try:
            yield made
        finally:
            made.close()


@contextmanager
def nothing_leaks_but(made: Lanes) -> Iterator[None]:
    yield
    assert not any(thread.is_alive() for thread in made._threads)


def blocked(
    work: Callable[[], Any], *, daemon: bool = False
) -> tuple[threading.Thread, list[BaseException]]:
    """`work` in a thread of its own, and what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=daemon)
    thread.start()
    return thread, raised


# -- tasks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), list(itertools.product(State, repeat=2)))
def test_every_transition_of_a_task(one: State, other: State) -> None:
    task = Task(op(), None, (0, 0), 1)
    task.state = one
    if (one.name, other.name) in LEGAL:
        task.go(other)
        assert task.state is other
    else:
        with pytest.raises(AssertionError):
            task.go(other)
        assert task.state is one


def test_a_task_is_over_when_done_or_cancelled() -> None:
    for *before, state in (
        (State.READY,),
        (State.READY, State.RUNNING),
        (State.READY, State.RUNNING, State.DONE),
        (State.CANCELLED,),
        (State.READY, State.CANCELLED),
    ):
        task = Task(op(), None, (0, 0), 1)
        for one in (*before, state):
            assert not task.over
            task.go(one)
        assert task.over == (state in (State.DONE, State.CANCELLED))
        assert task.cancelled == (state is State.CANCELLED)
        assert task.begun == (state in (State.RUNNING, State.DONE))


def test_the_scoreboard_keeps_reads_behind_writes_and_writes_behind_both() -> None:
    board: Scoreboard[str] = Scoreboard()
    board.note("write", (), ("a",))
    assert board.waits(("a",), ()) == ["write"]
    assert board.waits(("b",), ("c",)) == []
    board.note("read 1", ("a",), ())
    board.note("read 2", ("a",), ("b",))
    assert board.waits(("a",), ()) == ["write"]
    assert set(board.waits((), ("a",))) == {"write", "read 1", "read 2"}
    assert sorted(board.waits(("b",), ("a",))) == ["read 1", "read 2", "write"]
    board.note("write 2", ("a",), ("a",))
    assert board.waits((), ("a",)) == ["write 2"]


# -- order ------------------------------------------------------------------------------------


def test_the_most_urgent_task_goes_first_whatever_the_order_of_submission() -> None:
    ran: list[Key] = []
    with lanes() as made:
        gate = threading.Event()
        first = submit(made, op(), [], (9, 9), gate.wait)
        while not first.begun:
            time.sleep(0.001)
        keys = [(2, 1), (1, 5), (2, 0), (1, 5), (1, 2)]
        tasks = [submit(made, op(), [], key, partial(ran.append, key)) for key in keys]
        gate.set()
        made.wait(tasks)
    assert ran == sorted(keys)


def test_equals_go_in_the_order_of_submission() -> None:
    ran: list[int] = []
    with lanes() as made:
        gate = threading.Event()
        submit(made, op(), [], (0, 0), gate.wait)
        tasks = [submit(made, op(), [], (1, 1), partial(ran.append, i)) for i in range(20)]
        gate.set()
        made.wait(tasks)
    assert ran == list(range(20))


def test_a_task_starts_after_all_it_waits_for_on_other_lanes() -> None:
    ran: list[str] = []
    with lanes(Lane.CPU, Lane.DISK, Lane.H2D) as made:
        slow = submit(made, op(Lane.DISK), [], (5, 0), lambda: (time.sleep(0.02), ran.append("d")))
        mine = submit(made, op(Lane.COMPUTE), [slow], (0, 0))
        last = submit(made, op(Lane.H2D), [slow, mine], (0, 0), lambda: ran.append("h"))
        assert not any(one.begun for one in (mine, last))
        made.begin(mine)
        assert ran == ["d"]
        assert not last.begun
        made.finish(mine)
        made.wait([last])
        assert ran == ["d", "h"]
        assert made.stats.use[Lane.DISK].operations == made.stats.use[Lane.H2D].operations == 1
        assert made.stats.use[Lane.COMPUTE].operations == 0


def test_cancelled_tasks_never_run_and_free_those_that_wait_for_them() -> None:
    ran: list[str] = []
    with lanes() as made:
        gate = threading.Event()
        running = submit(made, op(), [], (0, 0), gate.wait)
        while not running.begun:
            time.sleep(0.001)
        ready = submit(made, op(), [], (1, 0), lambda: ran.append("ready"))
        waiting = submit(made, op(), [ready], (1, 1), lambda: ran.append("waiting"))
        after = submit(made, op(), [ready, waiting], (1, 2), lambda: ran.append("after"))
        made.cancel([running, ready, waiting])
        found = [(one.begun, one.cancelled) for one in (running, ready, waiting, after)]
        assert found == [(True, False), (False, True), (False, True), (False, False)]
        gate.set()
        made.wait([running, ready, waiting, after])
        made.cancel([running, after])  # nothing to take back any more
        assert ran == ["after"]
        assert made.stats.use[Lane.CPU].operations == 2


# -- bookkeeping ------------------------------------------------------------------------------


def test_time_is_booked_on_the_lane_that_was_waited_for() -> None:
    trace = Trace()
    with lanes(
        Lane.DISK, Lane.H2D, Lane.CPU, pace=lambda op, since: since + op.bytes / 1000, trace=trace
    ) as made:
        queued = time.perf_counter()  # Before the lanes begin.
        read = submit(made, op(Lane.DISK, 100), [], (0, 0), _nothing)
        copy = submit(made, op(Lane.H2D, 40), [read], (0, 0), _nothing)
        submit(made, op(Lane.CPU, 50), [], (0, 0), _nothing)
        mine = submit(made, op(Lane.COMPUTE), [copy], (0, 0))
        since = time.perf_counter()
        made.begin(mine)
        ended = time.perf_counter()
        made.finish(mine)
        use = made.stats.use
    first = min(one.start for one in trace.waited)  # This thread may stand still before it waits.
    last = max(one.stop for one in trace.waited)
    waited, ahead = last - first, first - queued
    assert since <= first
    assert last <= ended
    assert waited >= 0.14 - ahead
    assert use[Lane.DISK].busy_s >= 0.1  # A sleep may last longer; what is booked has to add up.
    assert use[Lane.H2D].busy_s >= 0.04
    assert use[Lane.DISK].exposed_s >= 0.099 - ahead
    assert use[Lane.H2D].exposed_s >= 0.039 - ahead
    assert use[Lane.DISK].exposed_s + use[Lane.H2D].exposed_s == pytest.approx(waited)
    assert use[Lane.CPU].exposed_s == use[Lane.COMPUTE].exposed_s == 0.0
    assert (use[Lane.DISK].bytes, use[Lane.H2D].bytes, use[Lane.CPU].bytes) == (100, 40, 50)


def test_nothing_is_exposed_where_nothing_was_waited_for() -> None:
    with lanes(pace=lambda op, since: since + 0.02) as made:
        task = submit(made, op(), [], (0, 0), _nothing)
        while not task.over:
            time.sleep(0.001)
        made.wait([task])
        assert made.stats.use[Lane.CPU].exposed_s == 0.0
        assert made.stats.use[Lane.CPU].busy_s >= 0.02


def test_lanes_compute_with_one_thread_each_and_leave_ours_alone() -> None:
    torch.set_num_threads(2)
    seen: list[tuple[int, bool]] = []
    try:
        with lanes() as made:
            task = submit(
                made,
                op(),
                [],
                (0, 0),
                lambda: seen.append((torch.get_num_threads(), torch.is_grad_enabled())),
            )
            made.wait([task])
        assert seen == [(1, False)]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


# -- work that the device has still to finish -------------------------------------------------


class FakeFence:
    """An event of a device that is through when it is let."""

    def __init__(self, log: list[str]):
        self.log = log
        self.through = threading.Event()

    def synchronize(self) -> None:
        assert self.through.wait(20.0)
        self.log.append("the device is through")


class Fenced(Device):
    """A device that has left to do what a fence says, and one stream."""

    is_host = False

    def __init__(self, fence: FakeFence):
        super().__init__(torch.device("cpu"))
        self._fence = fence

    def fence(self, stream: object) -> FakeFence:
        return self._fence


@contextmanager
def fenced(log: list[str]) -> Iterator[tuple[Lanes, Task, FakeFence]]:
    """Lanes, and a compute of the user under way whose device has work left when it ends."""
    fence = FakeFence(log)
    with lanes(device=Fenced(fence)) as made:
        mine = submit(made, op(Lane.COMPUTE), [], (0, 0))
        made.begin(mine)
        try:
            yield made, mine, fence
        finally:
            fence.through.set()


@pytest.mark.parametrize("late", [False, True])
def test_a_lane_waits_for_the_device_whether_it_was_queued_before_or_after(late: bool) -> None:
    log: list[str] = []
    with fenced(log) as (made, mine, fence):
        if late:
            made.finish(mine)
        task = submit(made, op(), [mine], (0, 0), partial(log.append, "lane runs"))
        if not late:
            made.finish(mine)
        assert not mine.over
        fence.through.set()
        made.wait([task])
        assert log == ["the device is through", "lane runs"]
        assert mine.over


def test_the_user_waits_for_what_the_device_has_to_finish_before() -> None:
    log: list[str] = []
    with fenced(log) as (made, mine, fence):
        after = submit(made, op(Lane.COMPUTE), [mine], (0, 1))
        made.finish(mine)
        fence.through.set()
        made.begin(after)
        assert log == ["the device is through"]
        made.finish(after)
        made.wait([after])


def test_what_a_cancelled_task_waited_for_is_waited_for_on_the_device_too() -> None:
    log: list[str] = []
    with fenced(log) as (made, mine, fence):
        made.finish(mine)
        between = submit(made, op(), [mine], (0, 1), _nothing)
        last = submit(made, op(), [between], (0, 2), partial(log.append, "lane runs"))
        made.cancel([between])
        assert log == []
        fence.through.set()
        made.wait([last])
    assert log == ["the device is through", "lane runs"]


def test_what_the_device_is_not_through_with_holds_up_nothing_behind_it() -> None:
    log: list[str] = []
    with fenced(log) as (made, mine, fence):
        made.finish(mine)
        tasks = [
            submit(made, op(), waits, (0, key), partial(log.append, name))
            for name, key, waits in (("first", 1, [mine]), ("second", 2, []))
        ]
        made.wait(tasks[1:])
        fence.through.set()
        made.wait(tasks)
    assert log == ["second", "the device is through", "first"]


def test_an_error_of_the_device_is_told() -> None:
    class Broken(FakeFence):
        def synchronize(self) -> None:
            raise RuntimeError("an illegal address")

    with lanes(device=Fenced(Broken([]))) as made:
        mine = submit(made, op(Lane.COMPUTE), [], (0, 0))
        made.begin(mine)
        made.finish(mine)
        with pytest.raises(EngineError, match="an illegal address"):
            made.wait([mine])


# -- failures and the end ---------------------------------------------------------------------


def test_the_first_failure_is_the_one_that_is_told() -> None:
    with lanes(Lane.CPU, Lane.DISK) as made:
        gates = [threading.Event(), threading.Event()]

        def fail(number: int) -> None:
            gates[number].wait()
            raise ArithmeticError(f"failure {number}")

        submit(made, op(Lane.CPU), [], (0, 0), partial(fail, 0))
        submit(made, op(Lane.DISK), [], (0, 0), partial(fail, 1))
        time.sleep(0.02)
        gates[1].set()
        end = time.monotonic() + 5
        while made._failure is None and time.monotonic() < end:
            time.sleep(0.001)
        gates[0].set()
        time.sleep(0.02)
        with pytest.raises(EngineError, match="failure 1"):
            made.check()


def test_closing_wakes_those_who_wait_and_drops_what_has_not_begun() -> None:
    ran: list[str] = []
    gate = threading.Event()
    with lanes() as made:
        running = submit(made, op(), [], (0, 0), lambda: (gate.wait(), ran.append("running")))
        queued = submit(made, op(), [], (1, 0), lambda: ran.append("queued"))
        thread, raised = blocked(lambda: made.wait([queued]))
        while not running.begun:
            time.sleep(0.001)
        closing = threading.Thread(target=made.close)
        closing.start()
        thread.join(5)
        assert isinstance(raised[0], EngineError)
        assert "closed" in str(raised[0])
        gate.set()
        closing.join(5)
        assert ran == ["running"]
        made.close()


def _nothing() -> None:
    pass


def test_who_waits_for_a_cancelled_task_waits_for_what_it_waited_for() -> None:
    order: list[str] = []
    gate = threading.Event()
    op = Op(Lane.H2D, Verb.MOVE, Value("weight", 0), (), (), 0, 0)
    lanes = Lanes([Lane.H2D, Lane.DISK], device=CPU)

    def first() -> None:
        gate.wait()
        order.append("first")

    try:
        begun = submit(lanes, op, [], (0, 0), first)
        between = submit(lanes, op, [begun], (0, 0), lambda: order.append("cancelled"))
        disk = dataclasses.replace(op, lane=Lane.DISK)
        last = submit(lanes, disk, [between], (0, 0), lambda: order.append("last"))
        lanes.cancel([between])
        assert not last.over
        gate.set()
        lanes.wait([last])
    finally:
        gate.set()
        lanes.close()
    assert order == ["first", "last"]


# -- work in parts -----------------------------------------------------------------------------


def test_threads_of_a_lane_share_the_parts_of_a_task_and_the_urgent_goes_between() -> None:
    both, let_go, ran = threading.Barrier(2, timeout=20.0), threading.Event(), list[str]()

    def part(name: str) -> Callable[[object], None]:
        def run(_: object) -> None:
            if name in ("first", "second"):
                both.wait()  # Two threads, at the same time.
                let_go.wait(20.0)
            ran.append(name)

        return run

    with lanes(Lane.CPU, Lane.CPU) as made:
        work = Parts([part(name) for name in ("first", "second", "third", "fourth")])
        long = submit(made, op(size=12), [], (1, 0), work=work)
        while len(long.parts) != 2:  # The first two are begun.
            time.sleep(0.001)
        urgent = submit(made, op(size=5), [], (0, 0), lambda: ran.append("urgent"))
        after = submit(made, op(), [long], (2, 0), lambda: ran.append("after"))
        let_go.set()
        made.wait([long, urgent, after])
        use = made.stats.use[Lane.CPU]
    assert set(ran[:2]) <= {"first", "second", "urgent"}
    assert ran.index("urgent") < ran.index("fourth")
    assert ran[-1] == "after"
    assert (use.bytes, use.operations) == (12 + 5, 6)
