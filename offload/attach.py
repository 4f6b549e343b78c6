"""Attach an engine to a model and its optimizer, and take it off again."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from offload.accepted import rule_of
from offload.attaching import Attached, Attaching, attachments, spec_of
from offload.binding import BoundUnit, make_plain, partition
from offload.checks import check_arguments, check_model, check_ways, told_how_to_call
from offload.config import Config
from offload.device import compute_device
from offload.engine import Engine
from offload.fork import engines
from offload.interrupt import whole
from offload.machine import Machine, probe
from offload.plan import plan
from offload.profile import profile_of
from offload.program import Op
from offload.shared import SharedBudget


@told_how_to_call
def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config | None = None,
    *,
    initialize: Callable[[nn.Module], object] | None = None,
    budget: SharedBudget | None = None,
    machine: Machine | None = None,
    pace: Callable[[Op], float] | None = None,
) -> tuple[nn.Module, Any]:
    """Spread a model over the tiers and return it with an optimizer that updates it there.

    Args:
        model: stays the same object; its parameters keep their identity, names and shapes.
            Parameters on the meta device get memory here, unit by unit, so that the whole model
            never lies in memory at once; those are new objects, in the optimizer's groups too.
        optimizer: `torch.optim.AdamW`, `Adam` or `SGD`, or `cpu_adam.CPUAdam`, `CPULion` or
            `CPUSGD`, over parameters of the model, with or without states; None serves the model
            forward-only.
        config: where things live and how much may be taken; the default finds out.
        initialize: called with each module that owns parameters on the meta device, once these
            have memory; default: the module's own `reset_parameters()`.
        budget: shared with other models; what is left of it limits what `config` asks.
        machine: what there is, in place of what this host has.
        pace: least seconds of an op, for tests that imitate slower hardware.

    Returns:
        The model and the optimizer to step, None where None was given.

    Raises:
        BudgetError: the model does not fit the budgets, with a table.
        ValueError, TypeError: the model, optimizer or config cannot be attached, and why.
        OSError: nvme_path cannot be used.
        MemoryError: the memory of the plan is not there.
    """
    config = Config() if config is None else config
    check_arguments(model, optimizer, config)
    dtypes = {str(one.dtype).removeprefix("torch.") for one in model.parameters()}
    for remark in config.remarks(dtypes):
        warnings.warn(remark, stacklevel=3)
    if not all(engine.executor.lanes.closed for engine in engines):
        gc.collect()  # One that was dropped, but not closed, has its memory until then.
    device = compute_device()
    groups = partition(model)
    check_model(model, optimizer, groups)
    check_ways(model, trains=optimizer is not None)
    config = config if budget is None else budget.narrowed(config)
    specs = [spec_of(group, config, trains=optimizer is not None) for group in groups]
    found = machine or probe(config.nvme_path, device_free_bytes=device.free_bytes())
    placed = plan(profile_of(specs), config, found, rule=rule_of(optimizer))
    with torch.inference_mode(False):  # What is made in it could not be trained after it.
        shares = found.nvme_shares
        attaching = Attaching(model, optimizer, config, groups, placed, device, shares, budget)
        return attaching.run(initialize, pace)


def detach(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Undo `attach`: all values back in ordinary parameters, all states in the user's optimizer.

    Returns the model and the optimizer that was given to `attach`. A held `p.grad` stays one.
    The model must fit the compute device whole, gradients too where there are any, beside what the
    engine has taken there, which it gives back at the very end: to detach a model that needs the
    room itself, attach it with less `device_memory`.

    Raises:
        ValueError: the model is not attached.
    """
    engine = engine_of(model)
    with engine.lock, torch.inference_mode(False):  # Steps of other threads come before or after.
        engine.settle()
        streamed = [bound for bound in engine.units if bound.index not in engine.residents]
        places = [(bound, index) for bound in streamed for index in range(len(bound.parameters))]
        values = [engine.values_of(bound.index, index) for bound, index in places]
        take = whole(engine.gradients.hand_over)
        held = (gradient for bound in streamed for gradient in take(bound.index))
        gradients = [
            None if gradient is None else gradient.to(value.device, value.dtype)
            for gradient, value in zip(held, values, strict=True)
        ]
        return model, _hand_back(model, places, values, gradients)


@whole
def _hand_back(
    model: nn.Module,
    places: Sequence[tuple[BoundUnit, int]],
    values: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
) -> torch.optim.Optimizer | None:
    """Take the engine off a model whose values have been read: here nothing large is made."""
    hooks, engine, optimizer, _ = attachments[model]
    original = optimizer.give_up() if optimizer is not None else None
    del attachments[model]
    hooks.remove()
    for (bound, index), value, gradient in zip(places, values, gradients):
        make_plain(bound.parameters[index], value)
        bound.parameters[index].grad = gradient
    engine.close()
    return original


def engine_of(model: nn.Module) -> Engine:
    """The engine attached to a model.

    Raises:
        ValueError: there is none.
    """
    return attached(model).engine


def attached(model: nn.Module) -> Attached:
    """What is attached to a model.

    Raises:
        ValueError: nothing is.
    """
    if model not in attachments:
        raise ValueError("the model is not attached: attach it first; detach it only once")
    return attachments[model]
