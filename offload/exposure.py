"""Private copies of parameters that are touched outside their use.

[Note: Exposed parameters]
Touching a parameter at rest lends it a private copy of its true values, made after any update that
is due. Everything the touch returns (`p.data`, `p.detach()`, `p[0]`) aliases that copy. The copy
stays while somebody holds it; before the unit is used again, updated, or the copy let go, it is
compared with the home bit for bit and an edit is written back. After an update, copies that are
still held are renewed, so that they go on showing the parameter. All copies together are bounded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from offload.config import format_bytes
from offload.executor import Executor
from offload.homes import Homes
from offload.passes import Passes
from offload.profile import ITEM_BYTES
from offload.program import Lane, Value

KEPT_BYTES_MAX = 16 << 20
"""A piece read for one touch is kept for the next if it is no larger. Chunks never are; pieces of
frozen weights may be."""


@dataclass(slots=True)
class _Copy:
    tensor: torch.Tensor
    idle_count: int
    """Use count of its storage when nobody else holds it."""

    @property
    def held(self) -> bool:
        """Whether anybody else holds the copy or a view of it."""
        return use_count(self.tensor) > self.idle_count


def use_count(tensor: torch.Tensor) -> int:
    """How many hold the storage of a tensor, its views among them."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


class Exposures:
    """The private copies of an engine, by unit and parameter."""

    def __init__(
        self,
        executor: Executor,
        passes: Passes,
        limit_bytes: int,
        in_use: Callable[[int], bool],
    ):
        """At most `limit_bytes` of copies at once; a unit that is `in_use` cannot be written."""
        self._executor = executor
        self._passes = passes
        self._homes = Homes(executor)
        self._in_use = in_use
        self._plan = executor.plan
        self.limit_bytes = limit_bytes
        self.copies: dict[int, dict[int, _Copy]] = {}
        """By unit and parameter."""
        self._reserved: dict[int, int] = {}
        """Bytes by unit that is served from memory of its own."""

    @property
    def bytes(self) -> int:
        """Bytes of all copies, and of units whose slot another one has."""
        copies = sum(c.tensor.nbytes for unit in self.copies.values() for c in unit.values())
        return copies + sum(self._reserved.values())

    def reserve(self, unit: int, size: int, name: str) -> None:
        """Take `size` bytes for a unit whose slot is in use, until `unreserve`.

        Raises:
            MemoryError: the copies that are still held leave no room for it.
        """
        self._make_room(size, f"{name}, whose slot is in use by a unit that is used with it,")
        self._reserved[unit] = size

    def unreserve(self, unit: int) -> None:
        """Give back what was taken for a unit, if anything was."""
        self._reserved.pop(unit, None)

    def tensor(self, unit: int, parameter: int) -> torch.Tensor:
        """The private copy of a parameter, made if there is none.

        Raises:
            MemoryError: the copies that are still held leave no room for it.
        """
        found = self.copies.get(unit, {}).get(parameter)
        if found is None:
            one = self._plan.profile.units[unit].parameters[parameter]
            needs = f"touching {one.name} outside its use"
            self._make_room(one.elements * ITEM_BYTES[one.dtype], needs)
            self._executor.quiesce("weight", unit, to_write=False)
            copied = self._read(unit, parameter, KEPT_BYTES_MAX)
            self._executor.lanes.drain()  # Other streams look at it, and write what was read.
            found = _Copy(copied, use_count(copied))
            self.copies.setdefault(unit, {})[parameter] = found
        return found.tensor

    def _make_room(self, size: int, what: str) -> None:
        if self.bytes + size <= self.limit_bytes:
            return
        self.put_all_home()
        if self.bytes + size > self.limit_bytes:
            raise MemoryError(
                f"{what} needs a private copy of {format_bytes(size)}, "
                f"but copies of {format_bytes(self.bytes)} are still held and exposed_memory is "
                f"{format_bytes(self.limit_bytes)}. Let go of earlier ones (state_dict() holds all "
                "of them), go through optimizer.engine.stream_weights() instead, which needs one "
                "parameter at a time, or raise Config.exposed_memory"
            )

    def put_all_home(self) -> None:
        """`put_home` every unit of which there are copies."""
        for unit in list(self.copies):
            self.put_home(unit)

    def put_home(self, unit: int) -> None:
        """Put home what was edited, which no slot holds then; let go of what nobody holds.

        A unit in use is left as it is.
        """
        copies = self.copies.get(unit)
        if not copies or self._in_use(unit):
            return
        # No update is under way: of what is exposed none begins before step(), which waits for it.
        edited = [one for one in sorted(copies) if self._edited(unit, one, copies[one].tensor)]
        self._homes.forget()
        if edited or self._homes.unwritten(unit):
            self._passes.pause()
            self._passes.invalidate(unit)
            self._executor.quiesce("weight", unit)
            self._write_back(unit, {one: copies[one].tensor for one in edited})
        for parameter in [p for p, one in copies.items() if not one.held]:
            del copies[parameter]
        if not copies:
            del self.copies[unit]

    def edited(self, unit: int) -> str | None:
        """Name of a parameter whose copy is not what is at home; None where all are."""
        for parameter, one in sorted(self.copies.get(unit, {}).items()):
            if self._edited(unit, parameter, one.tensor):
                self._homes.forget()
                return self._plan.profile.units[unit].parameters[parameter].name
        return None

    @contextmanager
    def disowned(self, unit: int, parameter: int, values: torch.Tensor) -> Iterator[None]:
        """Other `values` come, in memory of their own: whoever holds a copy keeps what it shows.

        Where they do not come the copy is the parameter's as before.
        """
        found = self.copies.get(unit, {}).get(parameter)
        if found is None or found.tensor.data_ptr() == values.data_ptr():
            yield
            return
        del self.copies[unit][parameter]
        if not self.copies[unit]:
            del self.copies[unit]
        try:
            yield
        except BaseException:
            self.copies.setdefault(unit, {})[parameter] = found
            raise

    def read(self, unit: int, parameter: int) -> torch.Tensor:
        """The values of a parameter after any update, in memory of their own, not counted."""
        self._executor.quiesce("weight", unit, to_write=False)
        with torch.no_grad():
            values = self._read(unit, parameter, sys.maxsize)
        self._executor.lanes.drain()  # Before an update may write where it reads.
        return values

    def forget(self) -> None:
        """Let go of what the last `read` left for the next one."""
        self._homes.forget()

    def renew(self, unit: int) -> None:
        """Show the present values in the copies of `unit` (after an update)."""
        if unit in self.copies:
            self._executor.quiesce("weight", unit, to_write=False)
            for parameter, one in sorted(self.copies[unit].items()):
                one.tensor.copy_(self._read(unit, parameter, sys.maxsize))
            self._homes.forget()
            self._executor.lanes.drain()

    # -- one parameter at home ------------------------------------------------------------------

    def _parts(self, unit: int, parameter: int) -> list[tuple[int, int, int, int]]:
        """(piece, offset in the piece, offset in the parameter, bytes) that cover a parameter."""
        spec = self._plan.profile.units[unit]
        one = spec.parameters[parameter]
        low = spec.weight_offset(parameter)
        high = low + one.elements * ITEM_BYTES[one.dtype]
        parts = []
        for index, (offset, size) in enumerate(spec.pieces):
            start, stop = max(low, offset), min(high, offset + size)
            if start < stop:
                parts.append((index, start - offset, start - low, stop - start))
        return parts

    def _read(self, unit: int, parameter: int, kept_bytes_max: int) -> torch.Tensor:
        """The values of a parameter at home, in memory of its own on the compute device.

        A piece that others lie in too is kept for them, where it is no larger than given.
        """
        spec = self._plan.profile.units[unit]
        one, behind = spec.parameters[parameter], parameter + 1
        stop = spec.weight_offset(behind) if behind < len(spec.parameters) else spec.weight_bytes
        dtype: torch.dtype = getattr(torch, one.dtype)
        with torch.inference_mode(False):
            out = self._executor.device.empty(one.shape, dtype)
        flat = out.view(-1).view(torch.uint8)
        for piece, here, there, size in self._parts(unit, parameter):
            offset, whole = spec.pieces[piece]
            last = offset + whole <= stop or whole > kept_bytes_max
            home = self._homes.look(Value("weight", unit, piece), last=last)
            self._executor.copy_now(flat[there : there + size], home[here : here + size])
        return out

    def _edited(self, unit: int, parameter: int, tensor: torch.Tensor) -> bool:
        """Whether a copy is not what is at home."""
        values = self._read(unit, parameter, sys.maxsize).view(-1).view(torch.uint8)
        with self._executor.lanes.waited(Lane.COMPUTE):
            return not torch.equal(tensor.detach().view(-1).view(torch.uint8), values)

    def _write_back(self, unit: int, edited: dict[int, torch.Tensor]) -> None:
        """Put edited copies home. States stay as they are, see `cpu_adam` [Note: Edits]."""
        parts: dict[Value, list[tuple[int, torch.Tensor]]] = {
            value: [] for value in self._homes.unwritten(unit)
        }
        for parameter, tensor in edited.items():
            flat = tensor.detach().view(-1).view(torch.uint8)
            for piece, here, there, size in self._parts(unit, parameter):
                changed = parts.setdefault(Value("weight", unit, piece), [])
                changed.append((here, flat[there : there + size]))
        for value, changed in parts.items():
            home = self._homes.look(value, last=True)
            for here, part in changed:
                self._executor.copy_now(home[here : here + part.numel()], part)
            self._homes.write(value, home)
