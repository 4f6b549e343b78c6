"""Which optimizers can be attached, with which options, and by which rule each updates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from cpu_adam import CPUSGD, CPUAdam, CPULion
from cpu_adam.hyper import Hyper
from offload.planning.tiers import format_bytes

UNHELD_BYTES_TOLD = 16 << 20
"""Gradients of so much, of parameters of no group, are told."""

HYPER_OF: dict[type[torch.optim.Optimizer], Callable[[Mapping[str, Any]], Hyper]] = {
    torch.optim.AdamW: CPUAdam.hyper_of,
    torch.optim.Adam: CPUAdam.hyper_of,
    torch.optim.SGD: CPUSGD.hyper_of,
    CPUAdam: CPUAdam.hyper_of,
    CPULion: CPULion.hyper_of,
    CPUSGD: CPUSGD.hyper_of,
}
"""Optimizers that can be attached, and what a parameter group of theirs is frozen to."""

_REFUSED = ("amsgrad", "capturable", "differentiable")
"""Options that change the mathematics or the graph in ways that are not offered."""


def known_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    """The class of `HYPER_OF` whose `step` an optimizer has, its own or inherited."""
    own = inspect.unwrap(type(optimizer).step)
    bases = (one for one in type(optimizer).__mro__ if one in HYPER_OF)
    return next((one for one in bases if inspect.unwrap(one.step) is own), None)


def hyper_of(optimizer: torch.optim.Optimizer) -> Callable[[Mapping[str, Any]], Hyper]:
    """What a parameter group of an optimizer that passed `check_optimizer` is frozen to."""
    known = known_class(optimizer)
    assert known is not None
    return HYPER_OF[known]


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse by name what cannot be attached."""
    if known_class(optimizer) is None:
        names = ", ".join(
            f"{known.__module__.rpartition('.')[0]}.{known.__name__}" for known in HYPER_OF
        )
        raise TypeError(
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__} cannot be attached: its "
            f"update is not known here. Use one of {names}, or a class of yours that inherits "
            "its step() from one of them"
        )
    for number, group in enumerate(optimizer.param_groups):
        check_group(number, group)


def check_group(number: int, group: Mapping[str, Any]) -> None:
    """Refuse what a parameter group asks for and is not offered."""
    for option in _REFUSED:
        if group.get(option):
            raise ValueError(
                f"{option}=True in parameter group {number} is not offered by the offloaded "
                f"update: build the optimizer with {option}=False"
            )
    if group.get("states", "exact") != "exact":
        raise ValueError(
            f"states={group['states']!r} in parameter group {number}: offloaded, all states "
            f"are of one format: say it by Config(states={group['states']!r})"
        )


def rule_of(optimizer: torch.optim.Optimizer | None) -> str:
    """The update's rule of an optimizer that passed `check_optimizer`; of none, any will do."""
    if optimizer is None:
        return "adam"
    return hyper_of(optimizer)(optimizer.param_groups[0]).rule


def of_no_group(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]
) -> str | None:
    """What to tell where parameters that require gradients are in no group of `optimizer`."""
    held = {one for group in optimizer.param_groups for one in group["params"]}
    rest = {p: name for name, p in named if p.requires_grad and p not in held}
    kept = sum(one.nbytes for one in rest)
    if kept < UNHELD_BYTES_TOLD:
        return None
    names = ", ".join([*list(rest.values())[:2], "..."][: len(rest)])
    return (
        f"{len(rest)} parameters that require gradients are in no group of the optimizer "
        f"({names}): room for gradients of {format_bytes(kept)} and their states is kept, as "
        "add_param_group() may bring them; requires_grad_(False) before attach saves it"
    )
