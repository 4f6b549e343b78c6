"""Gradients that are edited, assigned, and seen through views: bit for bit as in plain torch."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from tests.gradient_programs import differs
from tests.training import (
    RESIDENT,
    Run,
    assert_same,
    attached,
    config_of,
    fp32,
    in_turn,
    same_bits,
    train,
    train_alone,
    without_idle_states,
)

CPU = ("cpu", "cpu", "cpu")
PLACEMENTS = [CPU, ("cpu", "device", "cpu"), ("nvme", "nvme", "nvme"), RESIDENT]


# -- random programs -------------------------------------------------------------------------------


def run_programs(seeds: Sequence[int], directory: Path) -> Counter[str]:
    """Run them all; what was refused."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    told: Counter[str] = Counter()
    try:
        for seed in seeds:
            refused, where = differs(seed, directory)
            assert not where, f"program {seed}: {where}"
            told += refused
    finally:
        torch.set_num_threads(threads)
    return told


@pytest.mark.filterwarnings("ignore:Config.micro_batches", "ignore:grad and param do not obey")
def test_a_sample_of_programs(tmp_path: Path) -> None:
    assert run_programs([3043, *range(12)], tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Config.micro_batches", "ignore:grad and param do not obey")
@pytest.mark.parametrize("start", range(1000, 4000, 500))
def test_thousands_of_programs(start: int, tmp_path: Path) -> None:
    run_programs(range(start, start + 500), tmp_path)


# -- single ones -----------------------------------------------------------------------------------


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda g: g,
    "view": lambda g: g.view(-1),
    "detach": lambda g: g.detach(),
    "array": lambda g: g.numpy(),
    "dlpack": lambda g: torch.utils.dlpack.from_dlpack(g),
}


@pytest.mark.parametrize(("how", "placement"), in_turn(VIEWS, PLACEMENTS))
@pytest.mark.parametrize("micro_batches", [None, 1])
def test_a_view_that_is_kept_stays_one_of_the_gradient(
    how: str, placement: tuple[str, str, str], micro_batches: int | None, tmp_path: Path
) -> None:
    """So what is written to it before each step counts, and it shows each next gradient."""
    kept: list[Any] = []

    def scaled(run: Run, number: int) -> None:
        run.loss().backward()
        if not number:
            kept[:] = [VIEWS[how](one.grad) for one in run.model.parameters()]  # type: ignore
        for one in kept:
            one *= 0.5
        run.optimizer.step()
        for one in kept:
            one *= 0.5
        run.extra.append([one.sum().item() for one in kept])
        if number % 2:
            run.optimizer.zero_grad(set_to_none=False)

    early = train(placement, tmp_path, scaled, micro_batches=micro_batches, **fp32(steps=4))
    alone = train_alone(scaled, **fp32(steps=4))
    assert_same(*(without_idle_states(one) for one in (early, alone)))


class Kind(torch.Tensor):
    """A kind of tensors that `p.grad` does not show."""


ASSIGNED: dict[str, Callable[[torch.Tensor], Any]] = {
    "by DLPack": lambda g: torch.from_dlpack(g),
    "by NumPy": lambda g: torch.from_numpy(g.numpy()),
    "as another kind": lambda g: g.as_subclass(Kind),
    "as a parameter": lambda g: torch.nn.Parameter(g),
    "as its storage": lambda g: None,
}


@pytest.mark.parametrize(("how", "placement"), in_turn(ASSIGNED, PLACEMENTS))
@pytest.mark.parametrize("view", ["itself", "view"])
def test_a_gradient_whose_memory_another_storage_has_is_followed(
    how: str, placement: tuple[str, str, str], view: str, tmp_path: Path
) -> None:
    kept: list[torch.Tensor] = []

    def assigned(run: Run, number: int) -> None:
        weight: Any = next(iter(run.model.parameters()))
        run.loss().backward()
        one = weight.grad
        kept[:] = [VIEWS[view](one)]
        if how == "as its storage":
            held = one.untyped_storage(), one.storage_offset(), one.shape
            kept.clear()
        else:
            weight.grad = ASSIGNED[how](one)
        del one
        for turn in range(3):
            shown = kept[0] if kept else torch.empty(0).set_(*held)
            run.extra.append(shown.flatten().tolist())
            shown.mul_(0.5)
            del shown
            if turn < 2:
                (run.optimizer.zero_grad if turn else run.optimizer.step)()
                run.loss().backward()
        run.step()

    ours = train(placement, tmp_path, assigned, **fp32())
    assert_same(*(without_idle_states(one) for one in (ours, train_alone(assigned, **fp32()))))


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_a_view_of_a_gradient_that_is_given_up_keeps_it(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """And what is written to it counts no longer."""

    def logged(run: Run, number: int) -> None:
        parameters: Any = list(run.model.parameters())
        run.loss().backward()
        held = parameters[1].grad
        views = [one.grad.detach().view(-1) for one in parameters]
        run.optimizer.step()
        run.optimizer.zero_grad()
        for _ in range(2):
            run.loss().backward()
            for one in views:
                one.mul_(0.5)
        for shown in (*views, held, *(one.grad for one in parameters)):
            run.extra.append(shown.numpy().tobytes())
        run.step()

    ours = train(placement, tmp_path, logged, **fp32())
    assert_same(*(without_idle_states(one) for one in (ours, train_alone(logged, **fp32()))))


@pytest.mark.parametrize("placement", [CPU, ("cpu", "device", "cpu")], ids="-".join)
def test_homes_go_to_and_fro_between_two_places(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """The variable of a loop is bound anew in each step, so memory is taken once."""
    with attached(placement, tmp_path) as run:
        places = run.engine.gradients._places
        for number in range(6):
            run.loss().backward()
            views = [one.grad.data for one in run.model.parameters()]  # type: ignore[union-attr]
            run.step()
            if not number:
                taken = places.bytes
        assert 0 < taken == places.bytes
        del views
        gc.collect()
        assert places.trim() == taken
        assert not places.bytes


def test_a_view_for_whose_memory_there_is_no_room_is_refused(tmp_path: Path) -> None:
    """And all is as before: without it the gradient is given up."""
    with attached(CPU, tmp_path, exposed_memory=2048) as run:
        weight: Any = run.model.head.weight  # type: ignore[union-attr]
        run.loss().backward()
        view, value = weight.grad.view(-1), weight.grad.clone()
        for give_up in (run.optimizer.zero_grad, lambda: setattr(weight, "grad", value)):
            with pytest.raises(MemoryError, match=r"a view of the gradient .* in head .*Let go of"):
                give_up()
        assert same_bits(weight.grad, value)
        view.zero_()
        assert not weight.grad.any()
        del view
        run.optimizer.zero_grad()
        assert weight.grad is None


def test_what_shares_memory_with_a_gradient_by_assignment_goes_on_to(tmp_path: Path) -> None:
    with attached(CPU, tmp_path) as run:
        weight: Any = run.model.head.weight  # type: ignore[union-attr]
        run.loss().backward()
        held = weight.grad
        weight.grad = held.detach()
        run.loss().backward()
        held.mul_(0.5)
        assert weight.grad is not held
        assert torch.equal(held, weight.grad)


@pytest.mark.parametrize("placement", [CPU, ("device", "device", "cpu"), RESIDENT], ids="-".join)
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_view_stays_one_over_sleep_and_detach(
    placement: tuple[str, str, str], tier: Any, tmp_path: Path
) -> None:
    with attached(placement, tmp_path) as run:
        weight: Any = run.model.head.weight  # type: ignore[union-attr]
        run.loss().backward()
        view = weight.grad.view(-1)
        offload.sleep(run.model, tier)
        view.fill_(0.25)
        offload.wake(run.model)
        assert weight.grad.eq(0.25).all()
        run.loss().backward()
        assert torch.equal(view, weight.grad.view(-1))
        run.optimizer.step()
        offload.detach(run.model)
        view.fill_(0.5)
        assert weight.grad.eq(0.5).all()


@pytest.mark.parametrize("placement", [CPU, ("device", "device", "cpu"), RESIDENT], ids="-".join)
def test_edits_count_after_sleep_beside_a_view_from_before(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """What is shown then is where the home is now, and not where that view lies."""

    def slept(run: Run, number: int) -> None:
        run.loss().backward()
        norm: Any = run.model.norm
        view = norm.bias.grad.view(-1)
        if hasattr(run.optimizer, "engine"):
            offload.sleep(run.model, "nvme")
            offload.wake(run.model)
        view.mul_(0.5)
        norm.weight.grad.mul_(0.5)
        run.step()

    ours, alone = train(placement, tmp_path, slept, **fp32()), train_alone(slept, **fp32())
    assert_same(*(without_idle_states(one) for one in (ours, alone)))


@pytest.mark.parametrize("placement", [CPU, ("nvme", "nvme", "nvme")], ids="-".join)
@pytest.mark.parametrize("how", ["itself", "view"])
def test_a_gradient_of_before_that_a_hook_changes_is_refused_as_the_backward_ends(
    how: str, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    with attached(placement, tmp_path) as run, attached(RESIDENT, tmp_path) as b:
        run.loss().backward()
        model: Any = run.model
        view = VIEWS[how](model.head.weight.grad)

        def halve(_: object) -> None:
            view.mul_(0.5)

        handle = model.embed.weight.register_hook(halve)
        with pytest.raises(RuntimeError, match=r"head\.weight was changed inside the backward"):
            run.loss().backward()
        handle.remove()
        run.optimizer.zero_grad()
        b.generator = torch.Generator().set_state(run.generator.get_state())
        for one in (run, b):
            one.loss().backward()
            one.step()
        for name, value in b.model.state_dict().items():
            assert same_bits(value, run.model.state_dict()[name])


class Rows(nn.Module):
    """Units of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in self.rows:
            x = row(x).tanh()
        return x


def test_views_of_one_unit_after_another_take_memory_for_one(tmp_path: Path) -> None:
    """As of who looks at another layer in each step: homes come back to where they were."""
    config = config_of(("cpu", "cpu", "cpu"), tmp_path, exposed_memory=60_000)
    model: Any = Rows()
    _, optimizer = offload.attach(model, torch.optim.AdamW(model.parameters()), config)
    with optimizer.engine:
        for step in range(24):
            model(torch.ones(2, 64)).sum().backward()
            view = model.rows[step % 8].weight.grad.data
            optimizer.step()
            optimizer.zero_grad()
        assert view.isfinite().all()


def test_copies_that_are_left_to_views_are_counted(tmp_path: Path) -> None:
    config = config_of(("nvme", "nvme", "nvme"), tmp_path, exposed_memory=100_000)
    model: Any = Rows()
    _, optimizer = offload.attach(model, torch.optim.AdamW(model.parameters()), config)
    views = []
    with optimizer.engine, pytest.raises(MemoryError, match=r"held so, and exposed_memory"):
        for _ in range(24):
            model(torch.ones(2, 64)).sum().backward()
            views.append(model.rows[0].bias.grad.data)
            optimizer.step()
            optimizer.zero_grad()
    assert len(views) >= 2


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_what_nobody_views_any_more_takes_no_memory(home: str, tmp_path: Path) -> None:
    config = config_of(("cpu", home, home), tmp_path, exposed_memory=100_000)
    model: Any = Rows()
    _, optimizer = offload.attach(model, torch.optim.AdamW(model.parameters()), config)
    with optimizer.engine:
        for _ in range(12):
            model(torch.ones(2, 64)).sum().backward()
            view = model.rows[0].weight.grad.view(-1)
            other = model.rows[1].weight
            gradient = other.grad
            gradient.data = gradient.data.clone()
            other.grad = gradient.clone()
            optimizer.step()
            optimizer.zero_grad()
            del view, gradient
        assert optimizer.engine.gradients._places.trim() <= 24_000
        assert optimizer.engine.gradients._places.bytes == 0
