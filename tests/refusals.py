"""Models that `attach` refuses by name, each with a reason and what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.structures import Layers, Shell


class Refusal(NamedTuple):
    """A model that is refused, what the error must name, and the words for the table."""

    build: Callable[[], nn.Module]
    named: str
    """A pattern that the message matches: the name of the module or parameter."""
    because: str
    instead: str


def _cached() -> nn.Module:
    model: Any = Shell(Layers(2))
    model.middle.layers[1].cached = model.middle.layers[1].up.weight.t()
    return model  # type: ignore[no-any-return]


def _buffer_in_parameter() -> nn.Module:
    model = Shell(Layers(2))
    model.register_buffer("row", model.head.weight.detach()[0])
    return model


def _two_in_one() -> nn.Module:
    model = Shell(Layers(2))
    model.head.weight = nn.Parameter(model.embed.weight.detach())
    return model


def _lazy() -> nn.Module:
    model: Any = Shell(Layers(2))
    model.middle.extra = nn.LazyLinear(4)
    return model  # type: ignore[no-any-return]


def _sparse() -> nn.Module:
    model = Shell(Layers(2))
    model.embed = nn.Embedding(50, 32, sparse=True)
    return model


def _renormalised() -> nn.Module:
    model = Shell(Layers(2))
    model.embed = nn.Embedding(50, 32, max_norm=1.0)
    return model


def _transposed() -> nn.Module:
    model = Shell(Layers(2))
    model.head.weight = nn.Parameter(torch.randn(32, 50).t())
    return model


def _scripted() -> nn.Module:
    model: Any = Shell(Layers(2))
    model.middle.layers[0] = torch.jit.trace(nn.Linear(32, 32), torch.zeros(1, 32))
    return model  # type: ignore[no-any-return]


def _adapter_on_parameter() -> nn.Module:
    import peft

    from tests import zoo

    wanted: Any = peft.LoraConfig(target_modules=[], target_parameters=["experts.down_proj"])
    return peft.get_peft_model(zoo.build("Mixtral"), wanted)  # type: ignore[arg-type]


REFUSED: dict[str, Refusal] = {
    "a tensor kept in a module that is a view of a parameter": Refusal(
        _cached,
        r"middle\.layers\.1\.cached and middle\.layers\.1\.up\.weight share memory",
        "once the parameter is offloaded the view would keep its old values",
        "take it from the parameter in forward, or `clone()` it",
    ),
    "a buffer inside a parameter": Refusal(
        _buffer_in_parameter,
        r"row and head\.weight share memory",
        "offloaded they would part",
        "take it from the parameter in forward, or `clone()` it",
    ),
    "two parameters in one memory": Refusal(
        _two_in_one,
        r"embed\.weight and head\.weight share memory",
        "offloaded they would part",
        "make them one parameter",
    ),
    "parameters without a shape (Lazy modules)": Refusal(
        _lazy,
        r"middle\.extra\.weight has no shape yet",
        "there is nothing to place",
        "run one batch through the model first",
    ),
    "embeddings with sparse gradients": Refusal(
        _sparse, r"embed has sparse gradients", "only dense ones have a home", "`sparse=False`"
    ),
    "embeddings with `max_norm`": Refusal(
        _renormalised,
        r"embed changes its weight inside its own forward",
        "in use a weight is a view of a buffer that is not written back",
        "renormalise after `step()`",
    ),
    "parameters that are not contiguous": Refusal(
        _transposed,
        r"head\.weight of shape \(50, 32\) lies in memory with strides",
        "offloaded ones are, and torch computes other bits with them",
        "give it a `contiguous()` copy",
    ),
    "TorchScript modules": Refusal(
        _scripted,
        r"middle\.layers\.0 is a TorchScript module",
        "they take no hooks",
        "the Python module",
    ),
    "LoRA on parameters (PEFT's `target_parameters`, and `all-linear` on fused experts)": Refusal(
        _adapter_on_parameter,
        r"experts\.down_proj.* target_parameters",
        "PEFT gives the parameter its storage anew in every forward",
        "`target_modules`",
    ),
}
"""By what the model has."""
