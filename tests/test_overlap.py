"""A paced device: compute is a sleep of known length; copies, updates and I/O are real but paced.

Times here are those of a slow machine that is imitated, so the bounds hold on any faster one.
"""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import recording
from offload.planning import profile
from offload.planning.machine import Machine
from offload.program.ops import Lane, Op, Verb
from offload.program.simulate import Timeline, seconds_of, simulate
from tests.profiles import busy

pytestmark = pytest.mark.slow  # Of use only where nothing else runs.

UNITS = 24
SMALL, LARGE = 1 << 18, 1 << 21
"""Elements of a unit: a chunk, or two, whose moves and updates overlap each other's."""

STEPS_SKIPPED, STEPS = 2, 3
STEPS_PREDICTED = 8

SLOW = Machine(
    device_bytes=1 << 32,
    cpu_bytes=1 << 33,
    nvme_bytes=1 << 33,
    device_is_cpu=True,
    h2d_bytes_per_s=400e6,
    d2h_bytes_per_s=400e6,
    disk_read_bytes_per_s=300e6,
    disk_write_bytes_per_s=250e6,
    cpu_bytes_per_s=300e6,
    compute_bytes_per_s=700e6,
    op_seconds=5e-4,
)
"""Every lane below half of what this kind of machine does at its worst."""


@contextmanager
def _compute(seconds: float) -> Iterator[None]:
    """What is done inside, which takes at least `seconds`."""
    start = time.perf_counter()
    yield
    time.sleep(max(0.0, start + seconds - time.perf_counter()))


class _Slept(torch.autograd.Function):
    """Uses the weight a little, and sleeps as long as the real computation would take."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = seconds
        with _compute(seconds):
            return x + weight[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        with _compute(2 * ctx.seconds):
            return gradient + 0 * weight[0], torch.ones_like(weight), None


class Sleeper(nn.Module):
    def __init__(self, seconds: float, elements: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements, dtype=torch.bfloat16))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Slept.apply(x, self.weight, self.seconds)


Case = tuple[tuple[str, str, str], Path, int]
"""Placement, drive and elements of a unit."""


def lane_seconds(case: Case) -> float:
    """Seconds that the busiest lane but compute works in a step, by the simulator."""
    timeline = predicted(case, 0.0)
    return max(busy(timeline, lane) for lane in (Lane.DISK, Lane.CPU)) / 4


def attached(
    case: Case,
    seconds: float,
    build: Callable[..., nn.Module] = nn.Sequential,
    device_memory: str = "1GiB",
    **options: Any,
) -> tuple[nn.Module, Any]:
    """`build` makes the model of its units."""
    (params, gradients, states), drive, elements = case
    model = build(*(Sleeper(seconds, elements) for _ in range(UNITS)))
    config = offload.Config(
        params=params,  # type: ignore[arg-type]
        gradients=gradients,  # type: ignore[arg-type]
        optimizer=states,  # type: ignore[arg-type]
        nvme_path=(str(drive),),
        device_memory=device_memory,
        cpu_memory="1GiB",
        micro_batches=1,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings():  # Most of the budgets lies idle.
        warnings.simplefilter("ignore", RuntimeWarning)
        return offload.attach(model, optimizer, config, machine=SLOW, **options)


def predicted(case: Case, seconds: float, machine: Machine = SLOW) -> Timeline:
    _, optimizer = attached(case, 0.0)
    with optimizer.engine as engine:
        return simulate(
            recording.program_of(engine),
            machine,
            lambda unit, verb: seconds * (1 if verb is Verb.FORWARD else 2),
            updates_in_backward=True,
        )


class Pace:
    """Lets ops take what the simulator says; all that the drive does, one after the other."""

    def __init__(self, machine: Machine = SLOW):
        self._machine, self._drive, self._free_at = machine, threading.Lock(), 0.0

    def __call__(self, op: Op, since: float) -> float:
        seconds = seconds_of(op, self._machine)
        if op.lane is not Lane.DISK:
            return since + seconds
        with self._drive:
            self._free_at = max(self._free_at, since) + seconds
            return self._free_at


def steps_of(case: Case, seconds: float, count: int) -> list[float]:
    """Seconds of `count` steps, once the pipeline has filled, the shortest first."""
    model, optimizer = attached(case, seconds, pace=Pace())
    x = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    with optimizer.engine:
        ends = []
        for _ in range(STEPS_SKIPPED + count):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.perf_counter())
    return sorted(stop - start for start, stop in pairwise(ends[STEPS_SKIPPED - 1 :]))


def overslept() -> float:
    """Seconds by which a sleep as long as an op is too long here."""
    asked = 4e-3
    found = []
    for _ in range(51):
        start = time.perf_counter()
        time.sleep(asked)
        found.append(time.perf_counter() - start - asked)
    return median(found)


NVME = ("nvme", "nvme", "nvme")


@pytest.fixture(autouse=True)
def _units_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """None are fused: what a unit computes is known here by its number."""
    monkeypatch.setattr(profile, "FUSED_BYTES_MAX", 0)


@pytest.mark.parametrize("placement", [NVME, ("cpu", "cpu", "cpu")], ids="-".join)
def test_under_longer_compute_the_other_lanes_hide(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """Exposed is all but the compute asked for: sleeping too long and waiting for the GIL count,
    and that what is urgent waits for 64 MiB under way, a ninth of what this drive moves in a step.

    Of the median step: one in three may meet a hiccup of a drive that others use too.
    """
    case = placement, tmp_path, LARGE
    seconds = 1.15 * lane_seconds(case) / (3 * UNITS)
    step = median(steps_of(case, seconds, STEPS))
    exposed = step - 3 * UNITS * seconds
    expected = predicted(case, seconds).exposed
    assert exposed < expected + 0.05 * step, (exposed, expected, step)
    assert expected < (0.17 if "nvme" in placement else 0.07) * step


@pytest.mark.parametrize("ratio", [2.0, 1.0, 0.5], ids=["longer", "equal", "shorter"])
def test_the_simulator_predicts_the_step(ratio: float, tmp_path: Path) -> None:
    """Of a quarter of the steps: a drive that stalls is on no lane, and only adds.

    Under shorter compute the disk lane has no slack, and each of its ops counts: what
    pacing one costs beyond its pace is the imitated machine's.
    """
    case = NVME, tmp_path, SMALL
    seconds = ratio * lane_seconds(case) / (3 * UNITS)
    step = steps_of(case, seconds, STEPS_PREDICTED)[STEPS_PREDICTED // 4]
    machine = replace(SLOW, op_seconds=SLOW.op_seconds + overslept())
    assert predicted(case, seconds, machine).step_seconds == pytest.approx(step, rel=0.08)


POSITIONS, EXPERTS = 6, 3


class Branches(nn.Module):
    """At each position a dense unit, then one of several experts, as `chosen` says."""

    def __init__(self, *units: nn.Module):
        super().__init__()
        self.dense = nn.ModuleList(units[:POSITIONS])
        self.experts = nn.ModuleList(units[POSITIONS:])
        self.chosen = [0] * POSITIONS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for position, expert in enumerate(self.chosen):
            x = self.experts[position * EXPERTS + expert](self.dense[position](x))
        return x


def test_other_branches_in_every_step_cost_little(tmp_path: Path) -> None:
    """That the order does not foresee them is counted, and no dearer than a demand fetch."""
    found = []
    for branching in (False, True):
        made, optimizer = attached((NVME, tmp_path, 1 << 20), 0.06, Branches, "24MiB", pace=Pace())
        model: Any = made
        x = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
        draw, ends, before = random.Random(1), list[float](), 0
        with optimizer.engine as engine:
            for number in range(STEPS_SKIPPED + STEPS + 2):
                if branching:  # Each time another one than the last.
                    model.chosen = [(c + draw.randrange(1, 3)) % EXPERTS for c in model.chosen]
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                ends.append(time.perf_counter())
                if number < STEPS_SKIPPED:
                    before = engine.report().misses
            misses = engine.report().misses - before
        step = median(stop - start for start, stop in pairwise(ends[STEPS_SKIPPED - 1 :]))
        found.append((step, misses // (STEPS + 2)))
    (ideal, none), (step, misses) = found
    assert none == 0
    assert misses >= POSITIONS
    assert step < 1.3 * ideal, (step, ideal, misses)
