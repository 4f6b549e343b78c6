"""The optimizer that attach returns: groups, gradients, states in torch's format, scalers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.optim import supported_optimizers
from tests.covering import by_turns
from tests.small import MIXED, PLACEMENTS, adamw, config, small, tokens, torch_step
from tests.training import Net, attached, loss_of, plain, same_bits

IN_FOUR_PARTS = "asked .*; found .*; likely cause: .*; try: "


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def test_a_group_of_another_model_is_not_added(tmp_path: Path) -> None:
    model = small()
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine:
        with pytest.raises(ValueError, match=r"\(3,\).*not in the model"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        assert len(optimizer.param_groups) == 1


def test_room_for_parameters_of_no_group_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(supported_optimizers, "UNHELD_BYTES_TOLD", 1)
    model = small()
    mine = torch.optim.AdamW(model.blocks.parameters(), lr=1e-2)
    with pytest.warns(RuntimeWarning, match=r"in no group .*embed.*requires_grad_\(False\)"):
        offload.attach(model, mine, config(MIXED, tmp_path))[1].engine.close()
    model = small()
    for one in (model.embed, model.norm, model.head):
        one.requires_grad_(False)
    mine = torch.optim.AdamW(model.blocks.parameters(), lr=1e-2)
    offload.attach(model, mine, config(MIXED, tmp_path))[1].engine.close()


def test_zero_grad_reaches_parameters_that_live_nowhere(tmp_path: Path) -> None:
    model = small()
    model.empty = nn.Parameter(torch.zeros(0, 3))
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine:
        model.empty.sum().backward()
        assert model.empty.grad is not None
        optimizer.zero_grad(set_to_none=False)
        assert model.empty.grad is not None
        optimizer.zero_grad()
        assert model.empty.grad is None


def test_closure(tmp_path: Path) -> None:
    model = small()
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine, torch.no_grad():

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, tokens())
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        assert losses[2] < losses[1] < losses[0]


def test_to_zero_gradients_no_copy_is_needed(tmp_path: Path) -> None:
    """Of a unit on nvme whose gradients could not be shown."""
    model = small()
    asked = config(("cpu", "nvme", "cpu"), tmp_path, exposed_memory=1)
    _, optimizer = offload.attach(model, adamw(model), asked)
    loss_of(model, tokens()).backward()
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, tokens()).backward()
    offload.detach(model)
    alone = small()
    loss_of(alone, tokens()).backward()
    for mine, other in zip(model.parameters(), alone.parameters()):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)


def test_the_state_is_that_of_torch(tmp_path: Path) -> None:
    ours, theirs = small(), small()
    _, optimizer = offload.attach(ours, adamw(ours), config(MIXED, tmp_path))
    reference = adamw(theirs)
    with optimizer.engine:
        optimizer.step()  # Without any gradient nothing moves.
        assert len(optimizer.state) == 0
        assert optimizer.state_dict()["state"] == {}
        for seed in range(3):
            torch_step(ours, optimizer, seed)
            torch_step(theirs, reference, seed)
        found, wanted = optimizer.state_dict(), reference.state_dict()
        assert found["state"].keys() == wanted["state"].keys()
        for key, slots in wanted["state"].items():
            assert found["state"][key].keys() == slots.keys()
            for name, value in slots.items():
                torch.testing.assert_close(found["state"][key][name], value, rtol=2e-3, atol=1e-7)
        assert [g["params"] for g in found["param_groups"]] == [
            g["params"] for g in wanted["param_groups"]
        ]
        assert found["param_groups"][0].keys() == wanted["param_groups"][0].keys()
        parameter = ours.head.weight
        assert optimizer.state[parameter]["step"].item() == 3
        assert parameter in optimizer.state
        assert len(dict(optimizer.state.items())) == len(list(ours.parameters()))
        assert optimizer.grad_norm() is None  # Nothing clips.
        state = optimizer.state[parameter]
        with pytest.raises(RuntimeError, match="Inplace update"):
            state["exp_avg"].zero_()
        state["exp_avg_sq"] = state["exp_avg_sq"].to("cpu")  # As Lightning does.
        optimizer.state[parameter] = {**copy.deepcopy(state), "exp_avg": state["exp_avg"] * 0}
        assert not optimizer.state[parameter]["exp_avg"].any()
        reference.load_state_dict(optimizer.state_dict())
        torch_step(theirs, reference, 3)  # Edits what it was given.


@pytest.mark.parametrize(("make", "placement"), by_turns([adamw, sgd], PLACEMENTS))
def test_torchs_state_goes_in_and_ours_goes_out(
    make: Any, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    theirs = small()
    reference = make(theirs)
    for seed in range(2):
        torch_step(theirs, reference, seed)
    ours = small()
    _, optimizer = offload.attach(ours, make(ours), config(placement, tmp_path))
    with optimizer.engine:
        torch_step(ours, optimizer, 9)
        ours.load_state_dict(theirs.state_dict())
        optimizer.load_state_dict(reference.state_dict())
        states = optimizer.state_dict()["state"]
        for key, slots in reference.state_dict()["state"].items():
            assert all(same_bits(states[key][name], value) for name, value in slots.items())
        losses = [torch_step(ours, optimizer, seed) for seed in (2, 3)]
        back = small()
        plain_again = make(back)
        back.load_state_dict(ours.state_dict())
        plain_again.load_state_dict(optimizer.state_dict())
        last = torch_step(ours, optimizer, 4), torch_step(ours, optimizer, 5)
        assert losses == pytest.approx(
            [torch_step(theirs, reference, seed) for seed in (2, 3)], rel=1e-4
        )
        assert last == pytest.approx(
            (torch_step(back, plain_again, 4), torch_step(back, plain_again, 5)), rel=1e-4
        )


SPOILED: dict[str, tuple[Callable[[Any], object], str]] = {
    "another shape": (lambda s: s["state"][3].update(exp_avg=torch.zeros(5)), "another model"),
    "fewer": (lambda s: s["param_groups"][0]["params"].pop(), "another model"),
    "no step": (lambda s: s["state"][3].pop("step"), IN_FOUR_PARTS),
    "wide residue": (
        lambda s: s["state"][3].update(residue=torch.full(s["state"][3]["exp_avg"].shape, 1 << 15)),
        IN_FOUR_PARTS,
    ),
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    spoil: str, tmp_path: Path
) -> None:
    change, message = SPOILED[spoil]
    with attached(MIXED, tmp_path) as run:
        plain(run, 0)
        before = copy.deepcopy(run.optimizer.state_dict())
        state = copy.deepcopy(before)
        state["param_groups"][0]["lr"] = 9.0
        change(state)
        with pytest.raises(ValueError, match=message):
            run.optimizer.load_state_dict(state)
        after = run.optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for key, slots in before["state"].items():
            assert all(same_bits(after["state"][key][name], value) for name, value in slots.items())


@pytest.mark.parametrize(("make", "placement"), by_turns([adamw, sgd], PLACEMENTS))
def test_existing_states_and_gradients_are_imported(
    make: Any, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    def started() -> tuple[Net, torch.optim.Optimizer]:
        model = small()
        optimizer = make(model)
        torch_step(model, optimizer, 1)
        optimizer.zero_grad()
        loss_of(model, tokens(2)).backward()
        return model, optimizer

    theirs, reference = started()
    ours, mine = started()
    gradients = [p.grad.clone() for p in theirs.parameters()]  # type: ignore[union-attr]
    _, optimizer = offload.attach(ours, mine, config(placement, tmp_path))
    with optimizer.engine:
        for parameter, gradient in zip(ours.parameters(), gradients):
            assert parameter.grad is not None
            assert same_bits(parameter.grad, gradient)
        states = optimizer.state_dict()["state"]
        for key, slots in reference.state_dict()["state"].items():
            assert all(same_bits(states[key][name], value) for name, value in slots.items())
        loss_of(ours, tokens(3)).backward()
        loss_of(theirs, tokens(3)).backward()
        for one, other in zip(ours.parameters(), theirs.parameters()):
            assert one.grad is not None
            assert other.grad is not None
            assert same_bits(one.grad, other.grad)
        optimizer.step()
        reference.step()
        assert optimizer.state[ours.head.weight]["step"].item() == 2
        assert torch_step(ours, optimizer, 4) == pytest.approx(
            torch_step(theirs, reference, 4), rel=1e-4
        )


def test_the_rate_is_frozen_by_step(tmp_path: Path) -> None:
    """What changes after step() has returned does not reach the update, however late that runs."""
    found = []
    for pace in (None, lambda op, since: since + 0.005):
        model = small()
        _, optimizer = offload.attach(
            model, adamw(model), config(("cpu", "cpu", "cpu"), tmp_path), pace=pace
        )
        with optimizer.engine:
            loss_of(model, tokens()).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 100.0
            optimizer.zero_grad()
            found.append(loss_of(model, tokens()).item())
    assert found[0] == found[1] < 5


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_grad_norm(placement: tuple[str, str, str], tmp_path: Path) -> None:
    theirs = small(torch.bfloat16)
    loss_of(theirs, tokens()).backward()
    wanted = nn.utils.get_total_norm([p.grad.float() for p in theirs.parameters()])  # type: ignore
    ours = small(torch.bfloat16)
    asked = config(placement, tmp_path, max_grad_norm=1e-3)
    _, optimizer = offload.attach(ours, adamw(ours), asked)
    with optimizer.engine:
        assert optimizer.grad_norm() is None
        loss_of(ours, tokens()).backward()
        optimizer.step()
        assert optimizer.grad_norm() == pytest.approx(wanted.item(), rel=1e-5)
        moment = optimizer.state[ours.head.weight]["exp_avg"]
        clipped = theirs.head.weight.grad.float() * (1e-3 / (wanted + 1e-6)) * 0.1  # type: ignore
        torch.testing.assert_close(moment, clipped, rtol=1e-4, atol=1e-12)


class Named(torch.optim.AdamW):
    """As many libraries have one: another name, the same step."""


def test_options_that_are_not_offered_are_refused_after_attach_too() -> None:
    model = small()
    _, optimizer = offload.attach(model, adamw(model))
    weight = next(model.parameters())
    with pytest.raises(ValueError, match="amsgrad=True in parameter group 1 is not offered"):
        optimizer.add_param_group({"params": [weight], "amsgrad": True})
    optimizer.param_groups[0]["amsgrad"] = True
    loss_of(model, tokens()).backward()
    with pytest.raises(ValueError, match="amsgrad=True in parameter group 0 is not offered"):
        optimizer.step()
    offload.detach(model)


def test_a_subclass_that_inherits_its_step_is_attached() -> None:
    model = small()
    before = model.head.weight.detach().clone()
    _, optimizer = offload.attach(model, Named(model.parameters(), lr=0.1))
    loss_of(model, tokens()).backward()
    optimizer.step()
    offload.detach(model)
    assert not same_bits(model.head.weight.detach(), before)
