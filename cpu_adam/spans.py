"""What is updated together: spans of elements of one parameter, and their turns.

A *part* is a span by numbers within the tensors of a chunk, a `Span` has tensors of its own. Either
starts a group of elements that share their scales, where the state format has such, and ends one,
its chunk or its parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from cpu_adam.hyper import Hyper

Turns = Sequence[tuple[Hyper, int]]
"""What spans are updated by: hyper-parameters and the number of the step."""

ADDRESS_COLUMNS = 3
"""Columns of a row of a native table before its addresses: elements, turn and first element."""


class Part(NamedTuple):
    """Elements of a chunk that are updated together."""

    start: int
    """Where they start in the chunk."""
    elements: int
    """How many they are."""
    first_element: int = 0
    """Where they start in their parameter."""
    turn: int = 0
    """Which of the turns handed to `update_parts` is theirs."""
    is_last: bool = False
    """Whether their parameter ends with them, which it may do inside a group."""


@dataclass(frozen=True, slots=True)
class Span:
    """Elements that are updated together: the tensors that `update` takes, and whose turn it is.

    They start a group of elements that share their scales, and end one or their parameter.
    """

    weight: Tensor
    gradient: Tensor | None
    """None where every update brings its own."""
    record_views: Mapping[str, Tensor]
    turn: int = 0
    """Which of the turns handed to `UpdateTable.update` is this span's."""
    first_element: int = 0
    """Where in its parameter it starts."""

    def detached(self) -> Span:
        """The same memory, whatever becomes of the tensors."""
        slots = {name: x.detach() for name, x in self.record_views.items()}
        return replace(self, weight=self.weight.detach(), record_views=slots)
