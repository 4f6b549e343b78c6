"""Branches that the compiled order did not foresee: counted, and no dearer than a demand fetch.

On a paced device, as in test_overlap: compute is a sleep, copies and updates are real but slow.
"""

from __future__ import annotations

import random
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import nn

import offload
from offload.program import Verb
from offload.simulate import seconds_of
from tests.structures import STRUCTURES
from tests.test_overlap import SLOW, Sleeper
from tests.training import batch, config_of

POSITIONS, EXPERTS = 8, 3
ELEMENTS = 1 << 20
COMPUTE_S = 0.06
"""Of a unit's forward: all in all a little more than what the disk takes."""

STEPS_SKIPPED, STEPS = 2, 5


class Branches(nn.Module):
    """At each position a dense unit, then one of several experts, as `chosen` says."""

    def __init__(self, seconds: float):
        super().__init__()
        self.dense = nn.ModuleList(Sleeper(seconds, ELEMENTS) for _ in range(POSITIONS))
        self.experts = nn.ModuleList(Sleeper(seconds, ELEMENTS) for _ in range(POSITIONS * EXPERTS))
        self.chosen = [0] * POSITIONS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for position, expert in enumerate(self.chosen):
            x = self.experts[position * EXPERTS + expert](self.dense[position](x))
        return x


def step_seconds(
    placement: tuple[str, str, str], drive: Path, seconds: float, *, branching: bool
) -> tuple[float, int]:
    """Seconds of the median step, and misses per step, when every step takes other branches."""
    params, gradients, states = placement
    model = Branches(seconds)
    config = offload.Config(
        params=params,  # type: ignore[arg-type]
        gradients=gradients,  # type: ignore[arg-type]
        optimizer=states,  # type: ignore[arg-type]
        nvme_path=(str(drive),),
        device_memory="24MiB",
        cpu_memory="1GiB",
        micro_batches=1,
    )
    pace = partial(seconds_of, machine=SLOW)
    optimizer = torch.optim.AdamW(model.parameters())
    _, attached = offload.attach(model, optimizer, config, machine=SLOW, pace=pace)
    x = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    draw = random.Random(1)
    with attached.engine as engine:
        ends, before = [], 0
        for number in range(STEPS_SKIPPED + STEPS):
            if branching:
                # Each time another one than the last.
                model.chosen = [(c + draw.randrange(1, EXPERTS)) % EXPERTS for c in model.chosen]
            model(x).sum().backward()
            attached.step()
            attached.zero_grad()
            ends.append(time.perf_counter())
            if number < STEPS_SKIPPED:
                before = engine.report().misses
        misses = engine.report().misses - before
    step = median(stop - start for start, stop in pairwise(ends[STEPS_SKIPPED - 1 :]))
    return step, misses // STEPS


def test_a_first_backward_follows_its_forward(tmp_path: Path) -> None:
    """Which used the units in another order than they are declared."""

    class Reversed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in reversed(list(self)):
                x = block(x)
            return x

    model = Reversed(*[nn.Linear(8, 8) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters())
    config = config_of(("cpu", "cpu", "cpu"), (str(tmp_path),))
    _, optimizer = offload.attach(model, optimizer, config)
    with optimizer.engine as engine:  # type: ignore[attr-defined]
        loss = model(torch.ones(2, 8)).sum()
        before = engine.report().misses
        assert before
        loss.backward()
        assert engine.report().misses == before


def test_only_the_experts_that_are_chosen_are_used(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = STRUCTURES["experts in a list"]()
    config = config_of(("nvme", "cpu", "cpu"), (str(tmp_path),))
    model, _ = offload.attach(model, None, config)
    called: list[str] = []
    for name, module in model.named_modules():
        if name.rpartition(".")[0].endswith("experts"):
            module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    with offload.engine_of(model) as engine, torch.no_grad():
        for seed in range(4):
            called.clear()
            model(batch(torch.Generator().manual_seed(seed))[:1, :2])
            used = [engine.units[unit].spec.name for unit in engine.passes.orders[Verb.FORWARD]]
            assert [name for name in used if "experts" in name] == called
            assert 2 <= len(called) < 8


@pytest.mark.slow  # Of use only where nothing else runs.
@pytest.mark.parametrize(
    "placement", [("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme")], ids="-".join
)
def test_other_branches_in_every_step_cost_little(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    ideal, none = step_seconds(placement, tmp_path, COMPUTE_S, branching=False)
    step, misses = step_seconds(placement, tmp_path, COMPUTE_S, branching=True)
    assert none == 0
    assert misses >= POSITIONS
    assert step < 1.3 * ideal, (step, ideal, misses)
