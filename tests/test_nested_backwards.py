"""Backwards within backwards: what the outer one has of a unit's weights stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import offload
from cpu_adam import CPUAdam
from offload.in_use import InUse
from tests.training import Net, assert_same, config_of, fp32, plain, same_bits, train, train_alone

WIDTH = 8
PLACEMENTS = [("cpu", "cpu", "cpu"), ("nvme", "cpu", "cpu")]


def not_recorded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        turned = weight.t()
    return x @ turned


USES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "itself": F.linear,
    "detached": lambda x, weight: F.linear(x, weight.detach()),
    "its data": lambda x, weight: F.linear(x, weight.data),
    "a view of it": not_recorded,
    "in chunks": lambda x, weight: torch.cat([F.linear(x, one) for one in weight.chunk(2)], -1),
}


class Inside(nn.Module):
    """A unit that may have a checkpoint of its own, of which the hooks of modules see nothing."""

    def __init__(self, use: str, reentrant: bool | None):
        super().__init__()
        self.use, self.reentrant = USES[use], reentrant
        self.up, self.base = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.use(x, self.base).tanh()).tanh()  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> Any:
        if self.reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def build(use: str, reentrant: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    around = (Inside(use, None) for _ in range(4))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Inside(use, reentrant), *around)
    return model, CPUAdam(model.parameters(), lr=1e-2)


def trained(model: Any, optimizer: Any, others: tuple[int, ...]) -> list[torch.Tensor]:
    """Where a gradient of a weight makes `others` run, backward and all."""

    under_way: list[bool] = []

    def inside(gradient: torch.Tensor) -> None:
        if under_way:
            return
        under_way.append(True)
        with torch.enable_grad():
            for other in others:
                model[other](torch.ones(3, WIDTH, requires_grad=True)).sum().backward()
        under_way.clear()

    found: list[torch.Tensor] = []
    for step in range(2):
        torch.manual_seed(step)
        hook = model[1].up.bias.register_hook(inside)
        model(torch.randn(3, WIDTH)).pow(2).sum().backward()
        hook.remove()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("others", [(2, 3, 4, 5), (1, 0, 3)], ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("use", USES)
def test_a_unit_that_was_run_again_inside_itself_stays(
    use: str, reentrant: bool, others: tuple[int, ...], tmp_path: Path
) -> None:
    expected = trained(*build(use, reentrant), others)
    for placement in PLACEMENTS:
        model, optimizer = offload.attach(*build(use, reentrant), config_of(placement, tmp_path))
        with optimizer.engine:
            found = trained(model, optimizer, others)
        assert all(map(same_bits, found, expected)), placement


def test_what_a_backward_has_behind_it_keeps_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block's backward lies within that of the head, which needs its weights no more."""
    apart: list[str] = []
    serve_apart = InUse._serve_apart

    def counted(self: InUse, bound: Any, entry: Any) -> None:
        apart.append(bound.spec.name)
        serve_apart(self, bound, entry)

    kept: list[int] = []
    release_held = InUse.release_held

    def looked(self: InUse, **more: Any) -> None:
        release_held(self, **more)
        kept.append(sum(one.held for one in self.units if one is not more.get("but")))

    monkeypatch.setattr(InUse, "_serve_apart", counted)
    monkeypatch.setattr(InUse, "release_held", looked)
    options = fp32(build=partial(Net, checkpointed=True, reentrant=True))
    found = train(PLACEMENTS[1], tmp_path, plain, **options)
    assert_same(found, train_alone(plain, **options))
    assert kept
    assert not any(kept)
    assert apart == []
