"""Optimizers that `attach` did not return, and that step parameters of an attached model: told of.

What they train is right, as parameters at rest are read and written like any, but their states lie
in no tier, and nobody notices: a trainer that was not given the attached optimizer makes its own.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offload.optimizer import Optimizer
from offload.warned import warn_user

_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_steps: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
"""Of each stranger, how often the attached optimizer had stepped at its last step; None once it was
told of."""


def watch(optimizer: Optimizer) -> None:
    """Tell the user once of any other optimizer that steps twice while this one does not."""
    _listen()
    _watched.add(optimizer)


@cache
def _listen() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    # What compiles its step would have to look into all of this.
    if not torch.compiler.is_compiling() and type(optimizer) is not Optimizer:
        _look_at(optimizer)


def _look_at(stranger: torch.optim.Optimizer) -> None:
    found = _shared(stranger)
    if found is None or _steps.get(stranger, -1) is None:
        return
    mine, name = found
    if _steps.get(stranger) != mine.engine.steps:  # The first time, or it steps the attached one.
        _steps[stranger] = mine.engine.steps
        return
    _steps[stranger] = None
    kind = type(stranger).__name__
    warn_user(
        f"{kind} steps {name} of an attached model, and the optimizer that offload.attach returned "
        "takes no step: likely a trainer made its own, or it was made after attach. What it trains "
        "is right, but its states are in no tier, and its options are not those of the attached "
        "one: step that, and hand it to the trainer (of Hugging Face: Trainer(..., "
        "optimizers=(optimizer, None)))"
    )


def _shared(stranger: torch.optim.Optimizer) -> tuple[Optimizer, str] | None:
    """The attached optimizer that has a parameter of a stranger's, and the parameter's name."""
    for mine in _watched:
        if not mine.engine.executor.lanes.closed:
            for group in stranger.param_groups:
                for parameter in group["params"]:
                    if (name := mine.name_of(parameter)) is not None:
                        return mine, name
    return None
