"""What is refused with a reason: numbers that float32 does not hold, states that do not fit."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import cpu_adam
from tests.optimizers import FOUR_PARTS, OURS, assert_same, every_optimizer, run, tensors_of


@pytest.mark.parametrize(
    "options",
    [{"lr": 1e39}, {"weight_decay": 1e39}, {"lr": 3e38, "weight_decay": 2.0, "betas": (0.0, 0.9)}],
    ids=repr,
)
@every_optimizer
def test_what_overflows_in_float32_is_refused(kind: str, options: dict[str, Any]) -> None:
    """SGD has no product of its numbers, and no betas."""
    if kind == "sgd" and len(options) > 1:
        return
    optimizer = OURS[kind]([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match=FOUR_PARTS):
        OURS[kind]([nn.Parameter(torch.ones(3))], **options)
    optimizer.param_groups[0].update(options)
    with pytest.raises(ValueError, match=FOUR_PARTS):
        run(optimizer, 1)
    assert not optimizer.state


def test_a_gradient_scale_that_overflows_warns_of_nothing() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = cpu_adam.CPUSGD([p], lr=0.1)
    optimizer.grad_scale = torch.tensor(1e-40)
    p.grad = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert torch.isinf(p).all()


@pytest.mark.parametrize("wrong", [0.0, float("nan"), -1.0, float("inf")])
def test_a_gradient_scale_that_is_none_is_refused(wrong: float) -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = cpu_adam.CPUAdam([p])
    for _ in range(2):
        p.grad = torch.ones(3)
        optimizer.grad_scale = torch.tensor(wrong)
        with pytest.raises(ValueError, match=FOUR_PARTS):
            optimizer.step()
        assert (p == 1).all()
        assert not optimizer.state
        optimizer.found_inf = torch.tensor(1.0)  # Such a step is skipped, whatever its scale.
        optimizer.step()
        del optimizer.found_inf
    optimizer.grad_scale = torch.tensor(2.0)
    optimizer.step()
    assert (p < 1).all()


@pytest.mark.parametrize("wrong", [float("nan"), 1.7, -1.0, float("inf")])
def test_steps_that_were_overwritten_are_refused(wrong: float) -> None:
    optimizer = cpu_adam.CPUAdam([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))])
    run(optimizer, 2)
    p = optimizer.param_groups[0]["params"][1]
    optimizer.state[p]["step"].fill_(wrong)
    before = [x.clone() for x in tensors_of(optimizer)]
    with pytest.raises(ValueError, match=FOUR_PARTS):
        optimizer.step()
    assert_same(tensors_of(optimizer), before)


@pytest.mark.parametrize("saver", OURS)
@pytest.mark.parametrize("loader", OURS)
def test_states_of_another_rule_are_refused(loader: str, saver: str) -> None:
    optimizers = [OURS[kind]([nn.Parameter(torch.ones(3))]) for kind in (saver, loader)]
    for optimizer in optimizers:
        run(optimizer, 1)
    state = optimizers[0].state_dict()
    if loader == saver:
        optimizers[1].load_state_dict(state)
        return
    options = optimizers[1].state_dict()["param_groups"]
    before = [x.clone() for x in tensors_of(optimizers[1])]
    with pytest.raises(ValueError, match=FOUR_PARTS):
        optimizers[1].load_state_dict({**state, "param_groups": options})
    assert_same(tensors_of(optimizers[1]), before)


@pytest.mark.parametrize(
    "wrong",
    [
        *([], {}, None, {"state": {}}, {"param_groups": []}),
        *({"state": {}, "param_groups": [{}]}, {"state": [], "param_groups": [{"params": [0]}]}),
    ],
    ids=repr,
)
def test_what_is_no_state_dict_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=FOUR_PARTS):
        cpu_adam.CPUAdam([nn.Parameter(torch.ones(3))]).load_state_dict(wrong)


def test_a_residue_that_torch_has_rounded_is_dropped() -> None:
    optimizer = cpu_adam.CPUAdam([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])
    run(optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["residue"] = state["state"][0]["residue"].bfloat16()
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("wrong", [1.5, "2", True, 10**6, 2**31, -1])
def test_numbers_of_threads_that_are_none_are_refused(wrong: Any) -> None:
    before = cpu_adam.threads()
    with pytest.raises(ValueError, match=FOUR_PARTS):
        cpu_adam.set_threads(wrong)
    assert cpu_adam.threads() == before
