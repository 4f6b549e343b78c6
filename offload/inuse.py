"""The units in use: their parameters are views of a slot, or of memory taken for that time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from offload.arena import Memory, zeros_on
from offload.binding import BoundUnit
from offload.executor import Executor
from offload.passes import Entry, Passes
from offload.program import Value


class InUse:
    """Brings units into use and puts them at rest, each in its turn of the open pass."""

    def __init__(self, executor: Executor, memory: Memory, passes: Passes):
        """No unit is in use."""
        self._executor = executor
        self._weight_slot = executor.plan.weight_slot
        self._memory = memory
        self._passes = passes
        self._units: list[BoundUnit] = []
        self._device_type = executor.device.torch_device.type

    def __iter__(self) -> Iterator[BoundUnit]:
        return iter(list(self._units))

    def serve(self, bound: BoundUnit) -> None:
        """Wait for a unit's weights and let its parameters be views of them."""
        entry = self._passes.take(bound.index)
        slot = self._weight_slot[bound.index]
        if slot is not None and slot in (self._weight_slot[other.index] for other in self._units):
            self._serve_apart(bound, entry)
            return
        try:
            self._executor.lanes.begin(entry.task)
            bound.serve(self._memory.weights(bound.index), keep_views=True)
        except BaseException:
            if entry.task.begun:
                self._executor.lanes.finish(entry.task)
            self._passes.give_up(entry)
            raise
        bound.task = entry.task
        self._units.append(bound)

    def _serve_apart(self, bound: BoundUnit, entry: Entry) -> None:
        """Serve a unit from memory of its own: its slot is in use by a unit used with it."""
        self._passes.give_up(entry)
        self._executor.quiesce("weight", bound.index, to_write=False)
        with torch.inference_mode(False):
            buffer = zeros_on(self._executor.device, bound.spec.weight_bytes)
        for piece, (offset, size) in enumerate(bound.spec.pieces):
            home = self._executor.peek(Value("weight", bound.index, piece))
            buffer[offset : offset + size].copy_(home)
        bound.serve(buffer, keep_views=False)
        self._units.append(bound)

    def release(self, bound: BoundUnit) -> None:
        """Put a unit at rest when nothing uses it any more."""
        if bound.buffer is None or bound.depth > 0 or bound.held:
            return
        bound.rest()
        if bound.task is not None:
            self._executor.lanes.finish(bound.task)
            bound.task = None
        self._units.remove(bound)

    def release_all(self) -> None:
        """Put every unit at rest, whatever uses it."""
        for bound in self:
            bound.depth, bound.held = 0, False
            self.release(bound)

    def holding(self, tensor: torch.Tensor) -> tuple[BoundUnit, int] | None:
        """The unit in whose weights a tensor lies, and where in bytes; None where in none."""
        if tensor.layout is not torch.strided or tensor.device.type != self._device_type:
            return None
        address = tensor.data_ptr()
        for bound in self._units:
            assert bound.buffer is not None
            offset = address - bound.buffer.data_ptr()
            if 0 <= offset < bound.spec.weight_bytes and tensor.numel():
                return bound, offset
        return None


def refuse_edit(name: str | None) -> None:
    """Refuse that a parameter was changed in place while it was in use, if one was.

    Raises:
        RuntimeError: one was.
    """
    if name is not None:
        raise RuntimeError(
            f"{name} was changed in place while its own module ran: in use it is "
            "a view of a buffer that is not written back, so the change cannot be honoured. "
            "Change it before the forward or after the backward instead"
        )
