"""States and options that come from elsewhere: what torch would make of them, or a refusal."""

from __future__ import annotations

import copy
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from cpu_adam import CPUSGD
from tests.small import MIXED, adamw, config, small, torch_step
from tests.training import same_bits

SAVED_BY: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.5),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "sgd without states": lambda p: torch.optim.SGD(p, lr=1e-2),
}


def saved_by(kind: str) -> dict[str, Any]:
    model = small()
    groups, _, states = kind.partition(" beside states of ")
    optimizer = SAVED_BY[groups](model.parameters())
    torch_step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    return {**saved, "state": saved_by(states)["state"]} if states else saved


def test_adamw_decays_as_adamw_whatever_it_loads(tmp_path: Path) -> None:
    """As torch has it: Adam's own state says otherwise."""
    ours, theirs = small(), small()
    plain = torch.optim.AdamW(theirs.parameters())
    _, optimizer = offload.attach(ours, adamw(ours), config(MIXED, tmp_path))
    with optimizer.engine:
        for one in (plain, optimizer):
            one.load_state_dict(saved_by("adam"))
            assert one.param_groups[0]["decoupled_weight_decay"]
            assert one.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("amsgrad", r"amsgrad=True .* not offered"),
        ("sgd", "found some with momentum and no betas"),
        ("sgd without states", "found some with momentum and no betas"),
        ("adamw beside states of sgd", "found one with momentum_buffer"),
    ],
)
def test_what_another_optimizer_saved_is_refused(kind: str, message: str, tmp_path: Path) -> None:
    model = small()
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine:
        torch_step(model, optimizer)
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved_by(kind))
        assert str(optimizer.state_dict()) == str(before)


def test_all_states_are_replaced_by_assignment(tmp_path: Path) -> None:
    model = small()
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine:
        weight = model.head.weight
        assert weight not in optimizer.state
        torch_step(model, optimizer)
        assert weight in optimizer.state
        optimizer.state = defaultdict(dict)
        assert not len(optimizer.state)
        assert weight not in optimizer.state
        torch_step(model, optimizer)
        assert optimizer.state[weight]["step"] == 1


def test_a_momentum_that_begins_later_begins_with_its_first_gradient(tmp_path: Path) -> None:
    """As in torch, where the buffer is made then; with dampening it shows."""

    def steps(model: nn.Module, optimizer: Any) -> None:
        for momentum in (0.0, 0.9, 0.9):
            optimizer.param_groups[0]["momentum"] = momentum
            torch_step(model, optimizer)
            kept = optimizer.state.get(model.head.weight, {})
            assert ("momentum_buffer" in kept) == (momentum > 0)

    ours, theirs = small(), small()
    steps(theirs, CPUSGD(theirs.parameters(), lr=1e-1, dampening=0.5))
    mine = CPUSGD(ours.parameters(), lr=1e-1, dampening=0.5)
    _, optimizer = offload.attach(ours, mine, config(MIXED, tmp_path))
    with optimizer.engine:
        steps(ours, optimizer)
        for mine_p, theirs_p in zip(ours.parameters(), theirs.parameters()):
            assert same_bits(mine_p.detach(), theirs_p.detach())


def test_states_of_what_is_frozen_are_refused_and_freezing_goes_after_attach(
    tmp_path: Path,
) -> None:
    model = small()
    plain = adamw(model)
    torch_step(model, plain)
    plain.zero_grad()
    saved = plain.state_dict()
    frozen = list(model.parameters())[:2]
    for parameter in frozen:
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="freeze it after attach, or drop its state"):
        offload.attach(model, plain, config(MIXED, tmp_path))
    for parameter in frozen:
        plain.state.pop(parameter)
    _, optimizer = offload.attach(model, plain, config(MIXED, tmp_path))
    with pytest.raises(ValueError, match="freeze it after attach, or drop its state"):
        optimizer.load_state_dict(saved)
    torch_step(model, optimizer)
    optimizer.zero_grad()
    offload.detach(model)
