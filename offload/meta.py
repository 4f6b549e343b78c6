"""Values for parameters that were on the meta device: what the module itself starts with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn


def initialize_fresh(
    model: nn.Module,
    fresh: Collection[nn.Parameter],
    initialize: Callable[[nn.Module], object],
    present: Sequence[nn.Parameter],
) -> None:
    """Initialise the modules of a model that own `fresh` parameters; `present` have memory."""
    for module in model.modules() if fresh else ():
        if any(p in fresh for p in module._parameters.values()):
            _initialize(module, initialize, present)


def _initialize(
    module: nn.Module,
    initialize: Callable[[nn.Module], object],
    present: Sequence[nn.Parameter],
) -> None:
    """Initialise a module of whose parameters only some are `present`: the others get scratch."""
    others = [p for p in module._parameters.values() if p is not None]
    others = [p for p in others if not any(p is one for one in present)]
    with torch._C.DisableTorchFunctionSubclass():
        before = [(p, p.data, p.__class__) for p in others]
        for parameter, data, _ in before:
            parameter.data = torch.zeros(data.shape, dtype=data.dtype, device=data.device)
            parameter.__class__ = nn.Parameter
    try:
        initialize(module)
    finally:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, data, kind in before:
                parameter.data = data
                parameter.__class__ = kind


def reset(module: nn.Module) -> None:
    """Initialise a module's parameters by its own method.

    Raises:
        ValueError: it has none.
    """
    own: Any = getattr(module, "reset_parameters", None)
    if own is None:
        raise ValueError(
            f"{type(module).__name__} has parameters on the meta device, and no reset_parameters() "
            "to give them values: pass initialize= to attach"
        )
    own()
