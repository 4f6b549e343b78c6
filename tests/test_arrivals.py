"""Gradients on their way in, and turns that need no task."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import offload
from cpu_adam import CPUAdam
from offload.arrivals import Arrivals
from offload.program import Op, Verb
from tests.small import config, small, tokens
from tests.training import RESIDENT, attached, loss_of, plain

TRAINABLE = (2, 3, 1)
"""Trainable parameters of each unit; every unit has a frozen one beside them."""


class Taken:
    """Stands for the books and the places: what was taken over, in order."""

    def __init__(self) -> None:
        self.begun: set[int] = set()
        self.order: list[tuple[int, int, float]] = []
        self.judged: list[tuple[int, int]] = []

    def gradient_came(self, unit: int, parameter: int) -> None:
        self.judged.append((unit, parameter))

    def collect(self, unit: int, parameter: int, gradient: torch.Tensor) -> None:
        assert self.judged[-1] == (unit, parameter)
        self.order.append((unit, parameter, gradient.item()))


def arrivals(taken: Any, *, is_host: bool = True) -> Arrivals:
    one, frozen = SimpleNamespace(trainable=True), SimpleNamespace(trainable=False)
    units = [SimpleNamespace(parameters=[one] * count + [frozen]) for count in TRAINABLE]
    plan = SimpleNamespace(profile=SimpleNamespace(units=units))
    executor: Any = SimpleNamespace(plan=plan, device=SimpleNamespace(is_host=is_host))
    return Arrivals(executor, taken, taken)


PLACES = [(unit, index) for unit, count in enumerate(TRAINABLE) for index in range(count)]


@given(st.lists(st.sampled_from(PLACES)), st.sets(st.sampled_from(range(len(TRAINABLE)))))
def test_all_are_taken_in_their_order_and_no_more_than_a_unit_waits(
    came: list[tuple[int, int]], begun: set[int]
) -> None:
    taken = Taken()
    taken.begun = begun
    found = arrivals(taken)
    for number, place in enumerate(came):
        found.note(*place, torch.tensor(float(number)))
        waiting = came[len(taken.order) : number + 1]
        assert len(set(waiting)) == len(waiting)  # Of one parameter never two.
        assert len({unit for unit, _ in waiting}) <= 1
        assert len(waiting) < TRAINABLE[place[0]]
        assert not waiting or place[0] not in begun
    found.take()
    assert taken.order == [(*place, float(number)) for number, place in enumerate(came)]
    found.take()
    assert len(taken.order) == len(came)


def test_on_an_accelerator_none_waits() -> None:
    taken = Taken()
    found = arrivals(taken, is_host=False)
    for number, place in enumerate(PLACES):
        found.note(*place, torch.tensor(0.0))
        assert len(taken.order) == number + 1


def test_at_home_on_the_device_only_the_first_use_after_a_step_is_a_task(tmp_path: Path) -> None:
    with attached(RESIDENT, tmp_path) as run:
        plain(run, 0)
        run.engine.settle()
        executor: Any = run.engine.executor
        submit, issued = executor._submit, list[Op]()
        executor._submit = lambda op, *more: issued.append(op) or submit(op, *more)
        for _ in range(2):
            run.loss().backward()
        assert not issued
        run.step()
        assert {op.verb for op in issued} == {Verb.UPDATE}
        trace: Any = executor.lanes.traced()
        units = range(len(run.engine.units))
        for verb in (
            Verb.FORWARD,
            Verb.BACKWARD,
        ):
            assert {ran.op.value.unit for ran in trace.ran if ran.op.verb is verb} == set(units)


def test_a_forward_waits_for_a_slow_update_at_home(tmp_path: Path) -> None:
    alone = small()
    theirs = CPUAdam(alone.parameters(), lr=1e-2)
    model = small()
    _, ours = offload.attach(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        config(RESIDENT, tmp_path),
        pace=lambda op: 0.01 if op.verb is Verb.UPDATE else 0.0,
    )
    executor: Any = ours.engine.executor
    with ours.engine:
        for _ in range(3):
            for net, optimizer in ((alone, theirs), (model, ours)):
                optimizer.zero_grad()
                loss_of(net, tokens()).backward()
                optimizer.step()
        submit, verbs = executor._submit, list[Verb]()
        executor._submit = lambda op, *more: verbs.append(op.verb) or submit(op, *more)
        assert torch.equal(loss_of(model, tokens()), loss_of(alone, tokens()))
        assert Verb.FORWARD in verbs  # It had to wait.
