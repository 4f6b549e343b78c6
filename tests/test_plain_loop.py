"""The bits of a loop without any engine: plain PyTorch, stepped by the optimizers of `cpu_adam`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from cpu_adam import CPUSGD, CPUAdam, CPULion
from tests.small import adamw, small
from tests.test_exact import CASES
from tests.training import (
    Net,
    Run,
    assert_same,
    plain,
    some_fast,
    train,
    train_alone,
    without_idle_states,
)

LOOPS = (
    "plain",
    "plain fp32",
    "accumulation",
    "torch clipping",
    "tied, accumulation",
    "frozen",
    "checkpointing",
    "dropout",
    "second backward",
    "two losses",
    "evaluation",
    "L2 term",
    "out of order",
    "skipped step",
    "groups, L2 decay",
    "SGD",
    "SGD, fp32, edits",
    "Lion",
)
PLACEMENT = ("nvme", "cpu", "nvme")


@pytest.mark.parametrize("case", some_fast(sorted(LOOPS), fast=6))
def test_the_bits_of_a_loop_without_an_engine(case: str, tmp_path: Path) -> None:
    feature, options = CASES[case]
    ours = train(PLACEMENT, tmp_path, feature, **options)
    assert_same(without_idle_states(ours), without_idle_states(train_alone(feature, **options)))


@pytest.mark.parametrize("kind", [CPUAdam, CPULion, CPUSGD])
def test_its_optimizers_are_attached_with_their_states(kind: Any, tmp_path: Path) -> None:
    def started() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small()
        optimizer = kind(model.parameters(), lr=1e-3)
        step(model, optimizer)
        return model, optimizer

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.arange(12).view(2, 6)).float().logsumexp(-1).sum().backward()
        optimizer.step()

    theirs, reference = started()
    ours, mine = started()
    config = offload.Config(
        params="cpu", gradients="cpu", optimizer="nvme", nvme_path=(str(tmp_path),)
    )
    _, optimizer = offload.attach(ours, mine, config)
    for _ in range(2):
        step(theirs, reference)
        step(ours, optimizer)
    model, back = offload.detach(ours)
    assert back is mine
    step(theirs, reference)
    step(model, back)
    for one, other in zip(model.parameters(), theirs.parameters()):
        assert torch.equal(one, other)


def test_what_cannot_be_kept_is_refused() -> None:
    model = small(torch.bfloat16)
    for options, message in (
        ({"states": "compact"}, r"Config\(states='compact'\)"),
        ({"skip_nonfinite": True}, "skip_nonfinite=False"),
    ):
        with pytest.raises(ValueError, match=message):
            offload.attach(model, CPUAdam(model.parameters(), **options))  # type: ignore[arg-type]
    offload.attach(model, adamw(model))[1].engine.close()


def test_as_good_as_plain_torch(tmp_path: Path) -> None:
    """fp32: the first losses of torch's own AdamW to many digits (the update rounds elsewhere)."""
    torch.manual_seed(1)
    model = Net()
    run = Run(model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.Generator())
    run.generator.manual_seed(7)
    for number in range(5):
        plain(run, number)
    ours = train(("cpu", "cpu", "cpu"), tmp_path, steps=5, dtype=torch.float32)
    assert ours.losses == pytest.approx(run.losses, rel=1e-5)
