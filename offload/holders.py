"""Who else holds memory of a parameter or its gradient."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from offload.exposure import use_count


def holders(parameter: nn.Parameter) -> tuple[int, int, int, int]:
    """How many hold a parameter's memory, that of its gradient, and the gradient itself.

    That one in Python and, as another parameter may, in torch.
    """
    gradient: Any = parameter.grad
    if gradient is None:
        return use_count(parameter), 0, 0, 0
    held = sys.getrefcount(gradient), gradient._use_count()
    return use_count(parameter), use_count(gradient), *held


def is_torchs(parameter: nn.Parameter) -> bool:
    """Whether torch made the memory of a parameter and its gradient, and no array of NumPy's."""
    both = [one for one in (parameter, parameter.grad) if one is not None]
    return all(one.untyped_storage().resizable() for one in both)


def idle_parameter() -> nn.Parameter:
    """One that nobody else has anything of."""
    with torch.inference_mode(False):
        made = nn.Parameter(torch.empty(1))
        made.grad = torch.empty(1)
    return made
