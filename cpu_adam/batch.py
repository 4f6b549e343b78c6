"""The parameters of a step laid out for native calls: built when tensors change, used every step.

[Note: Memory]
A table holds addresses. Before each step the addresses and layouts of all weights, the addresses
and identities of all slots and the facts about all gradients are read, by loops in C over all
tensors, as a step of many small tensors is Python's time. They are compared with what was there
when the batch was built. Anything else (`p.data = ...`, an edited or a loaded state, another set of
gradients) makes a new batch, whose tensors are checked anew. The batch holds the weights and slots
that it saw, so an equal address is the same memory. It does not hold gradients.

[Note: Count]
All that can be refused is refused before anything is changed. The members of a native call are
counted up when it has returned, and only then what was made for a first step is put into their
states: a state without its momentum has not begun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from cpu_adam.formats import StateFormat
from cpu_adam.hyper import Hyper
from cpu_adam.memory import PLAIN, check_apart
from cpu_adam.native import UpdateTable
from cpu_adam.parameter_state import STEP, local, whole_step
from cpu_adam.spans import Span

States = MutableMapping[Tensor, dict[str, Any]]
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
    kept: dict[str, Any]
    """What an update reads or writes, by its key in the state; there once a step was taken."""
    begins: bool
    """Whether the moments were made for this step."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Members of one format with gradients of one dtype: one native call."""

    indices: list[int]
    table: UpdateTable
    staged: list[tuple[Tensor, Tensor]]
    """Weights that are not contiguous, each with the contiguous copy that is updated for it."""
    counts: Tensor
    """1 for each member of the batch that is of this call, else 0."""


class Batch:
    """Members that are updated together."""

    def __init__(self, due: Due, members: Sequence[Member], setting: object) -> None:
        """setting: what else the layout depends on. Raises ValueError for shared memory."""
        self._setting = setting
        self._members = list(members)
        self._parameters, self._groups = due.parameters, due.groups
        self._dtypes = [g.dtype for g in due.gradients]
        self._facts = _facts_of(due.gradients)
        self._plain = all(
            type(g) in PLAIN and g.is_contiguous() and not g.is_neg() for g in due.gradients
        )
        self._sharded = any(local(p) is not p for p in due.parameters)
        self._weights = [local(p).detach() for p in due.parameters]
        check_apart(self._weights)
        self._counted = all(STEP in member.kept for member in members)
        steps = [
            whole_step(m.kept[STEP]) if self._counted else float(not m.begins) for m in members
        ]
        self._steps = torch.tensor(steps, dtype=torch.float32, device="cpu")
        if self._counted:  # Views, so that all are read and counted up by one call.
            for member, step in zip(members, self._steps.unbind()):
                member.kept[STEP] = step
        self._kept = [(m.state, list(m.kept)) for m in members]
        self._slots = [slot for m in members for slot in m.kept.values()]
        self._kinds: list[int] = []
        self._calls: list[_Call] = []
        self._states: list[dict[str, Any]] = []
        self._seen: list[list[Any]] | None = None  # until a step was taken

    def serves(self, due: Due, states: States, setting: object) -> bool:
        """Whether all that was laid out is as it was: see [Note: Memory]."""
        return (
            self._setting == setting
            and self._groups == due.groups
            and all(map(is_, self._parameters, due.parameters))
            and len(self._states) == len(states)
            and all(map(is_, self._states, states.values()))
            and None not in (self._facts, self._seen)
            and self._facts == _facts_of(due.gradients)
            and self._seen == self._look()
        )

    def run(
        self,
        hypers: Sequence[Hyper],
        gradients: Sequence[Tensor],
        gradient_scale: float,
        states: States,
    ) -> None:
        """One step of every member: see [Note: Count].

        hypers: of each parameter group. gradients: of each member. gradient_scale: what they are
        multiplied by. states: of all parameters; the first step puts in what was made for it.
        """
        if self._sharded:
            gradients = [_placed(g, p) for g, p in zip(gradients, self._parameters)]
        if not self._plain:
            gradients = [g.resolve_neg().contiguous() for g in gradients]
        taken = self._steps.tolist()
        if not all(map(float.is_integer, taken)):  # Somebody has written there.
            list(map(whole_step, taken))  # Which refuses them.
        pairs = list(zip(self._groups, [int(step) + 1 for step in taken]))
        numbers = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        kinds = [numbers[pair] for pair in pairs]
        if kinds != self._kinds:
            self._calls, self._kinds = self._laid_out(kinds), kinds
        steps = [(hypers[group], number) for group, number in numbers]
        for call in self._calls:
            for weight, stage in call.staged:
                stage.copy_(weight)
            due = [gradients[i] for i in call.indices]
            call.table.update(steps, due, gradient_scale=gradient_scale)
            self._steps.add_(call.counts)
            if not self._counted:  # Such a rule knows a first step and later ones.
                self._steps.clamp_(max=1)
            for weight, stage in call.staged:
                weight.copy_(stage)
            if self._seen is None:
                self._keep(call.indices, states)
        if self._seen is None:
            self._states, self._seen = list(states.values()), self._look()
        if self._sharded:
            torch.autograd.graph.increment_version(self._parameters)

    def _keep(self, indices: Sequence[int], states: States) -> None:
        """Put what was made for members into their states: see [Note: Count]."""
        for member in (self._members[i] for i in indices):
            member.state.update(member.kept)
            if member.state:  # As in torch, one that keeps nothing has no state.
                states[member.parameter] = member.state

    def _look(self) -> list[list[Any]] | None:
        """Where weights and slots are, and how laid out; None where a slot is another one."""
        weights: Sequence[Tensor] = self._parameters
        found: list[list[Any]] = [list(map(type, weights))]
        try:
            slots = [state[key] for state, keys in self._kept for key in keys]
        except KeyError:
            return None
        if not all(map(is_, self._slots, slots)):
            return None
        if self._sharded:
            weights, slots = [local(x) for x in weights], [local(x) for x in slots]
        found += [list(map(one, weights)) for one in _LAYOUT]
        return [*found, list(map(Tensor.data_ptr, slots))]

    def _laid_out(self, kinds: Sequence[int]) -> list[_Call]:
        alike: dict[tuple[str, torch.dtype], list[int]] = {}
        for i, (member, dtype) in enumerate(zip(self._members, self._dtypes)):
            alike.setdefault((member.format.name, dtype), []).append(i)
        # In the place of slots that updates leave alone, shared by all members.
        largest = max((weight.numel() for weight in self._weights), default=0)
        unread = torch.empty(largest, dtype=torch.float32, device="cpu")
        return [self._call(indices, kinds, unread) for indices in alike.values()]

    def _call(self, indices: list[int], kinds: Sequence[int], unread: Tensor) -> _Call:
        spans, staged = [], []
        for i in indices:
            member, weight = self._members[i], self._weights[i]
            stage = weight
            if not weight.is_contiguous() or weight.is_neg():
                stage = torch.empty_like(weight, memory_format=torch.contiguous_format)
                staged.append((weight, stage))
            slots = {
                slot.name: local(member.slots[slot.name]).detach().view(-1)
                if slot.name in member.slots
                else unread[: slot.items(weight.numel())]
                for slot in member.format.slots
            }
            spans.append(Span(stage.view(-1), slots, kinds[i]))
        counts = torch.zeros_like(self._steps)
        counts[indices] = 1
        return _Call(indices, UpdateTable(spans, member.format), staged, counts)


_LAYOUT: tuple[Callable[[Tensor], Any], ...] = (
    *(Tensor.data_ptr, Tensor.size, Tensor.stride, attrgetter("dtype")),
)
_FACTS: tuple[Callable[[Tensor], Any], ...] = (
    *(type, Tensor.numel, Tensor.is_contiguous, Tensor.is_neg),
    *(attrgetter(name) for name in ("dtype", "is_cpu", "layout")),
)


def _facts_of(gradients: Sequence[Tensor]) -> list[list[Any]] | None:
    """All that a check of gradients asks for, by kind of fact; None for some sparse layouts."""
    try:
        return [list(map(one, gradients)) for one in _FACTS]
    except RuntimeError:
        return None


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
