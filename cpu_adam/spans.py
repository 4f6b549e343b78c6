"""What is updated together: spans of elements of one parameter, and the steps that update them.

A *part* is a span by numbers within the tensors of a chunk, a `Span` has tensors of its own. Either
starts a group of elements that share their scales, where the state format has such, and ends one,
its chunk or its parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from cpu_adam.formats import StateFormat
from cpu_adam.hyper import STEPS, Hyper

Steps = Sequence[tuple[Hyper, int]]
"""What spans are updated by: hyper-parameters and the number of the step."""

ADDRESS_COLUMNS = 3
"""Columns of a row of a native table before its addresses: elements, step and first element."""


class Part(NamedTuple):
    """Elements of a chunk that are updated together."""

    start: int
    """Where they start in the chunk."""
    elements: int
    """How many they are."""
    first_element: int = 0
    """Where they start in their parameter."""
    step: int = 0
    """Which of the steps handed to `update_parts` is theirs."""
    is_last: bool = False
    """Whether their parameter ends with them, which it may do inside a group."""


@dataclass(frozen=True, slots=True)
class Span:
    """Elements that are updated together: the tensors that `update` takes, and by which step."""

    weight: Tensor
    record_views: Mapping[str, Tensor]
    step: int = 0
    """Which of the steps handed to `UpdateTable.update` is theirs."""
    first_element: int = 0
    """Where in its parameter it starts."""


def check_steps(steps: Steps, format: StateFormat) -> None:
    """Raise ValueError unless these are steps of the rule that the format's state is for."""
    for hyper, number in steps:
        if hyper.rule != format.rule or not 1 <= number < STEPS:
            raise ValueError(
                f"asked for an update of {format.name} states by {format.rule}, in a step from 1 "
                f"to below 2**48; found hyper-parameters of {hyper.rule} and step={number}; likely "
                f"cause: a format looked up without its rule, or steps counted from 0; try: "
                f"format_for(..., rule=hyper.rule), step=1 first"
            )


def check_parts(parts: Sequence[Part], steps: Steps, chunk: int, format: StateFormat) -> None:
    """Raise ValueError unless parts lie in a chunk of so many elements, apart, at whole groups."""
    for part in parts:
        _check_part(part, len(steps), chunk, format)
    for one, other in pairwise(sorted(part for part in parts if part.elements)):
        if other.start < one.start + one.elements:
            raise ValueError(
                f"asked for the update of parts that lie apart in their chunk; found "
                f"{one.elements} elements from {one.start} on and {other.elements} from "
                f"{other.start} on; likely cause: a part that is given twice; try: each "
                f"element in one part"
            )


def _check_part(part: Part, steps: int, chunk: int, format: StateFormat) -> None:
    group, end = format.group_elements, part.start + part.elements
    if not 0 <= part.start <= end <= chunk or not 0 <= part.step < steps or part.first_element < 0:
        raise ValueError(
            f"asked for the update of a part of a chunk of {chunk} elements by one of {steps} "
            f"steps; found {part}; likely cause: parts of another chunk; try: starts counted from "
            f"the chunk's own first element"
        )
    cut = end % group and end != chunk and not part.is_last and part.elements
    if part.start % group or part.first_element % group or cut:
        raise ValueError(
            f"asked for a {format.name} update of a part that starts and ends at a multiple of "
            f"{group}, or ends with its chunk or its parameter; found {part} of {chunk}, which "
            f"would change the scales of elements left alone; likely cause: a parameter was cut "
            f"inside a group of elements that share their scales; try: is_last=True where the "
            f"parameter ends there"
        )
