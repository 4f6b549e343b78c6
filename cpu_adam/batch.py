"""The parameters of a step laid out for native calls: built when tensors change, used every step.

[Note: Memory]
A table holds addresses. Before each step the addresses of all weights and slots are read again and
compared; anything else than what was laid out (`p.data = ...`, an edited or a loaded state, another
set of gradients) makes a new batch. The batch holds on to the storages that it saw, so an equal
address is the same memory. It does not hold on to gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cpu_adam.formats import Slot, StateFormat
from cpu_adam.hyper import Hyper
from cpu_adam.native import Span, UpdateTable
from cpu_adam.parameter_state import STEP, local

States = Mapping[Tensor, dict[str, Any]]
"""`Optimizer.state`: what is kept for each parameter."""


@dataclass(frozen=True, slots=True)
class Due:
    """What a step is to update: lists that run side by side."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    groups: list[int]
    """Numbers of their parameter groups."""


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of a batch and its state."""

    parameter: Tensor
    format: StateFormat
    state: dict[str, Any]
    slots: Mapping[str, Tensor]
    """By slot name, contiguous."""
    keys: list[str]
    """Keys of what of the state an update reads or writes."""
    begins: bool
    """Whether the state was made for this step."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Members of one format with gradients of one dtype: one native call."""

    indices: list[int]
    table: UpdateTable
    staged: list[tuple[Tensor, Tensor]]
    """Weights that are not contiguous, each with the contiguous copy that is updated for it."""


class Batch:
    """Members that are updated together, or one after the other where they share memory."""

    def __init__(
        self, due: Due, members: Sequence[Member], states: States, setting: object
    ) -> None:
        """states: of all parameters. setting: what else the layout depends on."""
        self._setting = setting
        self._members = list(members)
        self._parameters, self._groups = due.parameters, due.groups
        self._identities = [id(p) for p in due.parameters]
        self._dtypes = [g.dtype for g in due.gradients]
        self._sharded = any(local(p) is not p for p in due.parameters)
        self._counted = all(STEP in member.state for member in members)
        steps = [float(m.state.get(STEP, not m.begins)) for m in members]
        self._steps = torch.tensor(steps, dtype=torch.float32)
        if self._counted:  # Views, so that all are read and counted up by one call.
            for member, step in zip(members, self._steps.unbind()):
                member.state[STEP] = step
        self._weights = [local(p).detach() for p in due.parameters]
        self._scratch: Tensor | None = None
        self._turns: list[int] = []
        self._parts: list[_Part] = []
        self._kept = [(m.state, m.keys) for m in members]
        self._states = list(states.values())
        self._state_identities = [id(state) for state in self._states]
        self._addresses = self._look()

    def serves(self, due: Due, states: States, setting: object) -> bool:
        """Whether all that was laid out is as it was: see [Note: Memory]."""
        return (
            self._setting == setting
            and self._groups == due.groups
            and self._identities == [id(p) for p in due.parameters]
            and self._dtypes == [g.dtype for g in due.gradients]
            and self._state_identities == [id(state) for state in states.values()]
            and self._addresses == self._look()
        )

    def run(
        self, hypers: Sequence[Hyper], gradients: Sequence[Tensor], gradient_scale: float
    ) -> None:
        """One step of every member.

        hypers: of each parameter group. gradients: of each member. gradient_scale: what they are
        multiplied by.
        """
        if self._sharded:
            gradients = [_placed(g, p) for g, p in zip(gradients, self._parameters)]
        self._steps.add_(1)
        steps = [int(step) for step in self._steps.tolist()]
        if not self._counted:
            self._steps.fill_(1)  # A rule that does not count knows a first step and later ones.
        numbers: dict[tuple[int, int], int] = {}
        turns = [numbers.setdefault(key, len(numbers)) for key in zip(self._groups, steps)]
        if turns != self._turns:
            self._parts, self._turns = self._laid_out(turns), turns
        pairs = [(hypers[group], step) for group, step in numbers]
        for part in self._parts:
            for weight, stage in part.staged:
                stage.copy_(weight)
            due = [gradients[i] for i in part.indices]
            part.table.update(pairs, gradient_scale=gradient_scale, gradients=due)
            for weight, stage in part.staged:
                weight.copy_(stage)
        if self._sharded:
            torch.autograd.graph.increment_version(self._parameters)

    def _look(self) -> list[int] | None:
        """Addresses of all tensors that updates read or write; None where one is missing."""
        try:
            slots = [state[key] for state, keys in self._kept for key in keys]
        except KeyError:
            return None
        tensors = [*self._parameters, *slots]
        if self._sharded:
            tensors = [local(x) for x in tensors]
        return [x.data_ptr() for x in tensors]

    def _laid_out(self, turns: Sequence[int]) -> list[_Part]:
        everything = range(len(self._members))
        waves = [[i] for i in everything] if _overlap(self._weights) else [list(everything)]
        parts = []
        for wave in waves:
            kinds: dict[tuple[str, torch.dtype], list[int]] = {}
            for i in wave:
                kind = (self._members[i].format.name, self._dtypes[i])
                kinds.setdefault(kind, []).append(i)
            parts += [self._part(indices, turns) for indices in kinds.values()]
        return parts

    def _part(self, indices: list[int], turns: Sequence[int]) -> _Part:
        spans, staged = [], []
        for i in indices:
            member, weight = self._members[i], self._weights[i]
            stage = weight
            if not weight.is_contiguous():
                stage = torch.empty_like(weight, memory_format=torch.contiguous_format)
                staged.append((weight, stage))
            slots = {name: local(slot).view(-1) for name, slot in member.slots.items()}
            for slot in member.format.slots:
                if slot.name not in slots:
                    slots[slot.name] = self._unread(slot, weight.numel())
            spans.append(Span(stage.view(-1), None, slots, turns[i]))
        return _Part(indices, UpdateTable(spans, self._members[indices[0]].format), staged)

    def _unread(self, slot: Slot, elements: int) -> Tensor:
        """Memory for a slot that a member does without: written, never read, shared by all."""
        if self._scratch is None:
            largest = max(weight.numel() for weight in self._weights)
            self._scratch = torch.empty(largest, dtype=torch.float32)
        assert slot.dtype == "float32", slot
        return self._scratch[: slot.items(elements)]


def _placed(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The part of a gradient that belongs to the part of a parameter that this process holds."""
    if local(parameter) is parameter:
        return gradient
    if gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(  # type: ignore[attr-defined]
            parameter.device_mesh,  # type: ignore[attr-defined]
            parameter.placements,  # type: ignore[attr-defined]
        )
    return local(gradient)


def _overlap(weights: Iterable[Tensor]) -> bool:
    """Whether the memory of any two tensors may overlap, going by their first and last bytes."""
    ranges = []
    for weight in weights:
        if weight.numel():
            last = sum((n - 1) * stride for n, stride in zip(weight.shape, weight.stride()))
            start = weight.data_ptr()
            ranges.append((start, start + (last + 1) * weight.element_size()))
    return any(start < end for (_, end), (start, _) in pairwise(sorted(ranges)))
