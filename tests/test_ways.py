"""What offloaded parameters would silently do in another way: done right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm

import offload
from tests.faults import nothing_leaks
from tests.small import MIXED, config, small
from tests.training import RESIDENT, config_of, same_bits

# -- outputs ---------------------------------------------------------------------------------------


@dataclass
class Plain:
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class Frozen:
    value: torch.Tensor


class Holder:
    """An object that refers to itself, as linked ones do."""

    def __init__(self, value: torch.Tensor):
        self.inner = {"values": [value]}
        self.me = self

    @property
    def value(self) -> torch.Tensor:
        return self.inner["values"][0]


class Part(nn.Module):
    def __init__(self, kind: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(20, 8))

    def forward(self, count: int) -> Any:
        return self.kind(self.weight[:count])


class Parts(nn.Module):
    def __init__(self, kind: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(kind) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in [one(4) for one in self.parts]:
            x = x + part.value * x
        return x.pow(2).mean()


@pytest.mark.parametrize("kind", [Plain, Frozen, Holder])
def test_a_view_of_a_weight_in_an_object_outlives_the_slot(kind: Any, tmp_path: Path) -> None:
    found = []
    for placement in (None, RESIDENT, ("cpu", "cpu", "cpu")):
        torch.manual_seed(0)
        model, x = Parts(kind), torch.randn(4, 8)
        if placement is not None:
            made = torch.optim.AdamW(model.parameters())
            offload.attach(model, made, config_of(placement, tmp_path))
        loss = model(x)
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([loss.detach(), *gradients])
        if placement is not None:
            offload.detach(model)
    assert len(found[0]) == 6
    for one in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(found[0], one, strict=True))


def test_an_output_without_views_stays_the_same_object(tmp_path: Path) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept = nn.Linear(2, 2), {"a": [torch.ones(2)]}

        def forward(self) -> Any:
            self.layer(torch.ones(2))
            return self.kept

    model = Returns()
    offload.attach(model, None, config(RESIDENT, tmp_path))
    assert model() is model.kept
    offload.detach(model)


# -- refused at attach -----------------------------------------------------------------------------


def channels_last() -> nn.Module:
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3))
    return model.to(memory_format=torch.channels_last)  # type: ignore[no-any-return]


def row_of_a_transposed() -> nn.Module:
    """The first rows of a matrix that lies column by column, as SVD leaves them."""
    model = nn.Linear(16, 2, bias=False)
    model.weight.data = torch.randn(16, 32).t()[:2].detach()[:, :16]
    return model


def columns() -> nn.Module:
    model = nn.Linear(4, 24, bias=False)
    model.weight.data = torch.randn(24, 16)[:, :4]
    return model


def hooked() -> nn.Module:
    model = nn.Linear(4, 4)
    register: Any = model.weight.register_post_accumulate_grad_hook
    register(lambda p: None)
    return model


def with_view() -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    model.tied = model[0].weight.t()
    return model  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "channels_last": (channels_last, r"0\.weight .*strides \(27, 1, 9, 3\).*contiguous_format"),
    "columns": (columns, r"weight .*strides \(16, 1\).*part of another.*contiguous\(\) copy"),
    "rows across": (row_of_a_transposed, r"weight .*strides \(1, 32\).*contiguous\(\) copy"),
    "a hook after accumulation": (hooked, r"parameter weight has a hook .*p\.register_hook"),
    "a view kept": (with_view, r"attribute tied is a view of parameter 0\.weight.*clone"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, tmp_path: Path) -> None:
    build, message = REFUSED[name]
    model = build()
    made = torch.optim.AdamW(model.parameters())
    with nothing_leaks(), pytest.raises(ValueError, match=message):
        offload.attach(model, made, config(MIXED, tmp_path))
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_a_view_that_is_renewed_in_each_forward_is_fine(tmp_path: Path) -> None:
    norm: Any = spectral_norm
    model = nn.Sequential(norm(nn.Linear(4, 4)))
    offload.attach(model, torch.optim.AdamW(model.parameters()), config(MIXED, tmp_path))
    model(torch.ones(2, 4)).sum().backward()
    offload.detach(model)


def test_a_kernel_that_there_is_not_is_told_at_attach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise ValueError("CPU_ADAM_KERNEL=nonsense: no such kernel")

    monkeypatch.setattr("offload.checks.kernel", none)
    with nothing_leaks(), pytest.raises(ValueError, match="CPU_ADAM_KERNEL=nonsense"):
        offload.attach(small(), None, config(MIXED, tmp_path))
