"""Gradients that are none, or do not fit, are refused where they come, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.small import tokens
from tests.training import (
    Run,
    assert_same,
    attached,
    loss_of,
    plain,
    same_bits,
    train,
    train_alone,
    without_idle_states,
)

PLACEMENTS = [("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme"), ("device", "device", "cpu")]
each_placement = pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@each_placement
def test_a_backward_that_is_only_imitated_brings_no_gradient(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """Where torch has no memory either its class says what `copy_` does: nothing."""

    def imitated(run: Run, number: int) -> None:
        given = tokens()
        if hasattr(run.optimizer, "engine"):
            refusals = (ValueError, TypeError)  # Torch before 2.13 takes no class of parameters.
            message = "is a FakeTensor, with no values in memory|FakeTensorMode object at"
            with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(refusals, match=message):
                loss_of(run.model, given).backward()
                run.optimizer.step()
            run.optimizer.zero_grad()
        plain(run, number)

    ours, alone = train(placement, tmp_path, imitated, steps=2), train_alone(imitated, steps=2)
    assert_same(without_idle_states(ours), without_idle_states(alone))


MISFITS: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "of another dtype": (torch.Tensor.double, r"norm\.weight.*float64.*of bfloat16.*fp32"),
    "of float32": (torch.Tensor.float, r"norm\.weight.*float32.*of bfloat16.*fp32"),
    "on no device": (lambda one: one.to("meta"), r"norm\.weight.*on meta"),
    "sparse": (lambda one: one.to_sparse(), r"norm\.weight.*sparse_coo.*only dense"),
    "without values": (lambda one: FakeTensorMode().from_tensor(one), r"norm\.weight.*FakeTensor"),
    "of another shape": (lambda one: one[:3], r"shape \(3,\).*norm\.weight.*\(32,\)"),
    "a number": (lambda one: 1.0, r"norm\.weight.*float: a tensor"),
    "itself": (lambda one: None, "as its own gradient"),
}
"""What is assigned to a gradient, made of one that would fit."""


@pytest.mark.parametrize("name", MISFITS)
def test_what_torch_does_not_take_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    make, told = MISFITS[name]
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        weight: Any = run.model.norm.weight
        run.loss().backward()
        held, before = weight.grad, weight.grad.clone()
        given: Any = weight if name == "itself" else make(before)
        other = torch.nn.Parameter(torch.ones(32, dtype=torch.bfloat16))
        if name not in ("sparse", "without values"):  # Torch takes these, and no step does.
            with pytest.raises((RuntimeError, TypeError)):
                other.grad = other if name == "itself" else given
        with pytest.raises((ValueError, TypeError), match=told):
            weight.grad = given
        assert weight.grad is held
        assert same_bits(held, before)
        run.step()


def test_where_sums_are_of_float32_both_dtypes_fit(tmp_path: Path) -> None:
    """The parameter's own as well, as in torch."""
    with attached(("cpu", "cpu", "cpu"), tmp_path, gradient_dtype="fp32") as run:
        weight: Any = run.model.norm.weight
        for dtype in (torch.bfloat16, torch.float32):
            weight.grad = torch.full((32,), 0.5, dtype=dtype)
            assert same_bits(weight.grad, torch.full((32,), 0.5))
        with pytest.raises(ValueError, match=r"float64.*or float32.*float32\)$"):
            weight.grad = torch.ones(32, dtype=torch.float64)
        run.loss().backward()
        run.step()
