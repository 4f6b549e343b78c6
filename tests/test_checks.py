"""What attach refuses: arguments mixed up, and models whose parameters would not be the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm

import offload
from offload.model.parameter import AttachedParameter
from tests.faults import nothing_leaks
from tests.small import MIXED, adamw, config, small, tokens, torch_step
from tests.training import RESIDENT, loss_of

MIXED_UP: dict[str, tuple[Callable[[nn.Module, Any], tuple[Any, ...]], str]] = {
    "optimizer and model": (lambda m, o: (o, m), "model is a AdamW"),
    "optimizer and config": (lambda m, o: (m, offload.Config(), o), "optimizer is a Config"),
    "config for the optimizer": (lambda m, o: (m, offload.Config()), "optimizer is a Config"),
    "a dict": (lambda m, o: (m, o, {"params": "cpu"}), "config is a dict"),
    "an empty dict": (lambda m, o: (m, o, {}), "config is a dict"),
    "False": (lambda m, o: (m, o, False), "config is a bool"),
    "the config's class": (lambda m, o: (m, o, offload.Config), "config is the class Config"),
    "no model": (lambda m, o: (None, o), "model is a NoneType"),
    "parameters": (lambda m, o: (m.parameters(), o), "model is a generator"),
    "the model's class": (lambda m, o: (nn.Linear, o), "model is the class Linear itself"),
    "the optimizer's class": (lambda m, o: (m, torch.optim.AdamW), "optimizer is the class AdamW"),
    "a list": (lambda m, o: (m, [o]), "optimizer is a list"),
}


@pytest.mark.parametrize("name", MIXED_UP)
def test_arguments_mixed_up_are_refused_in_one_message(name: str) -> None:
    mix, message = MIXED_UP[name]
    model = small()
    mine = adamw(model)
    with nothing_leaks(), pytest.raises(TypeError, match=message) as caught:
        offload.attach(*mix(model, mine))
    assert "write attach(model, optimizer, offload.Config(...))" in str(caught.value)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    torch_step(model, mine)


# -- models whose parameters would not be the same; more are in tests/refusals.py -----------------


class Two(nn.Module):
    """Two parameters, or a parameter and a buffer."""

    def __init__(self, one: torch.Tensor, other: torch.Tensor, *, buffer: bool = False) -> None:
        super().__init__()
        self.one = nn.Parameter(one)
        if buffer:
            self.register_buffer("other", other)
        else:
            self.other = nn.Parameter(other)


def inside_a_larger_one() -> nn.Module:
    flat = torch.zeros(12)
    return Two(flat, flat[4:8])


class Special(nn.Parameter):
    """Has ways of its own."""


def special() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight = Special(model.weight.data)
    return model


def channels_last() -> nn.Module:
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3))
    return model.to(memory_format=torch.channels_last)  # type: ignore[no-any-return]


def built_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(4, 4)


LOST: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "inside a larger one": (inside_a_larger_one, "one and other share memory.*clone"),
    "one element in a buffer": (
        lambda: Two(flat := torch.zeros(12), flat[2:3].expand(7), buffer=True),
        "one and other share memory",
    ),
    "channels_last": (channels_last, r"0\.weight .*strides \(27, 1, 9, 3\).*contiguous_format"),
    "a part of another": (
        lambda: Two(torch.zeros(6, 4)[:, :3], torch.zeros(2)),
        r"one .*strides \(4, 1\).*part of another.*contiguous\(\) copy",
    ),
    "a class of its own": (special, r"parameter weight is of class tests\.\S*Special"),
    "inference mode": (built_in_inference_mode, r"weight was made under torch\.inference_mode"),
}


@pytest.mark.parametrize("name", LOST)
def test_what_would_not_be_the_same_is_refused(name: str) -> None:
    build, message = LOST[name]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    with nothing_leaks(), pytest.raises(ValueError, match=message):
        offload.attach(model, optimizer)
    assert not any(isinstance(p, AttachedParameter) for p in model.parameters())


def test_what_shares_no_memory_is_fine() -> None:
    """Side by side in one piece of memory, empty, a scalar; or buffers alone."""
    flat = torch.arange(8.0)
    model = Two(flat[:4], flat[4:], buffer=False)
    model.empty, model.one_more = nn.Parameter(torch.empty(0)), nn.Parameter(torch.tensor(1.0))
    model.register_buffer("told", torch.ones(3))
    model.register_buffer("again", model.told[1:])
    offload.attach(model, None)
    assert model.other.tolist() == [4.0, 5.0, 6.0, 7.0]
    offload.detach(model)


@pytest.mark.parametrize("placement", [RESIDENT, MIXED], ids="-".join)
def test_what_a_gradient_would_be_lost_with_is_not_attached(placement: Any, tmp_path: Path) -> None:
    model: Any = small()
    loss_of(model, tokens()).backward()
    with pytest.raises(ValueError, match=r"embed\.weight has a gradient.*without an optimizer"):
        offload.attach(model, None, config(placement, tmp_path))
    model.head.requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"head\.weight has a gradient and it is frozen.*zero_grad"
    ):
        offload.attach(model, adamw(model), config(placement, tmp_path))
    model.head.weight.grad = None
    kept, model.embed.weight.data = model.embed.weight.data, model.embed.weight.data[1:]
    with pytest.raises(ValueError, match=r"embed\.weight has a gradient from before"):
        offload.attach(model, adamw(model), config(placement, tmp_path))
    model.embed.weight.data = kept
    _, optimizer = offload.attach(model, adamw(model), config(placement, tmp_path))
    with optimizer.engine:
        optimizer.step()


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

    monkeypatch.setattr("offload.model.checks.kernel", none)
    with nothing_leaks(), pytest.raises(ValueError, match="CPU_ADAM_KERNEL=nonsense"):
        offload.attach(small(), None, config(MIXED, tmp_path))


def test_what_is_attached_is_refused(tmp_path: Path) -> None:
    model, other = small(), small()
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine:
        with pytest.raises(TypeError, match=r"optim\.optimizer\.Optimizer cannot be attached"):
            offload.attach(other, optimizer, config(MIXED, tmp_path))
        for one in (model, nn.Sequential(model), model.blocks[1]):
            with pytest.raises(ValueError, match=r"attached already: detach it first"):
                offload.attach(one, adamw(one), config(MIXED, tmp_path))
        torch_step(model, optimizer)
