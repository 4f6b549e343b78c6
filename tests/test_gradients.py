"""`p.grad` of streamed parameters: shown, edited, assigned, added to, given up."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from tests import training
from tests.covering import by_turns
from tests.training import RESIDENT, Net, Run, assert_same, attached, plain, same_bits, train

EVERYWHERE = [("device", "cpu", "cpu"), ("cpu", "device", "cpu"), ("nvme", "nvme", "nvme")]


@pytest.fixture(params=training.some_fast(EVERYWHERE[::-1], fast=2), ids="-".join)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    """A bf16 run of one step, everything at rest."""
    with attached(request.param, tmp_path, build=lambda: Net(layers=3)) as made:
        plain(made, 0)
        yield made


def block(run: Run) -> Any:
    return run.model.blocks[2]  # type: ignore[index,union-attr]


def test_there_is_none_inside_backward_and_one_after(run: Run) -> None:
    weight = block(run).up.weight
    seen: list[Any] = []
    run.model.embed.weight.register_hook(lambda g: seen.append(weight.grad))  # type: ignore
    run.loss().backward()
    assert seen == [None]
    assert weight.grad.shape == weight.shape
    assert weight.grad.is_contiguous()
    assert weight.grad.device.type == "cpu"
    assert weight.grad.dtype == torch.bfloat16


def test_it_is_one_view_and_edits_count(run: Run) -> None:
    weight, bias = block(run).up.weight, block(run).up.bias
    run.loss().backward()
    gradient = weight.grad
    assert weight.grad.data_ptr() == gradient.data_ptr()
    gradient.fill_(1.0)
    weight.grad[0].mul_(2)
    weight.grad.data /= 2  # As who averages over ranks by hand.
    assert weight.grad[0].eq(1).all()
    bias.grad = None
    before = bias.detach().clone()
    run.optimizer.step()
    moment = run.optimizer.state[weight]["exp_avg"]
    assert (moment[0] - moment[1]).gt(0.04).all()
    assert same_bits(bias.detach(), before)
    assert weight.grad[0].eq(1).all()  # Until zero_grad().
    run.optimizer.zero_grad()
    assert weight.grad is None


def test_it_can_be_assigned_and_deleted(run: Run) -> None:
    weight = block(run).up.weight
    mine = torch.full((128, 32), 0.25, dtype=torch.bfloat16)
    weight.grad = mine
    assert torch.equal(weight.grad, mine)
    weight.grad = weight.grad  # of itself
    weight.grad += 0.25
    assert weight.grad.eq(0.5).all()
    run.loss().backward()
    assert not weight.grad.eq(0.5).all()
    del weight.grad
    assert weight.grad is None
    weight.grad = torch.zeros(128, 32, dtype=torch.bfloat16)
    run.step()
    assert run.optimizer.state[weight]["step"] == 2


def clipped(run: Run, number: int) -> None:
    """As trainers do, with what torch has; one gradient is assigned."""
    for _ in range(2):
        run.loss().backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    last = list(run.model.parameters())[-1]
    last.grad = last.grad * 2  # type: ignore[operator]
    run.step()


@pytest.mark.parametrize("room", [9_000, 30_000])
def test_on_nvme_they_are_clipped_at_any_size(room: int, tmp_path: Path) -> None:
    """What has no room in memory is shown in a file, of which nothing is left."""
    ours = train(("cpu", "nvme", "cpu"), tmp_path, clipped, exposed_memory=room)
    assert_same(ours, train(RESIDENT, tmp_path, clipped))
    assert os.listdir(tmp_path) == []


def test_no_space_to_show_them_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with attached(("cpu", "nvme", "cpu"), tmp_path, exposed_memory=1) as run:
        run.loss().backward()
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(MemoryError, match=r"No space.*max_grad_norm"):
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.step()
        plain(run, 1)


def test_one_that_was_given_up_is_its_holders(run: Run) -> None:
    """By zero_grad, or alone: it keeps what it showed, and is no part of the next step."""
    weight, held = block(run).up.weight, list[torch.Tensor]()
    for give_up in (run.optimizer.zero_grad, lambda: setattr(weight, "grad", None)):
        run.loss().backward()
        held.append(weight.grad)
        shown = held[-1].clone()
        give_up()
        run.loss().backward()
        assert same_bits(held[-1], shown)
        held[-1].fill_(7)
        assert not weight.grad.eq(7).any()
        run.step()


# -- parameters that come alone, twice, or before their unit is used ------------------------------


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
        for one in self.blocks:
            for every in uses:
                x = checkpoint(one, x, every, use_reentrant=True) if recompute else one(x, every)
        return x.sum()


CONFIG = {"params": "cpu", "gradients": "cpu", "optimizer": "cpu", "cpu_memory": "1MiB"}


def gradients_of(
    uses: tuple[bool, ...], recompute: bool, config: offload.Config | None, penalty: str
) -> list[Any]:
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
    config = offload.Config(**{**CONFIG, "gradients": tier})  # type: ignore[arg-type]
    expected = gradients_of(uses, recompute, None, penalty)
    for found, alone in zip(gradients_of(uses, recompute, config, penalty), expected, strict=True):
        assert (found is None) == (alone is None)
        assert found is None or torch.equal(found, alone)
