"""A checkpoint that can be read: sets of tensors by name, part by part, and what a run has besides.

What `conversion` asks of every kind of checkpoint; each kind has a module that opens it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.checkpoint.directory import FORMAT
from offload.checkpoint.shards import Tensor

WEIGHTS, RESIDUE = "model", "residue"
PART_ELEMENTS = 4 << 20

RULES = {("exp_avg",): "lion", ("exp_avg", "exp_avg_sq"): "adam", ("momentum_buffer",): "sgd"}
"""The update's rule by the slots of its states, but for the residue."""


@dataclass
class Source:
    """A checkpoint: what it has, and what reads it."""

    sets: dict[str, dict[str, Tensor]]
    """The weights, and each slot of the states, by name."""
    parts: Callable[[str, str], Iterator[torch.Tensor]]
    """By set and name the values of a tensor in order, 1-D: of `PART_ELEMENTS`, the last shorter,
    or cut otherwise, but in the same places in each set."""
    run: dict[str, Any]
    """As `write_run` takes it."""
    dtype: str | None = None
    """Of its parameters in a save where no other is asked for; None: as they are."""
    castable: Collection[str] = ()
    """Names of parameters; the other weights keep their dtype."""
    notices: list[str] = field(default_factory=list)
    """What is left out of it."""

    @property
    def states(self) -> dict[str, Any]:
        """As in the run, by parameter."""
        return self.run.get("optimizer", {"states": {}})["states"]  # type: ignore[no-any-return]


def new_run(
    step: int,
    user: Any,
    groups: list[dict[str, Any]] | None = None,
    states: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A run of another's checkpoint, whose states have their `slots`.

    Raises:
        ValueError: an optimizer with such states is not offered.
    """
    run: dict[str, Any] = {"format": FORMAT, "step": step, "user": user}
    if states:
        slots = tuple(
            sorted({slot for one in states.values() for slot in one["slots"]} - {RESIDUE})
        )
        if slots not in RULES:
            raise ValueError(f"the optimizer's states have {', '.join(slots)}: no rule of these")
        run["optimizer"] = {"rule": RULES[slots], "groups": groups, "states": states}
    return run


def dtype_name(dtype: torch.dtype) -> str:
    """As `Tensor.dtype` has it."""
    return str(dtype).removeprefix("torch.")
