"""Small gradients wait where autograd has made them for the last of their unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from cpu_adam import CPUAdam
from offload import collector
from tests.covering import by_turns


class Scaled(nn.Module):
    """Three parameters, of which only the first is used where all are not asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.shift = nn.Parameter(torch.linspace(-1, 1, 8))
        self.slope = nn.Parameter(torch.linspace(0.1, 0.3, 8))

    def forward(self, x: torch.Tensor, every: bool) -> torch.Tensor:
        x = x * self.scale
        return x + self.shift + x * x * self.slope if every else x


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(), Scaled()])

    def forward(self, x: torch.Tensor, uses: tuple[bool, ...], recompute: bool) -> torch.Tensor:
        for block in self.blocks:
            for every in uses:
                x = (
                    checkpoint(block, x, every, use_reentrant=True)
                    if recompute
                    else block(x, every)
                )
        return x.sum()


def gradients(uses: tuple[bool, ...], recompute: bool, config: Any, penalty: str = "") -> list[Any]:
    model: Any = Twice()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if config is not None:
        model, optimizer = offload.attach(model, optimizer, config)
    for number in range(3):
        x = torch.linspace(-1, 1, 8).add(number / 7).requires_grad_()
        loss = model(x, uses, recompute)
        of = [p.pow(2).sum() for name, p in model.named_parameters() if penalty in name]
        (loss + sum(of) if penalty else loss).backward()  # What was made last comes first.
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    if config is not None:
        assert all(now.waits == 2 for now in optimizer.engine.collector.units)
        optimizer.engine.close()
    return found


USES = [(False,), (True, False), (False, True), (False, False)]


@pytest.mark.parametrize(
    ("penalty", "uses", "recompute", "tier"),
    by_turns(["", "scale", "shift", "blocks"], USES, [False, True], ["cpu", "device"]),
)
def test_gradients_are_those_of_torch(
    penalty: str, uses: tuple[bool, ...], recompute: bool, tier: Any
) -> None:
    """One may come without the other, twice before it, and before the unit is used (of a penalty,
    where checkpointing is reentrant)."""
    config = offload.Config(params="cpu", gradients=tier, optimizer="cpu", cpu_memory="1MiB")
    expected = gradients(uses, recompute, None, penalty)
    for found, plain in zip(gradients(uses, recompute, config, penalty), expected, strict=True):
        assert (found is None) == (plain is None)
        assert found is None or torch.equal(found, plain)


@pytest.mark.parametrize(("limit", "waits"), [(95, 0), (4096, 2)])  # 96, and padding.
def test_large_gradients_do_not_wait(
    limit: int, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "WAITING_BYTES_MAX", limit)
    model = Twice()
    config = offload.Config(params="cpu", gradients="cpu", optimizer="cpu", cpu_memory="1MiB")
    _, optimizer = offload.attach(model, torch.optim.AdamW(model.parameters()), config)
    assert {now.waits for now in optimizer.engine.collector.units} == {waits}
    optimizer.engine.close()


def test_a_step_in_a_hook_has_what_waits() -> None:
    """As torch: every parameter steps whose gradient has come."""
    results = []
    for attached in (False, True):
        model: Any = Twice()
        optimizer: Any = CPUAdam(model.parameters(), lr=1e-2)
        if attached:
            config = offload.Config(params="cpu", gradients="cpu", cpu_memory="1MiB")
            model, optimizer = offload.attach(model, optimizer, config)
        model.blocks[0].scale.register_hook(lambda _, of=optimizer: of.step() and None)
        model(torch.linspace(-1, 1, 8), (True,), False).backward()
        results.append([p.detach().clone() for p in model.parameters()])
        if attached:
            optimizer.engine.close()
    assert not torch.equal(results[0][1], Twice().blocks[0].shift)
    assert all(map(torch.equal, *results))
