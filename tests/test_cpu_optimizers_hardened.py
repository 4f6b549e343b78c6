"""What no training should do and some does: tensors without memory, changed layouts, shared bytes.

None of it may crash, write elsewhere, or give other weights than torch without a word.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpu_adam
from cpu_adam import CPUAdam
from tests import optimizers
from tests.optimizers import FOUR_PARTS, OURS, assert_same, every_optimizer, freed, run, tensors_of


def stepped(*shape: int, build: Any = CPUAdam, **options: Any) -> tuple[nn.Parameter, Any]:
    """A parameter and its optimizer after a step."""
    p = nn.Parameter(torch.arange(float(torch.Size(shape).numel())).view(shape) - 3)
    optimizer = build([p], lr=0.1, **options)
    p.grad = torch.linspace(-1, 2, p.numel()).view(shape)
    optimizer.step()
    return p, optimizer


# Memory.


@pytest.mark.parametrize("which", ["parameter", "state"])
@every_optimizer
def test_memory_that_was_freed_is_refused(kind: str, which: str) -> None:
    p, optimizer = stepped(8, build=OURS[kind])
    slots = [x for x in optimizer.state[p].values() if x.dim()]
    freed({"parameter": p, "state": slots[0]}[which])
    with pytest.raises(ValueError, match=FOUR_PARTS):
        optimizer.step()


def test_freed_memory_is_refused_by_every_function() -> None:
    for call in (cpu_adam.sum_of_squares, cpu_adam.crc32c):
        with pytest.raises(ValueError, match=FOUR_PARTS):
            call(freed(torch.ones(8)))
    with pytest.raises(ValueError, match=FOUR_PARTS):
        cpu_adam.accumulate(torch.zeros(8), freed(torch.ones(8)))


@every_optimizer
def test_gradients_are_taken_as_they_read(kind: str) -> None:
    gradient, results = torch._neg_view(torch.arange(8.0)), []
    for x in (gradient, torch.zeros(8).add(gradient)):
        p, optimizer = stepped(8, build=OURS[kind])
        p.grad = x
        optimizer.step()
        results.append(p.detach())
        assert cpu_adam.sum_of_squares(x) == float(x.double().square().sum())
    assert_same(results[:1], results[1:])


@pytest.mark.parametrize("cut", [slice(0, 40), slice(8, 48), slice(47, 48)])
@every_optimizer
def test_parameters_that_share_memory_are_refused(kind: str, cut: slice) -> None:
    memory = torch.linspace(-1, 1, 49)
    params = [nn.Parameter(memory[:48]), nn.Parameter(memory[cut]), nn.Parameter(memory[48:])]
    optimizer = OURS[kind](params)
    with pytest.raises(ValueError, match="asked for a step of parameters with memory of their own"):
        run(optimizer, 1)
    assert torch.equal(memory, torch.linspace(-1, 1, 49))
    assert not optimizer.state
    run(OURS[kind]([params[0], params[2]]), 1)


# Layouts.


def test_another_layout_at_the_same_address_is_seen() -> None:
    results = []
    for build in (torch.optim.AdamW, CPUAdam):
        p, optimizer = stepped(4, 4, build=build)
        p.data = p.data.t()
        p.grad = torch.arange(16.0).view(4, 4) - 5
        optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(results[1], results[0])


# Steps.


def _double(p: nn.Parameter) -> None:
    p.data = p.data.double()
    p.grad = torch.ones_like(p)
    p.data = p.data.float()


def _short(p: nn.Parameter) -> None:
    kept = p.data
    p.grad = None
    p.data = torch.ones(2)
    p.grad = torch.ones(2)
    p.data = kept


@pytest.mark.parametrize("spoil", [_double, _short])
@every_optimizer
def test_a_gradient_that_does_not_fit_changes_nothing(
    kind: str, spoil: Callable[[nn.Parameter], None]
) -> None:
    params = optimizers.contiguous(
        [*optimizers.parameters(), *optimizers.parameters(torch.bfloat16)]
    )
    optimizer = OURS[kind](params)
    run(optimizer, 2)
    before = [x.clone() for x in tensors_of(optimizer)]
    spoil(params[5])
    with pytest.raises(ValueError, match=FOUR_PARTS):
        optimizer.step()
    assert_same(tensors_of(optimizer), before)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.arange(16.0).view(4, 4),
    "transposed": lambda: torch.arange(16.0).view(4, 4).t(),
    "with gaps": lambda: torch.arange(32.0).view(4, 8)[:, ::2],
}


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_another_layout_of_a_gradient_after_many_is_seen(after: str, before: str) -> None:
    results = []
    for plain in (True, False):
        p, optimizer = stepped(4, 4)
        for layout in (before, before, after):
            p.grad = LAYOUTS[layout]().contiguous() if plain else LAYOUTS[layout]()
            optimizer.step()
        results.append(tensors_of(optimizer))
    assert_same(results[0], results[1])


@pytest.mark.skipif(cpu_adam.kernel().native is None, reason="no compiled kernels")
def test_a_step_of_many_tensors_runs_little_python() -> None:
    """What is looked at for each tensor in every step is looked at by loops in C."""

    def calls(tensors: int) -> int:
        optimizer = CPUAdam([nn.Parameter(torch.ones(4)) for _ in range(tensors)])
        run(optimizer, 2)
        events: list[str] = []
        sys.setprofile(lambda frame, event, _: events.append(event))
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
        return sum(event in ("call", "c_call") for event in events)

    assert calls(300) - calls(100) < 20


NO_NUMBERS: list[Any] = [None, "0.1", 1j, [0.1], torch.ones(2), torch.ones((), device="meta")]


@pytest.mark.parametrize("wrong", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    ("kind", "option"),
    [
        *((kind, option) for kind in OURS for option in ("lr", "weight_decay")),
        *(("adam", "betas"), ("adam", "eps"), ("lion", "betas")),
        *(("sgd", "momentum"), ("sgd", "dampening")),
    ],
)
def test_what_is_no_number_is_refused(kind: str, option: str, wrong: Any) -> None:
    optimizer = OURS[kind]([nn.Parameter(torch.ones(2))])
    given = (wrong, 0.9) if option == "betas" else wrong
    with pytest.raises(TypeError, match=FOUR_PARTS):
        OURS[kind]([nn.Parameter(torch.ones(2))], **{option: given})
    with pytest.raises(TypeError, match=FOUR_PARTS):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], option: given})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0][option] = given
    with pytest.raises(TypeError, match=FOUR_PARTS):
        run(optimizer, 1)
    assert not optimizer.state


def test_a_parameter_twice_in_a_group_is_refused() -> None:
    p = nn.Parameter(torch.ones(2))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = CPUAdam([p, p])
    with pytest.raises(ValueError, match=FOUR_PARTS):
        run(optimizer, 1)


# Loading.


@pytest.mark.parametrize("states", ["exact", "compact"])
@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        *(("step", x) for x in (float("nan"), float("inf"), -1, 1.5, 2.0**53, None, "x")),
        ("step", torch.ones(2)),
        ("step", torch.tensor(1.0, device="meta")),
        ("exp_avg", torch.zeros(299)),
    ],
)
def test_a_damaged_checkpoint_is_refused_whole(key: str, wrong: Any, states: str) -> None:
    p = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    optimizer = CPUAdam([p], states=states)
    run(optimizer, 1)
    before = [x.clone() for x in tensors_of(optimizer)]
    state = copy.deepcopy(optimizer.state_dict())
    good = {"step": torch.tensor(1.0), "exp_avg": torch.ones(300), "exp_avg_sq": torch.ones(300)}
    state["state"][0] = {**good, key: wrong}
    with pytest.raises(ValueError, match=FOUR_PARTS):
        optimizer.load_state_dict(state)
    assert_same(tensors_of(optimizer), before)


@every_optimizer
def test_the_default_device_of_torch_is_not_ours(kind: str) -> None:
    """A script may set it: what a step makes for itself is where the parameters are."""
    plain, other = (
        OURS[kind](optimizers.parameters(torch.bfloat16)),
        OURS[kind](optimizers.parameters(torch.bfloat16)),
    )
    run(plain, 2)
    for step in range(2):
        optimizers.set_gradients(other.param_groups[0]["params"], step)
        with torch.device("meta"):
            other.step()
            other.load_state_dict(other.state_dict())
    assert_same(tensors_of(other), tensors_of(plain))
