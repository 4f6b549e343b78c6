"""The units in use: their parameters are views of a slot, or of memory taken for that time."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from offload.arena import Memory, zeros_on
from offload.binding import BoundUnit
from offload.executor import Executor
from offload.exposure import Exposures
from offload.guard import Handle, Resolver
from offload.passes import Entry, Passes
from offload.program import Lane, Value

_node: Callable[[], Any] = torch._C._current_autograd_node
"""What runs on this thread, of the innermost backward."""


class InUse:
    """Brings units into use and puts them at rest, each in its turn of the open pass."""

    def __init__(
        self,
        executor: Executor,
        memory: Memory,
        passes: Passes,
        exposures: Exposures,
        resolver: Resolver,
    ):
        """No unit is in use; `resolver` turns handles back into tensors."""
        self._resolver = resolver
        self._exposures = exposures
        self._executor = executor
        self._weight_slot = executor.plan.weight_slot
        self._memory = memory
        self._passes = passes
        self.units: list[BoundUnit] = []
        """Those in use."""
        self._on_cpu = executor.device.torch_device.type == "cpu"

    def serve(self, bound: BoundUnit) -> None:
        """Wait for a unit's weights and let its parameters be views of them."""
        entry = self._passes.take(bound.index)
        slot = self._weight_slot[bound.index]
        for other in self.units:
            if slot is not None and slot == self._weight_slot[other.index]:
                self._serve_apart(bound, entry)
                return
        try:
            self._executor.lanes.begin(entry.task)
            if bound.kept is None:
                bound.kept = bound.views_of(self._memory.weights(bound.index))
            bound.serve(bound.kept)
        except BaseException:
            if entry.task.begun:
                self._executor.lanes.finish(entry.task)
            self._passes.give_up(entry)
            raise
        bound.task = entry.task
        self.units.append(bound)

    def _serve_apart(self, bound: BoundUnit, entry: Entry) -> None:
        """Serve a unit from memory of its own: its slot is in use by a unit used with it."""
        self._passes.give_up(entry)
        self._exposures.reserve(bound.index, bound.spec.weight_bytes, bound.spec.name)
        try:
            self._executor.quiesce("weight", bound.index, to_write=False)
            with torch.inference_mode(False):
                buffer = zeros_on(self._executor.device, bound.spec.weight_bytes)
            for piece, (offset, size) in enumerate(bound.spec.pieces):
                home = self._executor.peek(Value("weight", bound.index, piece))
                buffer[offset : offset + size].copy_(home)
            bound.serve(bound.views_of(buffer))
        except BaseException:
            self._exposures.unreserve(bound.index)
            raise
        self.units.append(bound)

    def leave(self, used: Sequence[BoundUnit]) -> None:
        """A module that uses these units has run: put at rest those that nothing else uses.

        Raises:
            RuntimeError: a parameter was given other storage meanwhile, or was changed where the
                module could not see it. All of `used` are at rest then.
        """
        for bound in used:
            bound.depth = max(0, bound.depth - 1)
            bound.held = bound.held or (bound.spec.lasting and bound.buffer is not None)
        try:
            for bound in used:
                self._leave(bound)
        except BaseException:
            for bound in used:
                bound.held = False
                self.release(bound)
            raise

    def _leave(self, bound: BoundUnit) -> None:
        if bound.buffer is None:
            return
        moved = bound.moved()
        missed = self._exposures.edited(bound.index) if self._exposures.copies else None
        self.release(bound)
        if moved is not None:
            raise RuntimeError(
                f"{moved} was given other storage while its own module ran, but it is offloaded "
                "and only its values can change: copy_() into it, or assign its data"
            )
        if missed is not None:
            raise RuntimeError(
                f"{missed} was changed, while its own module ran, through a view taken before "
                "(p.data, p.detach()): the module has used the values before that. Take p.data "
                "anew where it is changed, or change it outside the module's forward"
            )

    def release(self, bound: BoundUnit, *, look: bool = False) -> None:
        """Put a unit at rest when nothing uses it any more; changes of its weights count.

        Weights are compared with those at home if any may have changed, and always with `look`.
        """
        if bound.buffer is None or bound.depth > 0 or bound.held:
            return
        self._exposures.unreserve(bound.index)
        weights, changed = bound.buffer, look or bound.changed
        bound.rest()
        self.units.remove(bound)
        try:
            if changed:
                self._keep(bound.index, weights)
        finally:
            if bound.task is not None:
                self._executor.lanes.finish(bound.task)
                bound.task = None

    def keep(self, unit: BoundUnit) -> None:
        """Put home what was changed in a use that goes on."""
        if unit.buffer is not None and unit.changed:
            self._keep(unit.index, unit.buffer)

    def _keep(self, unit: int, weights: torch.Tensor) -> None:
        """Put home what was changed in use, and let nothing read it before.

        States stay as they are: behind a bfloat16 weight, its master starts from the new value
        within half a unit of its last place, on every tier (at home on the device nobody could
        tell which elements were changed).
        """
        if self._weight_slot[unit] is None:
            return
        # Not done again: a second try would not know what is home already.
        with self._executor.lanes.once():
            self._passes.pause()
            self._executor.quiesce("weight", unit)
            changed = False
            for piece, (offset, size) in enumerate(self._executor.plan.profile.units[unit].pieces):
                value, now = Value("weight", unit, piece), weights[offset : offset + size]
                if self._differs(value, now):
                    self._executor.poke(value, now)
                    changed = True
            if changed:
                self._passes.invalidate(unit)  # Served apart, its slot may hold what was at home.
                self._exposures.renew(unit)

    def _differs(self, value: Value, now: torch.Tensor) -> bool:
        """Whether `now` is another value than that at home; True where that cannot be read."""
        try:
            home = self._executor.peek(value)
        except (OSError, MemoryError):
            return True
        here = self._executor.device.holds(home)
        self._executor.lanes.drain()
        with self._executor.lanes.waited(Lane.COMPUTE if here else Lane.D2H):
            return not torch.equal(home, now.to(home.device))

    def copied(self, handle: Handle) -> torch.Tensor:
        """What a handle stands for, in the private copy of its parameter."""
        return handle.of(self._exposures.tensor(handle.unit, handle.parameter).detach())

    def reached(self, graph: int) -> None:
        """A backward runs a forward again: of the calls behind its node it needs nothing more.

        Torch takes the nodes of one thread in the order of their numbers, the last made first.
        """
        if (node := _node()) is None:
            return
        number = node._sequence_nr()
        for bound in self.units:
            if bound.held_by == graph and number < bound.began:
                bound.held_by = -1

    def release_held(self, *, others: Container[int], but: BoundUnit | None = None) -> None:
        """Put the units held at rest, but lasting ones, which stay to the end of the pass.

        Units that were called inside the forward of `but`, or around it, stay: their backwards lie
        inside one another. So do those that one of `others` holds, the backwards around this one:
        it may have their weights with nobody's guard around, from a checkpoint of a unit's own.
        """
        for bound in list(self.units):
            around = but is not None and (bound.index in but.around or but.index in bound.around)
            if bound is but or around or bound.spec.lasting or bound.held_by in others:
                continue
            bound.held = False
            self.release(bound)

    def release_lasting(self) -> None:
        """Put at rest what only lasts: units that no module uses which is under way."""
        for bound in list(self.units):
            if not bound.depth:
                bound.held = False
                self.release(bound)

    def release_all(self, *, look: bool) -> None:
        """Put every unit at rest, whatever uses it, and compare its weights if to `look`."""
        for bound in list(self.units):
            bound.depth, bound.held = 0, False
            self.release(bound, look=look)

    def handle_of(self, tensor: torch.Tensor) -> Handle | None:
        """What stands for a tensor that lies in weights in use, else None."""
        if tensor.layout is not torch.strided:
            return None
        address = tensor.data_ptr()
        for bound in self.units:
            if bound.address <= address < bound.end:  # Of what is empty the address is zero.
                own = tensor.is_cpu is self._on_cpu  # Else that is of other memory.
                return bound.handle_at(self._resolver, address, tensor) if own else None
        return None
