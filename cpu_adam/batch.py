"""The parameters of a step laid out for native calls: built when tensors change, used every step.

[Note: Memory]
A table holds addresses. Before each step the addresses of all weights and slots are read again and
compared, with the layouts of the weights, the identities of the slots and the sizes of all
storages; anything else than what was laid out (`p.data = ...`, an edited or a loaded state, another
set of gradients) makes a new batch, whose tensors are looked at. The batch holds on to the storages
that it saw, so an equal address is the same memory. It does not hold on to gradients. A gradient
that may overlap what the step writes is copied first.

[Note: Looked at once]
A step of many small tensors is Python's time, so each thing is read once per tensor and step, by
loops in C over all tensors, and compared with what was there when the batch was built: where the
memory is, and the faces of the gradients (`faces`: all that a check of them asks for but their
addresses). What is the same was found good then. What differs is checked anew, tensor by tensor,
and laid out anew.

[Note: Count]
All that can be refused is refused before anything is changed. From the first write on a step is
`whole`: a signal's handler (Ctrl-C) runs before all of it or after all of it. The members of a
native call are counted up when it has returned, and only then what was made for a first step is put
into their states: so where a call fails (for want of memory), those before it are counted, and a
state without its momentum has not begun.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_adam.formats import Slot, StateFormat
from cpu_adam.hyper import Hyper
from cpu_adam.interrupt import whole
from cpu_adam.memory import (
    PLAIN,
    Addresses,
    Places,
    Ranges,
    are_native,
    extent,
    in_waves,
    storage_bytes,
)
from cpu_adam.native import UpdateTable
from cpu_adam.parameter_state import STEP, local, whole_step
from cpu_adam.spans import Span, Turns

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
    kept: dict[str, Tensor]
    """What an update reads or writes, by its key in the state; there once a step was taken."""
    begins: bool
    """Whether the moments were made for this step."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Members of one format with gradients of one dtype: one native call."""

    indices: list[int]
    rows: npt.NDArray[np.int64]
    """The indices."""
    table: UpdateTable
    staged: list[tuple[Tensor, Tensor]]
    """Weights that are not contiguous, each with the contiguous copy that is updated for it."""
    counts: Tensor
    """1 for each member of the batch that is of this call, else 0."""


class Batch:
    """Members that are updated together, but for those that share memory: these take turns."""

    def __init__(self, due: Due, members: Sequence[Member], setting: object) -> None:
        """setting: what else the layout depends on."""
        self._setting = setting
        self._members = list(members)
        self._parameters, self._groups = due.parameters, due.groups
        self._dtypes = [g.dtype for g in due.gradients]
        self._faces = faces(due.gradients)
        self._sharded = any(local(p) is not p for p in due.parameters)
        self._counted = all(STEP in member.kept for member in members)
        steps = [
            whole_step(m.kept[STEP]) if self._counted else float(not m.begins) for m in members
        ]
        self._steps = torch.tensor(steps, dtype=torch.float32, device="cpu")
        if self._counted:  # Views, so that all are read and counted up by one call.
            for member, step in zip(members, self._steps.unbind()):
                member.kept[STEP] = step
        self._weights = [local(p).detach() for p in due.parameters]
        sizes = [w.numel() * dtype.itemsize for w, dtype in zip(self._weights, self._dtypes)]
        self._sizes = np.array(sizes, np.int64)
        self._plain = all(
            type(g) in PLAIN and g.is_contiguous() and not g.is_neg() for g in due.gradients
        )
        written = [(w, *map(local, m.slots.values())) for w, m in zip(self._weights, members)]
        self._waves = in_waves(written)
        self._writes = Ranges(itertools.chain.from_iterable(written))
        self._scratch: Tensor | None = None
        self._turns: list[int] = []
        self._calls: list[_Call] = []
        self._kept = [(m.state, list(m.kept)) for m in members]
        self._slots = [slot for m in members for slot in m.kept.values()]
        self._places = Places([*self._weights, *map(local, self._slots)])
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
            and None not in (self._faces, self._seen)
            and self._faces == faces(due.gradients)
            and self._seen == self._look()
            and not self._places.moved()
        )

    def run(
        self,
        hypers: Sequence[Hyper],
        gradients: Sequence[Tensor],
        gradient_scale: float,
        states: MutableMapping[Tensor, dict[str, Any]],
    ) -> None:
        """One step of every member.

        hypers: of each parameter group. gradients: of each member. gradient_scale: what they are
        multiplied by. states: of all parameters; the first step puts in what was made for it.
        """
        gradients, addresses = self._ready(gradients)
        taken = self._steps.tolist()
        if not all(map(float.is_integer, taken)):  # Somebody has written there.
            list(map(whole_step, taken))  # Which refuses them.
        steps = [int(step) + 1 for step in taken]
        kinds = list(zip(self._groups, steps))
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        turns = [numbers[kind] for kind in kinds]
        if turns != self._turns:
            self._calls, self._turns = self._laid_out(turns), turns
        pairs = [(hypers[group], step) for group, step in numbers]
        whole(self._write, pairs, gradients, addresses, gradient_scale, states)

    def _write(
        self,
        pairs: Turns,
        gradients: Sequence[Tensor],
        addresses: Addresses | None,
        gradient_scale: float,
        states: MutableMapping[Tensor, dict[str, Any]],
    ) -> None:
        """What `run` changes: see [Note: Count]."""
        for call in self._calls:
            for weight, stage in call.staged:
                stage.copy_(weight)
            due = [gradients[i] for i in call.indices]
            at = None if addresses is None else addresses[call.rows]
            call.table.update(pairs, gradients=due, addresses=at, gradient_scale=gradient_scale)
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

    def _keep(self, indices: Sequence[int], states: MutableMapping[Tensor, dict[str, Any]]) -> None:
        """Put what was made for members into their states: see [Note: Count]."""
        for member in (self._members[i] for i in indices):
            member.state.update(member.kept)
            if member.state:  # As in torch, one that keeps nothing has no state.
                states[member.parameter] = member.state

    def _ready(self, gradients: Sequence[Tensor]) -> tuple[list[Tensor], Addresses | None]:
        """What of the gradients is of this process, apart from what the step writes.

        With their addresses, if all of them are plain contiguous tensors in memory.
        """
        ready = list(gradients)
        if self._sharded:
            ready = [_placed(g, p) for g, p in zip(gradients, self._parameters)]
        starts = np.fromiter(map(Tensor.data_ptr, ready), np.int64, len(ready))
        plain = self._plain and bool(((starts != 0) | (self._sizes == 0)).all())
        ends = starts + self._sizes
        if not plain:
            are_native(ready)  # Which refuses some.
            ends = np.array([extent(x)[1] for x in ready], np.int64)
        for i in self._writes.touched_by(starts, ends):
            ready[i] = ready[i].clone()
            starts[i] = ready[i].data_ptr()
        return ready, starts if plain else None

    def _look(self) -> list[list[Any]] | None:
        """Where weights and shards are, and how laid out; None where a slot is another one."""
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
        if self._sharded:  # Else they are those that `Places` looks at.
            found.append(list(map(Tensor.data_ptr, slots)))
        return found

    def _laid_out(self, turns: Sequence[int]) -> list[_Call]:
        calls = []
        for wave in self._waves:
            kinds: dict[tuple[str, torch.dtype], list[int]] = {}
            for i in wave:
                kind = (self._members[i].format.name, self._dtypes[i])
                kinds.setdefault(kind, []).append(i)
            calls += [self._call(indices, turns) for indices in kinds.values()]
        return calls

    def _call(self, indices: list[int], turns: Sequence[int]) -> _Call:
        spans, staged, shared = [], [], set[str]()
        for i in indices:
            member, weight = self._members[i], self._weights[i]
            stage = weight
            if not weight.is_contiguous() or weight.is_neg():
                stage = torch.empty_like(weight, memory_format=torch.contiguous_format)
                staged.append((weight, stage))
            slots = {name: local(slot).view(-1) for name, slot in member.slots.items()}
            for slot in member.format.slots:
                if slot.name not in slots:
                    slots[slot.name] = self._unread(slot, weight.numel())
                    shared.add(slot.name)
            spans.append(Span(stage.view(-1), None, slots, turns[i]))
        counts = torch.zeros_like(self._steps)
        counts[indices] = 1
        table = UpdateTable(spans, self._members[indices[0]].format, shared)
        return _Call(indices, np.array(indices, np.int64), table, staged, counts)

    def _unread(self, slot: Slot, elements: int) -> Tensor:
        """Memory in the place of a slot that updates leave alone, shared by all members."""
        if self._scratch is None:
            largest = max(weight.numel() for weight in self._weights)
            self._scratch = torch.empty(largest, dtype=torch.float32, device="cpu")
        assert slot.dtype == "float32", slot
        return self._scratch[: slot.items(elements)]


_LAYOUT: tuple[Callable[[Tensor], Any], ...] = (
    *(Tensor.data_ptr, Tensor.size, Tensor.stride, attrgetter("dtype")),
)
_FACE: tuple[Callable[[Tensor], Any], ...] = (
    *(type, Tensor.numel, Tensor.is_contiguous, Tensor.is_neg, Tensor.storage_offset),
    *(attrgetter(name) for name in ("dtype", "is_cpu", "layout")),
)


def faces(gradients: Sequence[Tensor]) -> list[list[Any]] | None:
    """By kind of fact, the facts about each gradient; None where one has no such facts."""
    try:
        return [storage_bytes(gradients), *(list(map(one, gradients)) for one in _FACE)]
    except RuntimeError:  # Some sparse layouts.
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
