"""The norm: one order of additions, whatever is cut where, and by whatever kernel it is summed."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cpu_adam
from cpu_adam import native
from cpu_adam.reference import Node, push, square_sums, total
from offload.planning import planner, profile
from offload.planning.profile import profile_of
from tests.examples import cheap
from tests.profiles import unit
from tests.training import attached


def random_gradient(elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=elements).astype(np.float32)).to(dtype)


def sum_of_squares(x: torch.Tensor) -> float:
    return total(square_sums(x))


def numpy_sum_of_squares(x: npt.NDArray[np.float64]) -> float:
    """Leaves of 1024, each the sum of halves; above them neighbours, two by two."""
    squares = np.pad(x * x, (0, -len(x) % 1024)).reshape(-1, 1024)
    while squares.shape[1] > 1:
        squares = squares[:, : squares.shape[1] // 2] + squares[:, squares.shape[1] // 2 :]
    sums = squares[:, 0]
    while len(sums) > 1:
        sums = np.pad(sums, (0, len(sums) % 2))
        sums = sums[::2] + sums[1::2]
    return float(sums.sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("elements", [0, 1, 1023, 1024, 1025, 5 * 1024, 32 * 1024 + 1, 100_003])
def test_sum_of_squares_is_summed_in_the_written_order(elements: int, dtype: torch.dtype) -> None:
    x = random_gradient(elements, dtype, elements)
    assert sum_of_squares(x) == numpy_sum_of_squares(x.double().numpy())
    if elements % 1024 == 0:
        assert sum_of_squares(x.view(-1, 1024) if elements else x) == sum_of_squares(x)


@given(st.data())
@cheap(60)
def test_wherever_a_parameter_is_cut_its_squares_have_one_sum(data: st.DataObject) -> None:
    """At leaves; each part may be the reference's or the kernel's."""
    leaves, short = data.draw(st.integers(1, 70)), data.draw(st.integers(0, 1023))
    rng = np.random.default_rng(leaves)
    x = torch.from_numpy(rng.lognormal(0, 4, leaves * 1024 - short).astype(np.float32))
    cuts = sorted(data.draw(st.sets(st.integers(1, leaves - 1), max_size=9)) if leaves > 1 else [])
    nodes: list[Node] = []
    for first, last in pairwise([0, *cuts, leaves]):
        part = x[first * 1024 : last * 1024]
        found = square_sums(part, first)
        assert found == native.square_sums(part, first)
        assert len(found) <= max(1, 2 * (last - first - 1).bit_length())
        for node in found:
            push(nodes, node)
    assert total(nodes) == numpy_sum_of_squares(x.double().numpy())


def test_sum_of_squares_is_accurate_and_propagates_what_is_not_finite() -> None:
    x = random_gradient(40_000, torch.float32, 1)
    assert sum_of_squares(x) == pytest.approx(math.fsum((x.double() ** 2).tolist()), rel=1e-14)
    assert sum_of_squares(torch.full((3,), 3e38)) == pytest.approx(2.7e77)
    for value in (math.inf, -math.inf, math.nan):
        x[31_234] = value
        found = sum_of_squares(x)
        assert math.isnan(found) if math.isnan(value) else found == math.inf
    with pytest.raises(ValueError, match="float64"):
        cpu_adam.sum_of_squares(x.double())


def test_the_norm_adds_parameters_up_by_name_whatever_units_they_are_in() -> None:
    sizes = {"b.p0": 1024, "b.p1": 1025, "a.p0": 1, "c.p0": 3_000_000}
    cut = profile_of([unit("b", 1024, 1025), unit("c", 3_000_000), unit("a", 1)])
    leaves = {
        one.name: cut.leaf(u, i, 0)
        for u, spec in enumerate(cut.units)
        for i, one in enumerate(spec.parameters)
    }
    assert leaves == {"a.p0": 0, "b.p0": 1, "b.p1": 2, "c.p0": 4}
    wanted = [profile.Parameter(name, (n,), "bfloat16", True) for name, n in sizes.items()]
    whole = profile_of([profile.lay_out_unit("all", wanted)])
    assert {name: whole.leaf(0, i, 1023) for i, name in enumerate(sizes)} == leaves


PLACEMENTS = [("device", "device", "device"), ("device", "device", "cpu"), ("cpu", "cpu", "nvme")]


@pytest.mark.parametrize(
    ("placement", "elements"),
    [
        pytest.param(one, elements, marks=() if number % 2 == at else pytest.mark.slow)
        for number, one in enumerate([*PLACEMENTS, ("nvme", "nvme", "cpu")])
        for at, elements in enumerate([2048, 1 << 20])
    ],
)
def test_the_norm_of_a_step_is_that_of_the_gradients_wherever_chunks_end(
    placement: tuple[str, str, str],
    elements: int,
    runner: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "CHUNK_ELEMENTS", elements)
    with attached(placement, tmp_path, max_grad_norm=0.5) as run:
        assert (len(run.engine.plan.profile.units[1].chunks) > 3) == (elements < 1 << 20)
        for _ in range(2):
            run.loss().backward()
            squares = 0.0
            for _, one in sorted(run.model.named_parameters()):
                assert one.grad is not None
                squares += numpy_sum_of_squares(one.grad.double().flatten().numpy())
            run.step()
            assert run.optimizer.grad_norm() == math.sqrt(squares)
