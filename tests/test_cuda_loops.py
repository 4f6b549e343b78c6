"""What training loops do, on an accelerator: the same bits wherever values live.

As `test_exact` and `test_loops` have it on the CPU. The reference is streamed, not resident: what a
loop itself computes from `p.grad` it computes on the CPU then, whose bits are not the device's.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import test_durable, test_exact, test_loops, test_saving
from tests.test_cuda import CPU_TIER, device, needs_cuda
from tests.training import RESIDENT, SAMPLED, Result, assert_same, batch, train

pytestmark = [*needs_cuda, pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")]

LOOPS: dict[str, tuple[Any, dict[str, Any]]] = {
    **test_exact.CASES,
    **{
        name: test_loops.CASES[name]
        for name in (
            *("groups added later", "thawed", "group taken out", "zeroed anywhere"),
            *("hooked gradients", "hooked gradients, regions", "failed backward kept"),
            *("averaged", "EMA swapped in", "rewound", "initialised"),
            *("saved on cpu", "saved on cpu, checkpoints", "OneCycleLR"),
        )
    },
}

OF_GRADIENTS = {
    *("torch clipping", "gradients touched", "edited between reentrant", "gradients held"),
    *("gradients kept apart",),
}
"""Loops that compute with p.grad."""


def placed() -> list[Any]:
    """Every loop resident, if it may be, and in one of the placements that are not."""
    elsewhere = itertools.cycle([one for one in SAMPLED if one not in (RESIDENT, CPU_TIER)])
    found = []
    for name in LOOPS:
        for placement in (*(() if name in OF_GRADIENTS else (RESIDENT,)), next(elsewhere)):
            found.append(pytest.param(name, placement, id=f"{name}-{'-'.join(placement)}"))
    return found


@cache
def reference(name: str, directory: Path) -> Result:
    feature, options = LOOPS[name]
    return train(CPU_TIER, directory, feature, **options)


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drive")


@pytest.fixture(autouse=True)
def tokens_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a loop calls parts of its model by itself."""
    for module in (test_exact, test_loops):
        monkeypatch.setattr(module, "batch", lambda g: batch(g).to(device().torch_device))


@pytest.mark.parametrize(("name", "placement"), placed())
def test_every_loop_has_the_bits_of_the_streamed_one(
    name: str, placement: tuple[str, str, str], drive: Path
) -> None:
    feature, options = LOOPS[name]
    assert_same(train(placement, drive, feature, **options), reference(name, drive))


GOING_ON = [(RESIDENT, CPU_TIER), (CPU_TIER, RESIDENT), (("device", "cpu", "cpu"), ("nvme",) * 3)]


@pytest.mark.parametrize(("before", "after"), GOING_ON)
def test_a_saved_run_goes_on_elsewhere(
    before: Any, after: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_saving.test_a_run_goes_on_with_the_same_bits(before, after, tmp_path, monkeypatch)


@pytest.mark.parametrize(("before", "after"), GOING_ON)
def test_a_durable_run_goes_on_elsewhere(
    before: Any, after: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_durable.test_a_run_goes_on_from_what_was_committed(before, after, tmp_path, monkeypatch)
