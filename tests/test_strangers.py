"""Optimizers that step an attached model's parameters beside the attached one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import training
from tests.training import Run, attached, fp32


def steps(run: Run, optimizer: Any, count: int) -> list[str]:
    """What is told, of a line here, while another optimizer steps."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(count):
            run.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(one.filename == __file__ for one in told)
    return [str(one.message) for one in told]


@pytest.mark.parametrize("placement", [("cpu", "cpu", "cpu"), training.RESIDENT])
def test_told_of_once_and_right(placement: Any, tmp_path: Path) -> None:
    with attached(placement, tmp_path, **fp32()) as run:
        stranger = torch.optim.SGD(run.model.parameters(), lr=0.1)
        (told,) = steps(run, stranger, 4)
        assert told.startswith("SGD steps embed.weight of an attached model")
        assert steps(run, torch.optim.SGD(run.model.parameters(), lr=0.1), 1) == []

    def plain(other: Run, number: int) -> None:
        optimizer = torch.optim.SGD(other.model.parameters(), lr=0.1)
        other.loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = training.train(placement, tmp_path, plain, **fp32())
    training.assert_same(found, training.train_alone(plain, **fp32()))


def test_another_number_of_backwards_is_told_of_the_line_that_steps(tmp_path: Path) -> None:
    with attached(("cpu", "cpu", "cpu"), tmp_path, **fp32(micro_batches=2)) as run:
        (told,) = steps(run, run.optimizer, 3)
        assert "steps in a row came after fewer" in told


class Around(torch.optim.Optimizer):
    """Steps another one, as sharpness-aware minimization does."""

    def __init__(self, inner: Any) -> None:
        super().__init__(list(inner.parameters()), {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_not_those_that_step_the_attached_one(tmp_path: Path) -> None:
    with attached(("cpu", "cpu", "cpu"), tmp_path, **fp32()) as run:
        assert steps(run, Around(run.optimizer), 3) == []


def test_not_those_of_other_models(tmp_path: Path) -> None:
    with attached(("cpu", "cpu", "cpu"), tmp_path, **fp32()) as run:
        other = torch.nn.Linear(2, 2)
        stranger = torch.optim.SGD(other.parameters())
        assert steps(run, stranger, 3) == []
