"""Beside loops without any engine: optimizers of `cpu_adam` attached, and torch's own AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from cpu_adam import CPUSGD, CPUAdam, CPULion
from tests.small import adamw, small
from tests.training import RESIDENT, Net, Run, attached, batch, plain, train


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
    for options, message in (({"states": "compact"}, r"Config\(states='compact'\)"),):
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


def test_scheduler_before_and_after_attach(tmp_path: Path) -> None:
    results, before = [], list[Any]()

    def scheduled(model: nn.Module) -> torch.optim.Optimizer:
        before.append(torch.optim.lr_scheduler.LinearLR(adamw(model), 0.1, total_iters=3))
        return before[-1].optimizer  # type: ignore[no-any-return]

    for placement in (RESIDENT, ("nvme", "cpu", "nvme")):
        with attached(placement, tmp_path, optimizer=scheduled) as run:
            after = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
            for _ in range(4):
                run.loss().backward()
                run.optimizer.step()
                before[-1].step()
                after.step()
                run.optimizer.zero_grad()
            results.append((run.losses, before[-1].get_last_lr(), after.get_last_lr()))
    assert results[0] == results[1]


class _Keeps(Net):
    """Calls its blocks backwards, keeps its loss and returns None."""

    def forward(self, tokens: torch.Tensor) -> None:  # type: ignore[override]
        x = self.embed(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        self.loss = self.head(self.norm(x)).float().square().mean()


def test_the_order_of_a_forward_that_returns_none_is_learned(tmp_path: Path) -> None:
    with attached(("nvme", "cpu", "cpu"), tmp_path, build=_Keeps) as run:
        misses = list[int]()
        for _ in range(3):
            run.model(batch(run.generator))
            run.model.loss.backward()
            run.step()
            misses.append(run.engine.report().misses)
        assert misses[0] > 0
        assert misses[1:] == misses[:1] * 2
