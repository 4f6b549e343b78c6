"""Lanes that cannot start, lanes that die, and who closes what when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import offload
from offload.program.ops import Lane, Op, Value, Verb
from offload.runtime import lanes as lanes_module
from offload.runtime.device import CPU
from offload.runtime.entry import EngineError
from offload.runtime.executor import ENGINE_LANES, Executor
from offload.runtime.lanes import Lanes
from tests.faults import nothing_leaks
from tests.profiles import blocks, plan_of
from tests.small import adamw, config, small, torch_step
from tests.submitting import submit
from tests.test_lanes import blocked, lanes, op

AT_ONCE_S = 8.0
"""Seconds in which a wait that is woken has ended: far less than until one looks by itself."""

ENDS_S = 20.0
"""Seconds in which what should end has ended, on a machine with other things to do."""


class Broken(Exception):
    """What a lane meets."""


def on_lane(lane: Lane) -> bool:
    return threading.current_thread().name == f"offload-{lane.value}"


def in_time(work: Callable[[], Any]) -> BaseException | None:
    """What `work` raises; fails where it does not end."""
    thread, raised = blocked(work, daemon=True)
    thread.join(ENDS_S)
    assert not thread.is_alive(), "it waits for ever"
    return raised[0] if raised else None


# -- starting ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ENGINE_LANES)
def test_a_lane_that_cannot_prepare_itself_is_told(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(self: Lanes) -> None:
        if on_lane(lane):
            raise Broken("no stream")

    monkeypatch.setattr(Lanes, "_prepare", prepare)
    with nothing_leaks():
        error = in_time(lambda: Lanes(ENGINE_LANES, device=CPU))
    assert isinstance(error, EngineError)
    assert isinstance(error.__cause__, Broken)
    assert "no stream" in str(error)


@pytest.mark.parametrize("number", [0, 2, len(ENGINE_LANES) - 1])
def test_a_thread_that_cannot_start_leaves_nothing_of_the_attach(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[str] = []
    start = threading.Thread.start

    def failing(self: threading.Thread) -> None:
        if self.name in {f"offload-{lane.value}" for lane in ENGINE_LANES}:
            started.append(self.name)
            if len(started) == number + 1:
                raise RuntimeError("can't start new thread")
        start(self)

    model = small()
    mine = adamw(model)
    monkeypatch.setattr(threading.Thread, "start", failing)
    with nothing_leaks():
        error = in_time(lambda: offload.attach(model, mine, config(("nvme",) * 3, tmp_path)))
    assert "can't start new thread" in str(error)
    torch_step(model, mine)


# -- dying ------------------------------------------------------------------------------------


def test_a_failure_ends_waits_at_once_and_nothing_more_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes_module, "LOOK_AGAIN_S", 3 * AT_ONCE_S)
    ran: list[str] = []
    error = ZeroDivisionError("on purpose")
    failed_at: list[float] = []

    def fail() -> None:
        time.sleep(0.05)
        failed_at.append(time.perf_counter())
        raise error

    with lanes(Lane.CPU, Lane.DISK) as made:
        made.check()
        failing = submit(made, op(Lane.DISK), [], (0, 0), fail)
        after = submit(made, op(), [failing], (0, 1), lambda: ran.append("after"))
        mine = submit(made, op(Lane.COMPUTE), [after], (0, 2))
        with pytest.raises(EngineError, match="on purpose") as caught:
            made.begin(mine)
        assert time.perf_counter() - failed_at[0] < AT_ONCE_S
        assert caught.value.__cause__ is error
        for call in (made.check, lambda: made.wait([]), lambda: made.wait([after])):
            with pytest.raises(EngineError) as caught:
                call()
            assert caught.value.__cause__ is error
        late = submit(made, op(), [], (0, 0), lambda: ran.append("late"))
        time.sleep(0.05)
        assert not late.over
    assert ran == []


# -- closing ----------------------------------------------------------------------------------


def test_memory_goes_when_the_last_lane_has_stopped_even_if_a_lane_closes(
    python_books: None,
) -> None:
    gone = threading.Event()
    memory: Any = SimpleNamespace(close=gone.set, at=None)
    executor = Executor(plan_of(blocks(1)), memory, None, CPU)
    copying = threading.Event()
    closed = threading.Event()

    def close() -> None:
        executor.close()
        closed.set()

    with nothing_leaks():
        made = executor.lanes
        slow = submit(made, _move(Lane.H2D), [], (0, 0), copying.wait)
        while not slow.begun:
            time.sleep(0.001)
        submit(made, _move(Lane.CPU), [], (0, 0), close)
        assert closed.wait(ENDS_S)
        assert not gone.wait(0.05)
        copying.set()
        assert gone.wait(ENDS_S)
        assert not any(thread.is_alive() for thread in made._threads)


def test_memory_goes_before_close_returns_elsewhere() -> None:
    gone = threading.Event()
    memory: Any = SimpleNamespace(close=gone.set, at=None)
    executor = Executor(plan_of(blocks(1)), memory, None, CPU)
    executor.close()
    assert gone.is_set()


def _move(lane: Lane) -> Op:
    return Op(lane, Verb.MOVE, Value("weight", 0), (), (), 0, 0)
