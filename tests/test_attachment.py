"""Attach leaves all as it was where it fails; afterwards a model consists of what it did then."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.optim.states import States
from tests.small import MIXED, adamw, config, small, torch_step
from tests.training import ALL_PLACEMENTS, RESIDENT, Net, config_of, same_bits, some_fast


def fail_half_way(
    placement: tuple[str, str, str], on: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attach a model that lies `on` a device and has gradients, and look at it afterwards."""
    torch.manual_seed(1)
    model = Net().to(torch.bfloat16).to(on)
    model.register_buffer("told", torch.ones(3, device=on))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    groups = [list(group["params"]) for group in optimizer.param_groups]
    held = [(p, p.detach().clone(), p.grad) for p in model.parameters()]

    def broken(self: Any) -> None:
        raise ZeroDivisionError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(States, "clear", broken)
        with pytest.raises(ZeroDivisionError):
            offload.attach(model, optimizer, config_of(placement, directory))
    gc.collect()
    for parameter, before, gradient in held:
        assert type(parameter) is torch.nn.Parameter
        assert parameter.device == before.device
        assert torch.equal(parameter, before)
        assert parameter.grad is gradient
    assert model.told.device.type == on
    for old, group in zip(groups, optimizer.param_groups):
        assert list(map(id, group["params"])) == list(map(id, old))
    optimizer.step()
    assert not list(directory.iterdir())
    model(torch.zeros(1, 4, dtype=torch.long, device=on)).sum().backward()


@pytest.mark.parametrize(
    "placement", some_fast([("nvme", "cpu", "nvme"), RESIDENT, *ALL_PLACEMENTS]), ids="-".join
)
def test_an_attach_that_fails_leaves_all_as_it_was(
    placement: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_half_way(placement, "cpu", tmp_path, monkeypatch)


@pytest.mark.parametrize("placement", [("cpu", "cpu", "cpu"), RESIDENT], ids="-".join)
def test_a_graph_of_before_has_its_gradients_or_is_refused(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """It saved parameters as they are, and the backward would find what stands in their place."""
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(8).view(1, 8)
    model(tokens).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.zero_grad()
    loss = model(tokens).sum()
    _, attached = offload.attach(model, optimizer, config_of(placement, tmp_path))
    with attached.engine:
        if placement == RESIDENT:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            attached.zero_grad()
            model(tokens).sum().backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("placement", [("cpu", "cpu", "cpu"), ("device", "device", "cpu")])
def test_values_beside_one_that_cannot_be_initialised_stay(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    model = Net()
    up = model.blocks[1].up
    up.bias = torch.nn.Parameter(torch.zeros(up.out_features, device="meta"))
    held = {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}
    optimizer = torch.optim.AdamW(model.parameters())

    def initialize(module: torch.nn.Module) -> None:
        torch.nn.init.zeros_(module.weight)  # type: ignore[arg-type]
        raise OSError("no such file, on purpose")

    with pytest.raises(OSError, match="on purpose"):
        offload.attach(model, optimizer, config_of(placement, tmp_path), initialize=initialize)
    assert up.bias.is_meta
    for name, value in held.items():
        assert torch.equal(model.get_parameter(name), value)
    _, attached = offload.attach(
        model, optimizer, config_of(placement, tmp_path), initialize=lambda one: None
    )
    with attached.engine:
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in held.items())


# -- what is done to an attached model as a whole --------------------------------------------------


def resized(model: Any) -> None:
    model.embed = nn.Embedding(60, 32)


def tied(model: Any) -> None:
    model.head.weight = model.embed.weight


def assigned(model: Any) -> None:
    model.load_state_dict(model.state_dict(), assign=True)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "resized embeddings": (resized, r"other parameters than at attach \(embed\.weight\)"),
    "tied": (tied, r"other parameters than at attach \(fewer"),
    "assigned": (assigned, r"other parameters than at attach \(embed\.weight"),
    "another device": (lambda m: m.to("meta"), r"torch\.float32 on meta.*detach"),
    "another dtype": (lambda m: m.half(), "detach"),
    "channels_last": (
        lambda m: m.to(memory_format=torch.channels_last),
        r"conv\.weight was given values .* strides \(27, 1, 9, 3\).*before attach",
    ),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_of_the_model_is_refused_by_the_step_at_the_latest(
    how: str, tmp_path: Path
) -> None:
    change, message = CHANGES[how]
    model = small()
    if how == "channels_last":
        model.conv = nn.Conv2d(3, 8, 3)
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine:
        before = model.norm.weight.detach().clone()
        with pytest.raises((RuntimeError, ValueError), match=message):
            change(model)
            torch_step(model, optimizer)
        assert torch.equal(model.norm.weight, before)


def test_after_detach_a_model_may_be_changed_again(tmp_path: Path) -> None:
    model = small()
    offload.attach(model, adamw(model), config(MIXED, tmp_path))
    offload.detach(model)
    resized(model)
    model.extra = nn.Linear(2, 2)
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine:
        torch_step(model, optimizer)


def test_what_changes_nothing_is_let_through(tmp_path: Path) -> None:
    """Trainers move models to where they are; optimizers' states, too."""
    model = small()
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine:
        torch_step(model, optimizer)
        kept = list(model.parameters())
        assert b"offload." not in pickle.dumps(model)  # It is read without this package, too.
        model.to("cpu").to(torch.float32).float().cpu().to("cpu", torch.float32).train().eval()
        assert all(p is q for p, q in zip(model.parameters(), kept))
        before = optimizer.state[model.head.weight]["exp_avg"].clone()
        for parameter, state in optimizer.state.items():
            optimizer.state[parameter] = {name: value.to("cpu") for name, value in state.items()}
        assert same_bits(optimizer.state[model.head.weight]["exp_avg"], before)
        assert optimizer.state[model.head.weight]["step"] == 1
        optimizer.state[model.head.weight] = {}
        assert not optimizer.state[model.head.weight]


def test_the_optimizer_has_torchs_own_hooks(tmp_path: Path) -> None:
    model, seen = small(), list[str]()
    plain = adamw(model)
    plain.register_step_post_hook(lambda *_: seen.append("from before"))
    _, optimizer = offload.attach(model, plain, config(MIXED, tmp_path))
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
        optimizer.register_state_dict_pre_hook(lambda *_: seen.append("saved")),
    ]
    with optimizer.engine:
        for _ in range(2):
            torch_step(model, optimizer)
            optimizer.state_dict()
            for handle in handles:
                handle.remove()
    assert seen == ["before", "from before", "after", "saved", "from before"]


def test_hooks_of_an_optimizer_stay_through_attach_and_detach(tmp_path: Path) -> None:
    model, seen = small(), list[str]()
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    for _ in range(2):
        _, plain = offload.detach(model)
        torch_step(model, plain)
        assert seen.pop() == "before"
        _, optimizer = offload.attach(model, plain, config(MIXED, tmp_path))
        torch_step(model, optimizer)
        assert seen.pop() == "before"
        assert not seen
    offload.detach(model)


class Rotary(nn.Module):
    """As the models of Hugging Face: a buffer that is computed when the module is built."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(8.0), persistent=False)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x) * self.angles)  # type: ignore[no-any-return,operator]


def test_a_model_with_empty_weights_has_its_buffers_and_ties(tmp_path: Path) -> None:
    with offload.empty_weights():
        model = Rotary()
    assert model.embed.weight.is_meta
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.angles, torch.arange(8.0))  # type: ignore[arg-type]
    assert not nn.Linear(2, 2).weight.is_meta
    optimizer = adamw(model)
    attached, _ = offload.attach(model, optimizer, config(MIXED, tmp_path))
    assert attached(torch.tensor([1, 2])).isfinite().all()
    offload.detach(model)
