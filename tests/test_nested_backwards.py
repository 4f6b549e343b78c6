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
from tests.covering import by_turns
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


@pytest.mark.parametrize(
    ("use", "reentrant", "others"),
    by_turns(list(USES), [True, False], [(2, 3, 4, 5), (1, 0, 3)]),
)
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


class BreaksOff(RuntimeError):
    """What a backward inside another is ended by."""


def broken_inside(model: Any, optimizer: Any, left: list[int]) -> list[torch.Tensor]:
    """Train; the backward inside the outer one raises halfway, and the outer one goes on.

    `left` is told how many units an attached model has in use after each backward.
    """

    def inside(gradient: torch.Tensor) -> None:
        def ends(gradient: torch.Tensor) -> None:
            raise BreaksOff

        with torch.enable_grad():
            halfway = model[4](torch.ones(3, WIDTH, requires_grad=True))
            halfway.register_hook(ends)
            loss = model[5](halfway).sum()
        with pytest.raises(BreaksOff):
            loss.backward()

    found: list[torch.Tensor] = []
    for step in range(3):
        torch.manual_seed(step)
        hook = model[2].up.bias.register_hook(inside)
        model(torch.randn(3, WIDTH)).pow(2).sum().backward()
        hook.remove()
        if hasattr(optimizer, "engine"):
            left.append(len(optimizer.engine.in_use.units) + len(optimizer.engine.backwards))
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("reentrant", [True, False])
def test_one_that_raises_inside_another_is_over(reentrant: bool, tmp_path: Path) -> None:
    """The outer one ends its pass, with what came of the inner one, as torch's does."""
    expected = broken_inside(*build("itself", reentrant), [])
    for placement in PLACEMENTS:
        left: list[int] = []
        config = config_of(placement, tmp_path)
        model, optimizer = offload.attach(*build("itself", reentrant), config)
        with optimizer.engine:
            found = broken_inside(model, optimizer, left)
        assert all(map(same_bits, found, expected)), placement
        assert left == [0, 0, 0]
