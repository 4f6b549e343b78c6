"""A step that a signal's handler ends, wherever it comes: nothing of it was done, or all of it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from itertools import count
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from cpu_adam import CPUAdam, UpdateTable, batch, interrupt
from tests.optimizers import OURS, bits, run

FILES = (batch.__file__, interrupt.__file__)
FUNCTIONS = ("run", "_write", "_keep", "whole", "_put_back", "_call")
"""Where lines are that write what a step changes, or that hold signals back meanwhile."""


class Stop(BaseException):
    """What the handler raises."""


@pytest.fixture
def handler() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Stop

    before = signal.signal(signal.SIGUSR1, stop)
    yield
    assert signal.getsignal(signal.SIGUSR1) is stop
    signal.signal(signal.SIGUSR1, before)


def built(kind: str) -> torch.optim.Optimizer:
    """An optimizer of what takes two native calls, one of them with a copy of a strided weight."""
    generator = torch.Generator().manual_seed(0)
    params = [
        nn.Parameter(torch.randn(4, 3, generator=generator).t()),
        nn.Parameter(torch.randn(5, generator=generator)),
        nn.Parameter(torch.randn(7, generator=generator).bfloat16()),
    ]
    options = {"momentum": 0.9, "dampening": 0.5} if kind == "sgd" else {}
    return OURS[kind](params, lr=0.1, **options)


def everything(optimizer: Any) -> list[Any]:
    """Weights and states, with which keys these have: to be compared."""
    params = optimizer.param_groups[0]["params"]
    states = [optimizer.state.get(p, {}) for p in params]
    slots = [{key: bits(x) for key, x in state.items()} for state in states]
    return [*(bits(p.detach()) for p in params), *slots]


def step_with_signal(optimizer: Any, line: int) -> bool:
    """A step; whether a signal that comes before the given line of `FUNCTIONS` ended it."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        code = frame.f_code
        if code.co_name not in FUNCTIONS or code.co_filename not in FILES:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGUSR1)
        return trace

    sys.settrace(trace)
    try:
        run(optimizer, 1, 1)
    except Stop:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize(("kind", "steps"), [("adam", 0), ("adam", 1), ("sgd", 0)])
def test_a_step_ends_whole_wherever_a_signal_comes(handler: None, kind: str, steps: int) -> None:
    course = []
    undisturbed = built(kind)
    for number in range(3):
        run(undisturbed, 1, 0 if number < steps else 1)
        course.append(everything(undisturbed))
    ctrl_c, seen = signal.getsignal(signal.SIGINT), set()
    for line in count(1):
        optimizer = built(kind)
        run(optimizer, steps)
        before = everything(optimizer)
        if not step_with_signal(optimizer, line):
            break
        now = everything(optimizer)
        assert now in (before, course[steps]), line
        done = int(now == course[steps])
        seen.add(done)
        assert signal.getsignal(signal.SIGINT) is ctrl_c
        run(optimizer, 1, 1)
        assert everything(optimizer) == course[steps + done], line
    assert seen == {0, 1}


def test_every_handler_is_called_once_the_step_is_done(handler: None) -> None:
    """Also where an earlier one raises; a signal that comes twice counts once."""
    called: list[int] = []
    number = signal.SIGUSR2
    before = signal.signal(number, lambda number, _: called.append(number))

    def signals() -> None:
        for one in (signal.SIGUSR1, number, number):
            signal.raise_signal(one)
        assert not called

    try:
        with pytest.raises(Stop):
            interrupt.whole(signals)
    finally:
        signal.signal(number, before)
    assert called == [number]


def test_a_call_that_fails_leaves_those_before_it_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4).bfloat16())]
    optimizer = CPUAdam(params)
    run(optimizer, 1)
    original, calls = UpdateTable.update, []

    def once(self: UpdateTable, *arguments: Any, **options: Any) -> Any:
        calls.append(self)
        if len(calls) > 1:
            raise MemoryError
        return original(self, *arguments, **options)

    monkeypatch.setattr(UpdateTable, "update", once)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [2, 1]
