"""What attach refuses: arguments mixed up, and models whose parameters would not be the same."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.checks import check_arguments
from tests.faults import nothing_leaks
from tests.small import MIXED, adamw, config, small, torch_step

MIXED_UP: dict[str, tuple[Callable[[nn.Module, Any], tuple[Any, ...]], str]] = {
    "optimizer and model": (
        lambda m, o: (o, m),
        r"the optimizer \(AdamW\) first and the model \(Net\) second: write attach\(model, opt",
    ),
    "optimizer and config": (
        lambda m, o: (m, offload.Config(), o),
        r"config is of class AdamW.*write attach\(model, optimizer, offload.Config\(\.\.\.\)\)",
    ),
    "config for the optimizer": (
        lambda m, o: (m, offload.Config()),
        r"optimizer is of class Config and no optimizer: give torch\.optim\.AdamW",
    ),
    "a dict": (
        lambda m, o: (m, o, {"params": "cpu"}),
        r"config is of class dict \(\{'params': 'cpu'\}\).*offload\.Config\(\*\*settings\)",
    ),
    "an empty dict": (lambda m, o: (m, o, {}), r"config is of class dict \(\{\}\)"),
    "False": (lambda m, o: (m, o, False), "config is of class bool"),
    "the config's class": (
        lambda m, o: (m, o, offload.Config),
        "config is the class Config itself",
    ),
    "no model": (lambda m, o: (None, o), r"model is of class NoneType and no torch\.nn\.Module"),
    "parameters": (lambda m, o: (m.parameters(), o), "model is of class generator"),
    "the model's class": (lambda m, o: (nn.Linear, o), "the class Linear itself.*build it first"),
    "the optimizer's class": (
        lambda m, o: (m, torch.optim.AdamW),
        "optimizer is the class AdamW itself",
    ),
    "a list": (lambda m, o: (m, [o]), "optimizer is of class list and no optimizer"),
}


@pytest.mark.parametrize("name", MIXED_UP)
def test_arguments_mixed_up_are_refused_in_one_message(name: str) -> None:
    mix, message = MIXED_UP[name]
    model = small()
    mine = adamw(model)
    with nothing_leaks(), pytest.raises(TypeError, match=message) as caught:
        offload.attach(*mix(model, mine))
    assert "\n" not in str(caught.value)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    torch_step(model, mine)


WRONGLY_CALLED: dict[str, tuple[Callable[[nn.Module, Any], Any], str]] = {
    "fields by name": (
        lambda m, o: offload.attach(m, o, params="cpu", cpu_memory="8GiB"),  # type: ignore
        "attach() was given params and cpu_memory, of Config, by name: write attach(model, "
        "optimizer, offload.Config(params='cpu', cpu_memory='8GiB'))",
    ),
    "no optimizer": (
        lambda m, o: offload.attach(m),  # type: ignore[call-arg]
        "attach() was given no optimizer: write attach(model, optimizer, config), or attach(model, "
        "None, config) for a model that is not trained",
    ),
    "another name": (
        lambda m, o: offload.attach(m, o, settings=1),  # type: ignore[call-arg]
        "attach(): got an unexpected keyword argument 'settings'; it takes model, optimizer, "
        "config, initialize, budget, machine, pace",
    ),
    "too many": (
        lambda m, o: offload.attach(m, o, offload.Config(), None),  # type: ignore[misc]
        "attach(): too many positional arguments; it takes model, optimizer, config, ",
    ),
}


@pytest.mark.parametrize("how", WRONGLY_CALLED)
def test_calls_that_python_refuses_are_told_how_to_call(how: str) -> None:
    call, message = WRONGLY_CALLED[how]
    model = small()
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        call(model, adamw(model))


def test_attach_shows_its_arguments() -> None:
    assert [*inspect.signature(offload.attach).parameters][:3] == ["model", "optimizer", "config"]
    assert offload.attach.__doc__


class Shared(nn.Module):
    """Two parameters in one piece of memory."""

    def __init__(self, first: int) -> None:
        super().__init__()
        flat = torch.ones(8)
        self.one = nn.Parameter(flat[:4])
        self.other = nn.Parameter(flat[first : first + 4])


class Two(nn.Module):
    """Two parameters, or a parameter and a buffer."""

    def __init__(self, one: torch.Tensor, other: torch.Tensor, *, buffer: bool = False) -> None:
        super().__init__()
        self.one = nn.Parameter(one)
        if buffer:
            self.register_buffer("other", other)
        else:
            self.other = nn.Parameter(other)


def transposed() -> nn.Module:
    weight = torch.randn(4, 4)
    return Two(weight, weight.t())


def channels_last() -> nn.Module:
    weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    return Two(weight, weight)


def inside_a_larger_one() -> nn.Module:
    """The first begins first and ends last; the second is inside it; the third shares the end."""
    flat = torch.randn(12)
    model = Two(flat[1:3], flat[8:])
    model.register_parameter("around", nn.Parameter(flat.as_strided((2, 6), (6, 1))))
    del model.one
    return model


def a_row_and_a_column() -> nn.Module:
    weight = torch.randn(6, 6)
    return Two(weight[:, 2], weight[3, :])


def shown_in_a_buffer(view: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    weight = torch.randn(4, 4)
    return Two(weight, view(weight), buffer=True)


class Special(nn.Parameter):
    """Has ways of its own."""


def special() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight = Special(model.weight.data)
    return model


def scripted() -> nn.Module:
    class Empty(torch.jit.ScriptModule):
        pass

    return nn.Sequential(nn.Linear(2, 2), Empty())


LOST: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an overlap": (lambda: Shared(3), "parameters one and other share memory.*clone"),
    "tied by a transpose": (transposed, "parameters one and other share memory"),
    "channels last": (channels_last, "parameters one and other share memory"),
    "inside a larger one": (inside_a_larger_one, "parameters around and other share memory"),
    "a row and a column": (a_row_and_a_column, "parameters one and other share memory"),
    "a row in a buffer": (
        lambda: shown_in_a_buffer(lambda weight: weight[1]),
        r"buffer other shares memory with parameter one.*clone",
    ),
    "other bytes in a buffer": (
        lambda: shown_in_a_buffer(lambda weight: weight.view(torch.int16)[:, 3]),
        "buffer other shares memory with parameter one",
    ),
    "one element of it in a buffer": (
        lambda: shown_in_a_buffer(lambda weight: weight[2, 2].expand(7)),
        "buffer other shares memory with parameter one",
    ),
    "a class of its own": (special, r"parameter weight is of class tests\.\S*Special"),
    "no shape yet": (lambda: nn.Sequential(nn.LazyLinear(4)), r"0\.weight has no shape yet"),
    "TorchScript": (scripted, "1 is a TorchScript module.*Python module"),
}


@pytest.mark.parametrize("name", LOST)
def test_what_would_not_be_the_same_is_refused(name: str) -> None:
    build, message = LOST[name]
    with nothing_leaks(), pytest.raises(ValueError, match=message):
        offload.attach(build(), None)


def columns() -> list[torch.Tensor]:
    weight = torch.randn(4, 6)
    return [weight[:, :3], weight[:, 3:]]


def interleaved() -> list[torch.Tensor]:
    flat = torch.randn(9)
    return [flat[::2], flat[1::2].view(torch.int32).view(torch.float32)]


APART: dict[str, Callable[[], list[torch.Tensor]]] = {
    "columns": columns,
    "interleaved": interleaved,
    "expanded from one element": lambda: [torch.ones(1).expand(5)] * 2,
    "empty": lambda: [torch.empty(0), torch.empty(0, 4)],
    "meta": lambda: [torch.empty(3, device="meta"), torch.empty(3, device="meta")],
    "scalars": lambda: list(torch.randn(2).unbind()),
}


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("name", APART)
def test_what_shares_no_memory_passes(name: str, buffer: bool) -> None:
    one, other = APART[name]()
    check_arguments(Two(one, other, buffer=buffer), None, offload.Config())


def test_buffers_may_share_memory_with_each_other() -> None:
    model = Two(torch.randn(4), torch.randn(4), buffer=True)
    model.register_buffer("again", model.other)
    model.register_buffer("part", model.other[1:])
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    check_arguments(model, None, offload.Config())


def test_parameters_side_by_side_in_one_piece_of_memory_are_fine() -> None:
    model = Shared(4)
    offload.attach(model, None)
    assert model.other.tolist() == [1.0] * 4
    offload.detach(model)


def test_the_optimizer_of_another_attached_model_is_refused(tmp_path: Any) -> None:
    model, other = small(), small()
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine:
        with pytest.raises(ValueError, match="attach returned, for another model"):
            offload.attach(other, optimizer, config(MIXED, tmp_path))
        with pytest.raises(ValueError, match=r"attached already: detach it first"):
            offload.attach(model, optimizer, config(MIXED, tmp_path))
        torch_step(model, optimizer)
    with pytest.raises(ValueError, match=r"attached already, .*closed.*build the model again"):
        offload.attach(model, None)
