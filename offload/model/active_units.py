"""The units in use: their parameters are views of a slot, or of memory taken for that time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from offload.model.passes import Entry, Passes
from offload.model.saved_tensors import SavedWeight
from offload.model.snapshots import Key, Snapshots
from offload.model.units import FlatUnit
from offload.runtime.entry import entry
from offload.runtime.memory import zeros_on
from offload.runtime.runner import Runner
from offload.runtime.torch_internals import local_part


class ActiveUnits:
    """Brings units into use and puts them at rest, each in its turn of the open pass."""

    def __init__(
        self,
        runner: Runner,
        passes: Passes,
        snapshots: Snapshots,
        units: Sequence[FlatUnit],
        lock: AbstractContextManager[object],
        check: Callable[[], None],
    ):
        """None of `units` is in use; `check` raises where the engine cannot be used."""
        self._runner = runner
        self._passes = passes
        self._snapshots = snapshots
        self._all, self._lock, self._check = units, lock, check
        self._slots = [*map(runner.plan.slot_in_use, range(len(units)))]
        self._on_cpu = runner.device.torch_device.type == "cpu"
        self.units: list[FlatUnit] = []
        """Those in use."""

    def use(self, unit: FlatUnit) -> None:
        """Wait for a unit's weights, of which `bind` lets parameters be views."""
        entry = self._passes.take(unit.index)
        slot = self._slots[unit.index]
        if slot is not None and any(slot == self._slots[one.index] for one in self.units):
            self._use_apart(unit, entry)
            return
        try:
            if self._passes.collectives is not None:
                self._passes.collectives.gather(entry)
            self._runner.begin(entry.task)
            if unit.kept is None:
                unit.kept = unit.views_of(self._runner.memory.weights(unit.index))
            unit.weights = unit.kept
        except BaseException:
            if entry.task.begun:
                self._runner.finish(entry.task)
            self._passes.give_up(entry)
            raise
        unit.task = entry.task
        self.units.append(unit)

    def _use_apart(self, unit: FlatUnit, entry: Entry) -> None:
        """Use a unit in memory of its own: a unit that is used with it has its slot."""
        self._passes.give_up(entry)
        self._snapshots.reserve(unit.index, unit.spec.weight_bytes, unit.spec.name)
        try:
            with torch.inference_mode(False):
                buffer = zeros_on(self._runner.device, unit.spec.weight_bytes)
            if self._passes.collectives is not None:
                self._passes.collectives.gather_into(unit.index, buffer)
            else:
                self._runner.read_weights(unit.index, buffer)
            unit.weights = unit.views_of(buffer)
        except BaseException:
            self._snapshots.unreserve(unit.index)
            raise
        self.units.append(unit)

    def leave(self, used: Sequence[FlatUnit]) -> None:
        """A module that uses these units has run: put at rest those that nothing else uses."""
        changed = [name for unit in used if unit.weights is not None and (name := unit.changed())]
        for unit in used:
            unit.depth = max(0, unit.depth - 1)
            unit.stays = unit.stays and unit.weights is not None and not changed
            # In a recompute in its own backward it is in use, unless the forward found it at rest.
            rests = unit.touched if unit.graph_task >= 0 else unit.fused or unit.spec.lasting
            if rests and unit.weights is not None and not (unit.depth or changed):
                unit.unbind(between=True)
            self.release(unit)
        if changed:
            refuse_change(changed[0], "forward")

    def make_way(self, changed: FlatUnit | None = None) -> None:
        """Put at rest what is in its slot between two calls: what is lasting, or what a node of
        autograd is unpacking, only where it is `changed`."""
        for unit in [one for one in self.units if one.between]:
            if unit is changed or not (unit.spec.lasting or unit.unpacking):
                unit.between = False
                self.release(unit)

    def release(self, unit: FlatUnit) -> None:
        """Put a unit at rest when nothing uses it any more."""
        if unit.weights is None or unit.depth > 0 or unit.stays or unit.between:
            return
        self._snapshots.unreserve(unit.index)
        unit.unbind()
        self.units.remove(unit)
        if unit.task is not None:
            self._runner.finish(unit.task)
            unit.task = None

    def hold(self, unit: FlatUnit, graph_task: int) -> None:
        """Keep a unit in use for its backward, until the next one's in the same graph task."""
        if not unit.stays:  # Else a backward around this one may have its weights.
            unit.graph_task = graph_task
        unit.stays = True

    def release_stayed(self, graph_task: int, *, but: FlatUnit | None = None) -> None:
        """Put the units at rest that a graph task holds, but one, those that were called inside
        its forward, whose backwards interleave with its own, those that are lasting, and those of
        which a node is unpacking something."""
        changed = None
        for unit in list(self.units):
            stays = (
                unit.unpacking or unit.spec.lasting or (but is not None and unit.nested_with(but))
            )
            if unit.graph_task == graph_task and not stays:
                changed = changed or unit.changed()
                unit.stays, unit.graph_task = False, -1
                unit.between &= but is None  # Else another one's turn has come.
                self.release(unit)
        if changed:
            refuse_change(changed, "backward")

    def release_all(self, *, but_used: bool = False) -> None:
        """Put every unit at rest, whatever uses it, `but_used` those that a running module uses."""
        for unit in [one for one in self.units if not (but_used and one.depth)]:
            unit.depth, unit.unpacking, unit.graph_task = 0, 0, -1
            unit.stays = unit.between = False
            self.release(unit)

    def saved_weight(self, tensor: torch.Tensor) -> SavedWeight | None:
        """What stands for a tensor that lies in weights in use, else None."""
        if tensor.layout is not torch.strided:
            return None
        address = tensor.data_ptr()
        for unit in self.units:
            weights = unit.weights
            if weights and weights.start <= address < weights.stop:  # Zero for what is empty.
                own = tensor.is_cpu is self._on_cpu  # Else that is of other memory.
                return unit.saved_at(self.tensor_of, address, tensor) if own else None
        return None

    def tensor_of(self, saved: SavedWeight) -> torch.Tensor:
        """The weight that autograd has saved: in the slot, or in a snapshot."""
        with self._lock:
            unit = self._all[saved.unit]
            unit.require_version(saved)
            if unit.weights is not None:
                if unit.task is not None:  # This may be a stream of the user's, inside a module.
                    self._runner.join(unit.task)
                return unit.shown(saved)
            self._check()
            return self._from_snapshot(saved)

    @entry
    def _from_snapshot(self, saved: SavedWeight) -> torch.Tensor:
        return saved.of(self._snapshots.tensor(Key("weight", saved.unit, saved.parameter)))

    def outliving(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, or a copy where it lies in weights in use, which it would outlive."""
        local = local_part(tensor)
        plain = type(local) is torch.Tensor and not isinstance(tensor, nn.Parameter)
        return tensor.clone() if plain and self.saved_weight(local) else tensor


def refuse_change(name: str, verb: str) -> None:
    """Refuse a parameter that was changed in place while it was in use."""
    raise RuntimeError(
        f"{name} was changed in place in the {verb} of its own module, where an offloaded weight "
        "is read-only, so its value is undefined now: change it between two steps, or outside the "
        f"{verb}"
    )
