"""Gradients that are assigned to `p.grad`, held, cut from a buffer, or handed back: as in torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offload
from offload import extents, shown
from tests.small import adamw, config, small, tokens
from tests.training import (
    RESIDENT,
    Net,
    Run,
    assert_same,
    attached,
    batch,
    in_turn,
    loss_of,
    plain,
    same_bits,
    train,
    train_alone,
    without_idle_states,
)

PLACEMENTS = [RESIDENT, ("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme")]
each_placement = pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)


def cut_from_a_buffer(run: Run) -> torch.Tensor:
    """Let every `p.grad` be a view of one buffer of zeros."""
    parameters = list(run.model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
        parameter.grad = piece.view_as(parameter)
    return flat


def scaled_in_a_buffer(run: Run, number: int) -> None:
    """The loop of those who keep all gradients in one buffer: they never call zero_grad()."""
    if not number:
        run.extra.append(cut_from_a_buffer(run))
    (flat,) = run.extra
    for _ in range(2):
        run.loss().backward()
    flat.mul_(0.5)
    run.optimizer.step()
    flat.zero_()


def in_an_array(run: Run, number: int) -> None:
    """The memory is that of NumPy, which counts no one who looks at it."""
    weight: Any = run.model.head.weight  # type: ignore[union-attr]
    array = np.full(tuple(weight.shape), 0.25, dtype=np.float32)
    weight.grad = torch.from_numpy(array)
    run.loss().backward()
    array *= 0.5
    run.step()


def in_place(run: Run, number: int) -> None:
    """`p.grad *= 2` assigns what `p.grad` is already; the one that is held follows."""
    weight: Any = run.model.norm.weight  # type: ignore[union-attr]
    run.loss().backward()
    held = weight.grad
    weight.grad *= 2
    weight.grad = weight.grad
    run.loss().backward()
    assert held is weight.grad
    run.extra.append(held.sum().item())
    held.mul_(0.5)
    run.optimizer.step()
    weight.grad = held
    run.loss().backward()
    run.extra.append(held.sum().item())
    run.step()


def held_over_a_step(run: Run, number: int) -> None:
    """One that was assigned shows the next sum, too, until zero_grad()."""
    weight: Any = run.model.blocks[1].up.weight  # type: ignore[union-attr,index]
    given = torch.full_like(weight, 0.125)
    weight.grad = given
    assert weight.grad is given
    for _ in range(2):
        run.loss().backward()
        run.optimizer.step()
    run.extra.append(given.sum().item())
    run.optimizer.zero_grad(set_to_none=bool(number))


LOOPS: dict[str, Callable[[Run, int], None]] = {
    "a buffer": scaled_in_a_buffer,
    "an array": in_an_array,
    "in place": in_place,
    "held": held_over_a_step,
}


@pytest.mark.parametrize(("loop", "placement"), in_turn(LOOPS, PLACEMENTS))
def test_as_in_plain_torch(loop: str, placement: tuple[str, str, str], tmp_path: Path) -> None:
    ours, alone = (
        without_idle_states(one)
        for one in (
            train(placement, tmp_path, LOOPS[loop], dtype=torch.float32),
            train_alone(LOOPS[loop], dtype=torch.float32),
        )
    )
    if loop == "a buffer":
        assert not ours.extra.pop().any()
        alone.extra.clear()
    assert_same(ours, alone)


def test_what_cannot_be_written_to_is_copied(tmp_path: Path) -> None:
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        weight: Any = run.model.norm.weight  # type: ignore[union-attr]
        with torch.inference_mode():
            inferred = torch.ones_like(weight)
        for given in (torch.ones(1, dtype=weight.dtype).expand(32), inferred):
            weight.grad = given
            run.loss().backward()
            assert weight.grad is not given
            assert given.eq(1).all()


@pytest.mark.parametrize("placement", [("cpu", "cpu", "cpu"), ("device", "cpu", "cpu")])
def test_one_gradient_of_two_is_refused_when_it_would_be_added_to(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """In ("device", "cpu", "cpu") all but the head are frozen, on the device, and torch's own."""

    def build() -> nn.Module:
        model: Any = small()
        model.requires_grad_(placement[0] == "cpu")
        model.head.requires_grad_(True)
        return model  # type: ignore[no-any-return]

    with attached(placement, tmp_path, build=build) as run:
        model: Any = run.model
        other = model.embed.weight
        model.head.weight.grad = other.grad = torch.ones_like(model.head.weight)
        with pytest.raises(
            RuntimeError, match=r"embed\.weight.*head\.weight share memory|head.*emb"
        ):
            run.loss().backward()
        other.grad = other.grad.clone()
        run.loss().backward()
        assert not other.grad.eq(model.head.weight.grad).all()
        other.grad = None
        run.step()


def test_columns_of_one_matrix_share_nothing(tmp_path: Path) -> None:
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        norm: Any = run.model.norm
        both = torch.zeros(32, 2, dtype=norm.weight.dtype)
        norm.weight.grad, norm.bias.grad = both.unbind(1)
        run.loss().backward()
        assert torch.equal(both, torch.stack((norm.weight.grad, norm.bias.grad), 1))
        assert both.any(0).all()


def test_data_of_another_shape_is_refused(tmp_path: Path) -> None:
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        run.loss().backward()
        weight: Any = run.model.norm.weight  # type: ignore[union-attr]
        right = weight.grad.data.clone()
        weight.grad.data = torch.ones(1, dtype=right.dtype)
        with pytest.raises(ValueError, match=r"norm\.weight is of shape \(1,\)"):
            run.optimizer.step()
        weight.grad.data = right
        run.step()
        plain(run, 1)


def squares() -> Net:
    """With a square matrix in each block: turned, a gradient of it has its shape still."""
    net = Net(layers=3)
    for number, block in enumerate(net.blocks):
        net.blocks[number] = nn.Sequential(OrderedDict(inner=block, square=nn.Linear(32, 32)))
    return net


OTHER_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "turned": lambda gradient: gradient.t(),
    "turned in place": lambda gradient: gradient.t_(),
    "one row for all": lambda gradient: gradient[:1].expand_as(gradient),
    "detached": lambda gradient: gradient.detach(),
    "rows in another order": lambda gradient: gradient.flip(0),
}


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize(("change", "placement"), in_turn(OTHER_VIEWS, PLACEMENTS))
def test_a_view_of_what_it_was_is_taken_as_assigned(
    change: str, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """Its memory is the gradient's own, but another number of it stands in each place."""

    def reordered(run: Run, number: int) -> None:
        weight: Any = run.model.blocks[number].square.weight  # type: ignore[union-attr,index]
        run.loss().backward()
        weight.grad = given = OTHER_VIEWS[change](weight.grad)
        assert weight.grad is given
        run.extra.append(given.tolist())
        if change != "one row for all":  # torch refuses to add to that
            run.loss().backward()
            run.extra.append(given.tolist())
        run.step()

    ours = train(placement, tmp_path, reordered, build=squares, dtype=torch.float32)
    alone = train_alone(reordered, build=squares, dtype=torch.float32)
    assert_same(without_idle_states(ours), without_idle_states(alone))


@each_placement
def test_after_detach_a_held_gradient_is_the_parameters(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """And a buffer that gradients were cut from is still where they are summed."""
    model: Any = small()
    _, optimizer = offload.attach(model, adamw(model), config(placement, tmp_path))
    loss_of(model, tokens()).backward()
    held, value = model.head.weight.grad, model.head.weight.grad.clone()
    buffer = torch.zeros(64)
    model.norm.weight.grad, model.norm.bias.grad = buffer[:32], buffer[32:]
    alone = {name: p.grad.clone() for name, p in model.named_parameters()}
    offload.detach(model)
    del optimizer
    assert model.head.weight.grad is held
    assert same_bits(held, value)
    assert all(same_bits(p.grad, alone[name]) for name, p in model.named_parameters())
    loss_of(model, tokens()).backward()
    assert not torch.equal(held, value)
    assert buffer.any()


def test_residents_keep_their_memory_over_detach(tmp_path: Path) -> None:
    model: Any = small()
    offload.attach(model, adamw(model), config(RESIDENT, tmp_path))
    view = model.norm.weight.detach()
    offload.detach(model)
    assert view.data_ptr() == model.norm.weight.data_ptr()


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_two_residents_share_one_gradient_over_sleep(tier: Any, tmp_path: Path) -> None:
    with attached(RESIDENT, tmp_path) as run:
        one, other = (block.norm.weight for block in run.model.blocks[:2])  # type: ignore
        one.grad = other.grad = torch.ones_like(one)
        offload.sleep(run.model, tier)
        offload.wake(run.model)
        assert one.grad is other.grad
        loss_of(run.model, batch(torch.Generator().manual_seed(1))).backward()
        run.step()


def mixed() -> nn.Module:
    """In ("device", "cpu", "cpu") all but the head and the embedding are torch's own."""
    model: Any = small()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    return model  # type: ignore[no-any-return]


def test_two_residents_may_share_one_gradient_beside_an_assigned_one(tmp_path: Path) -> None:
    """What nobody has assigned anew since is not looked at again."""
    with attached(("device", "cpu", "cpu"), tmp_path, build=mixed) as run:
        model: Any = run.model
        one, other = (block.norm.weight for block in model.blocks[:2])
        one.grad = other.grad = torch.ones_like(one)
        model.head.weight.grad = kept = torch.ones_like(model.head.weight)
        looks: list[int] = []

        def counted(named: Any) -> Any:
            looks.append(1)
            return extents.sharing(named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shown, "sharing", counted)
            for _ in range(3):
                run.loss().backward()
            assert len(looks) == 1
        assert model.head.weight.grad is kept
        model.head.weight.grad = one.grad = other.grad = None
        run.step()


@each_placement
def test_a_gradient_given_to_another_tensor_is_that_ones(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """Which torch holds, and no reference of Python's tells of it: so do actors and learners."""

    def given_away(run: Run, number: int) -> None:
        weight: Any = run.model.head.weight  # type: ignore[union-attr]
        others = [torch.zeros_like(weight, requires_grad=True) for _ in range(2)]
        run.loss().backward()
        others[0].grad = weight.grad
        run.optimizer.step()
        others[1].grad = weight.grad
        run.optimizer.zero_grad()
        run.loss().backward()
        run.extra.extend(one.grad.tolist() for one in others)  # type: ignore[union-attr]
        run.step()

    ours, alone = train(placement, tmp_path, given_away), train_alone(given_away)
    assert ours.extra == alone.extra
    assert ours.losses == train(RESIDENT, tmp_path, given_away).losses


def test_detach_reads_each_units_gradients_once(tmp_path: Path) -> None:
    model: Any = small()
    _, optimizer = offload.attach(model, adamw(model), config(("nvme",) * 3, tmp_path))
    loss_of(model, tokens()).backward()
    held = model.blocks[0].up.weight.grad
    executor, asked = optimizer.engine.executor, []  # type: ignore[union-attr]
    peek = executor.peek

    def counted(value: Any) -> torch.Tensor:
        asked.append(value)
        return peek(value)

    executor.peek = counted
    offload.detach(model)
    assert model.blocks[0].up.weight.grad is held
    gradients = [value.unit for value in asked if value.kind == "gradient"]
    assert sorted(gradients) == sorted(set(gradients))
