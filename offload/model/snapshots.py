"""Copies of values that the user touches outside their use.

[Note: Snapshots]
A touch of a value that lives elsewhere gives a copy of it, made after any update that is due. What
the touch returns (`p.data`, `p[0]`, a NumPy array) aliases that copy, and a second touch shows its
edits. At the next boundary (a forward, a backward, `step()`, `zero_grad()`, `sleep()`,
`state_dict()`) every copy is compared with the home, bit for bit, and an edit is written back. Then
the engine forgets the copy: an alias that is still held keeps what it showed, and is no longer the
model's.

The memory is the engine's. The user gets aliases of it through DLPack, each a storage of its own,
and torch tells through a weak reference when a storage is gone. So copies that are held count
against `exposed_memory`, and one that nobody holds any more makes room for the next. For gradients
on nvme that are more than that see [Note: Gradients at rest] of `parameter`. One for which there is
no room even so is shown in a file without a name beside the store's, mapped.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from offload.model.parameter import RestingGradient
from offload.planning.profile import Kind, Parameter
from offload.planning.tiers import format_bytes
from offload.program.ops import Lane, Value
from offload.runtime.memory import host_tensor, mapped
from offload.runtime.runner import ChunkCache, Runner
from offload.runtime.torch_internals import version


class Key(NamedTuple):
    """A value of one parameter."""

    kind: Kind
    unit: int
    parameter: int


def share(memory: torch.Tensor) -> torch.Tensor:
    """A tensor over `memory`, by a storage of its own."""
    with torch.inference_mode(False):
        return from_dlpack(memory)  # type: ignore[no-any-return]


@dataclass(slots=True)
class _Snapshot:
    memory: torch.Tensor
    in_file: bool = False
    edited: bool | None = False  # Since it was made; None where that is not known.
    aliases: list[tuple[Any, Callable[[], torch.Tensor | None]]] = field(default_factory=list)
    """What watches each storage, and the tensor that was given of it."""

    @property
    def held(self) -> bool:
        """Whether anybody holds a tensor, a view of it, or an array over its memory."""
        self.aliases = [(storage, one) for storage, one in self.aliases if not storage.expired()]
        return bool(self.aliases)

    def tensor(self) -> torch.Tensor:
        """The tensor that was given last where it is held, else another alias."""
        found = self.aliases[-1][1]() if self.held else None
        if found is None:
            found = share(self.memory)
            watch: Any = StorageWeakRef
            self.aliases.append((watch(found.untyped_storage()), weakref.ref(found)))
        return found

    def take_back(self, edited: bool | None) -> None:
        """A function that was given the tensor has ended, and has edited it, or not, or perhaps."""
        unknown = self.edited is None or edited is None or self.held
        self.edited = None if unknown else self.edited or edited


class Snapshots:
    """The snapshots of an engine, at most `limit_bytes` at once."""

    enter: Callable[[Key], Any]
    """`lend` as a call from the user's code; set by the engine."""

    def __init__(self, runner: Runner, forget_slot: Callable[[int], None], limit_bytes: int):
        """None is there yet; `forget_slot` is told of a unit whose weights are others."""
        self._runner, self._forget_slot = runner, forget_slot
        self._units = runner.plan.profile.units
        self._chunks = ChunkCache(runner)
        self._limit_bytes = limit_bytes
        self._open: dict[Key, _Snapshot] = {}
        """Edits of these count at the next boundary."""
        self._left: list[_Snapshot] = []
        """Of before a boundary, and still held."""
        self._reserved: dict[int, int] = {}
        """Bytes by unit that is used in memory of its own, see `active_units`."""
        stored = (sum(sizes) for (kind, _), sizes in runner.plan.file.items() if kind == "gradient")
        self._some_rest = sum(stored) > limit_bytes
        resting = weakref.WeakValueDictionary[Key, RestingGradient]()
        self._resting: MutableMapping[Key, RestingGradient] = resting if self._some_rest else {}
        """What is shown of gradients where not all have room."""

    def __contains__(self, unit: object) -> bool:
        some = bool(self._open or self._resting)
        return some and any(key.unit == unit for key in (*self._open, *self._resting))

    @property
    def bytes(self) -> int:
        """Bytes of all that is held or counts."""
        self._left = [one for one in self._left if one.held]
        all_of_them = (*self._open.values(), *self._left)
        copies = sum(one.memory.nbytes for one in all_of_them if not one.in_file)
        return copies + sum(self._reserved.values())

    def tensor(self, key: Key) -> torch.Tensor:
        """A snapshot of a value, with the edits made since the last boundary."""
        if key.kind == "gradient" and self._some_rest and self._bytes_of(key) <= self._limit_bytes:
            if (found := self._resting.get(key)) is None:
                with torch.inference_mode(False):
                    like = self._runner.device.empty((), self._dtype_of(key)).fill_(torch.nan)
                    found = like.expand(self._parameter(key).shape).as_subclass(RestingGradient)
                self._resting[key], found._offload_lend = found, partial(self.enter, key)
            return found
        one = self._opened(key)
        one.edited = None
        return one.tensor()

    def lend(self, key: Key) -> _Snapshot:
        """A snapshot of a gradient at rest; those of other units that nobody holds go."""
        if not any(one.unit == key.unit for one in self._open):
            self._let_go_idle()
        return self._opened(key)

    def _give_values(self, key: Key) -> None:
        """Let a gradient at rest that is still held keep what it shows."""
        if (one := self._resting.pop(key, None)) is not None:
            found = self._opened(key)
            one._offload_kept, one._offload_lend = found.tensor(), lambda: found

    def _opened(self, key: Key) -> _Snapshot:
        if key not in self._open:
            made = self._take(key, "touching")
            self.read(key, made.memory)
            self._open[key] = made
        return self._open[key]

    def put(self, key: Key, value: torch.Tensor) -> None:
        """Let a value be another one from the next boundary on; a touch shows it at once."""
        if self._resting.get(key) is value:
            return  # As `p.grad *= 2` ends.
        self.drop(key)
        made = self._take(key, "assigning to")
        made.edited = None
        self._runner.copy_now(made.memory, value)
        self._open[key] = made

    def read(self, key: Key, out: torch.Tensor | None = None) -> torch.Tensor:
        """A value as it is at home, after any update that is due; in `out`, or in memory of its own
        on the compute device that counts against nothing."""
        self._runner.quiesce(key.kind, key.unit, to_write=False)
        out = self._empty(key) if out is None else out
        for value, at, part in self._parts(key, out):
            self._runner.copy_now(part, self._chunks.read(value)[at : at + part.numel()])
        self._runner.drain()  # Before other streams look at it, or a lane writes home.
        return out

    def take_copy(self, key: Key) -> torch.Tensor:
        """A copy in CPU memory of a value, of which torch itself has just taken a snapshot."""
        one = self._opened(key)
        copy = one.memory.to("cpu", copy=True)
        if version(one.tensor()) == 0:  # What torch has of it is dropped, and nobody else has any.
            one.edited = False
        self.boundary(key.unit)
        return copy

    def drop(self, key: Key) -> None:
        """The value is another: edits of its snapshot no longer count."""
        self._give_values(key)
        if (one := self._open.pop(key, None)) is not None and one.held:
            self._left.append(one)

    def boundary(self, unit: int | None = None) -> None:
        """Write edits back and forget the snapshots, of all units or of one."""
        for key in [key for key in self._resting if unit is None or key.unit == unit]:
            self._give_values(key)
        keys = [key for key in self._open if unit is None or key.unit == unit]
        if keys:
            self._write_back(keys)
            for key in keys:
                self.drop(key)
        if unit is None:
            self._chunks.forget()

    # -- memory ----------------------------------------------------------------------------------

    def reserve(self, unit: int, size: int, name: str) -> None:
        """Take `size` bytes for a unit whose slot is in use, until `unreserve`."""
        self._make_room(size, f"using {name} beside a unit that has its slot")
        self._reserved[unit] = size

    def unreserve(self, unit: int) -> None:
        """Give back what was taken for a unit, if anything was."""
        self._reserved.pop(unit, None)

    def _has_room(self, size: int) -> bool:
        """Whether so much may be taken; copies that nobody holds go, where that is needed."""
        if self.bytes + size > self._limit_bytes:
            self._let_go_idle()
        return self.bytes + size <= self._limit_bytes

    def _let_go_idle(self) -> None:
        idle = [key for key, one in self._open.items() if not one.held]
        self._write_back(idle)
        for key in idle:
            del self._open[key]

    def _take(self, key: Key, what: str) -> _Snapshot:
        """Memory for a snapshot: of a file, where there is no room for a gradient on nvme."""
        name, size, store = self._parameter(key).name, self._bytes_of(key), self._runner.store
        if key.kind == "weight" or store is None or self._has_room(size):
            self._make_room(size, f"{what} {name}")
            return _Snapshot(self._empty(key))
        try:
            return _Snapshot(
                self._empty(key, os.path.dirname(store.volume.files[0].path)), in_file=True
            )
        except OSError as error:
            raise MemoryError(
                f"p.grad of {name} was asked for, and beyond exposed_memory gradients on nvme are "
                f"shown in a file: {error}. Free some space, or clip with Config(max_grad_norm=...)"
            ) from error

    def _empty(self, key: Key, directory: str | None = None) -> torch.Tensor:
        shape, size, device = self._parameter(key).shape, self._bytes_of(key), self._runner.device
        with torch.inference_mode(False):
            if directory or (device.is_host and size >> 20):  # MiBs that are freed malloc may keep.
                return mapped(size, directory).view(self._dtype_of(key)).view(shape)
            return device.empty(shape, self._dtype_of(key))

    def _make_room(self, size: int, what: str) -> None:
        """Refuse a copy for which the snapshots that are still held leave no room."""
        if not self._has_room(size):
            held = f"copies of {format_bytes(self.bytes)} are still held and " * bool(self.bytes)
            raise MemoryError(
                f"{what} takes a copy of {format_bytes(size)}, but {held}exposed_memory is "
                f"{format_bytes(self._limit_bytes)}. Raise Config.exposed_memory, let go of "
                "earlier copies, or go through optimizer.engine.stream_weights(), which keeps none"
            )

    # -- edits -----------------------------------------------------------------------------------

    def _write_back(self, keys: Iterable[Key]) -> None:
        edited: dict[Value, list[tuple[int, torch.Tensor]]] = {}
        for key in sorted(keys):
            one = self._open[key]
            parts, changed = list(self._parts(key, one.memory)), one.edited
            if changed is None:
                self._runner.quiesce(key.kind, key.unit, to_write=False)  # One that was assigned.
                with self._runner.waited(Lane.COMPUTE):
                    changed = not all(self._is_at_home(*part) for part in parts)
            for value, at, part in parts if changed else ():
                edited.setdefault(value, []).append((at, part))
        if not edited:
            return
        with self._runner.once():  # A home that is half written ends the engine.
            for kind, unit in {(value.kind, value.unit) for value in edited}:
                if kind == "weight":
                    self._forget_slot(unit)
                self._runner.quiesce(kind, unit)
            for value, changes in edited.items():
                profile, is_gradient = self._runner.plan.profile, value.kind == "gradient"
                if is_gradient and len(changes) == len(profile.by_chunk(value.unit)[value.chunk]):
                    home = host_tensor(self._runner.memory.extent(value)[1])  # All that it has.
                else:
                    home = self._chunks.read(value)
                for at, part in changes:
                    self._runner.copy_now(home[at : at + part.numel()], part)
                self._chunks.write(value, home)

    def _parts(self, key: Key, all_: torch.Tensor) -> Iterable[tuple[Value, int, torch.Tensor]]:
        """The chunks of a value: each with an offset in it, and the bytes of `all_` there."""
        flat, item = all_.view(-1).view(torch.uint8), all_.itemsize
        for one in self._runner.plan.profile.locate(self._parameter(key).name):
            part = flat[one.parameter_start * item :][: one.elements * item]
            yield Value(key.kind, key.unit, one.chunk), one.chunk_start * item, part

    def _is_at_home(self, value: Value, at: int, part: torch.Tensor) -> bool:
        if self._chunks.written(value) is None:
            return False
        home = self._chunks.read(value)[at : at + part.numel()]
        return torch.equal(part, home.to(part.device))

    # -- one value -------------------------------------------------------------------------------

    def _parameter(self, key: Key) -> Parameter:
        return self._units[key.unit].parameters[key.parameter]

    def _dtype_of(self, key: Key) -> torch.dtype:
        one, unit = self._parameter(key), self._units[key.unit]
        name = one.dtype if key.kind == "weight" else unit.gradient_dtype(key.parameter)
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    def _bytes_of(self, key: Key) -> int:
        return self._parameter(key).elements * self._dtype_of(key).itemsize
