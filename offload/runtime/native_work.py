"""What lanes do without Python and the GIL, made from ops; see `works`, the reference.

[Note: Native work]
A lane of the compiled books runs a work by itself: a copy within CPU memory, the transfers of a
value on nvme with their checksums, the sum of two gradients, sums of squares and their norm, an
update. A work holds addresses, which stay as long as the arenas do. Each does what its namesake of
`PythonWorks` does, to the bit.

[Note: Who runs what]
Where a device computes, its driver copies for lanes, and what of an update lives in its memory goes
through staging slots: brought by the lane of such copies, updated, put back. Sums and updates of
what the device itself works on stay with Python, on the lane of compute, which takes its tasks from
the same books. It has the first staging slot, and the native lanes the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cpu_adam.choice import kernel
from cpu_adam.native import GRADIENT_NUMBERS, factor_rows
from cpu_adam.spans import Steps
from offload.planning.layout import Place, Plan
from offload.planning.profile import KINDS, LEAF_ELEMENTS, Kind, Piece
from offload.program.ops import Lane, Op, Use, Value
from offload.runtime.books import NUMBER, WAYS
from offload.runtime.store import Store
from offload.runtime.works import Clip, Flat, PythonWorks, Settings, Taking

Work = Any
"""An object of C++, or what Python is to do."""

_DOWN, _UP = WAYS.index(("device", "cpu")), WAYS.index(("cpu", "device"))
_READ, _WRITE = WAYS.index(("nvme", "cpu")), WAYS.index(("cpu", "nvme"))


class Where(NamedTuple):
    """An address; in a staging ring that of its first slot, and the way from a slot to the next."""

    base: int
    stride: int = 0

    def plus(self, offset: int) -> Where:
        """So many bytes further."""
        return Where(self.base + offset, self.stride)


class NativeWorks:
    """Makes the works of an engine's ops."""

    def __init__(
        self,
        native: Any,
        plan: Plan,
        at: Callable[[Use], torch.Tensor],
        store: Store | None,
        python: PythonWorks,
        device_is_host: bool,
    ):
        """With the extension module and `Memory.at`, where the chosen kernel is compiled.

        `python` makes what the lane of compute does.
        """
        self._native, self._python, self._device_is_host = native, python, device_is_host
        self._plan, self._at = plan, at
        self._kernel = chosen = kernel()
        assert chosen.native is not None
        native.share_pool(chosen.native.pool())
        self._operations = {name: at for at, name in enumerate(chosen.native.OPERATIONS)}
        self._store = store
        self.clip: Callable[[float], Any] = native.Clip

    def where(self, use: Use) -> Where:
        """Where a use lies in a memory tier."""
        return Where(self._at(use).data_ptr())

    def _home(self, kind: Kind, unit: int, number: int) -> Where:
        """Where the bytes of a chunk are worked on: at home, or from afar in a staging slot."""
        value, home = Value(kind, unit, number), self._plan.home(kind, unit)
        if not self._away(kind, unit):
            return self.where(Use(home, value))
        slots = [Use(Place("cpu", f"{kind}_chunk", slot), value) for slot in (0, 1)]
        first, second = (self._at(slot).data_ptr() for slot in slots)
        return Where(first, second - first)

    def _away(self, kind: Kind, unit: int) -> bool:
        """Whether the CPU cannot reach what lives at home."""
        tier = self._plan.home(kind, unit).tier
        return tier == "nvme" or (tier == "device" and not self._device_is_host)

    def explain(self, error: BaseException) -> BaseException:
        """What a failed work is to the user."""
        if self._store is None or not isinstance(error, self._native.ChunkFailed):
            return error
        return self._store.chunks.explain(error.args)

    def move(self, op: Op) -> Work:
        """A copy, or the transfer of a file."""
        (source,), (into,) = op.reads, op.writes
        if not op.bytes:
            return self._native.several([])
        if "nvme" not in (source.place.tier, into.place.tier):
            copy = self.where(into), self.where(source), op.bytes
            return self._native.copies([copy], not self._device_is_host)
        writing, (kind, unit, _) = into.place.tier == "nvme", op.value
        return self._transfer(
            writing, [(kind, unit, None, self.where(source if writing else into))]
        )

    def _transfer(
        self, writing: bool, values: Iterable[tuple[Kind, int, int | None, Where]]
    ) -> Work:
        """Reads or writes chunks of values, or all chunks of some, each from or to a place."""
        store, given = self._store, []
        assert store is not None
        for kind, unit, chunk, at in values:
            numbers = store.numbers(kind, self._plan.profile.units[unit].name, chunk)
            for number, start, size, check, parts in store.chunks.native_chunks(numbers):
                given.append((number, at.plus(start), size, check, parts))
        moved, step = store.chunks.native_counts()
        return self._native.chunks(writing, given, self._kernel.index, moved, step)

    def add(self, op: Op, arrived: Collection[int], kept: Collection[int]) -> Work:
        """Add the staged gradients to those kept; what is new is copied."""
        unit = self._plan.profile.units[op.value.unit]
        source, into = map(self.where, op.reads)
        rows: dict[str, list[Sequence[int]]] = {}
        new: list[tuple[Where, Where, int]] = []
        for parameter in sorted(arrived):
            dtype, offset = unit.gradient_dtype(parameter), unit.gradient_offset(parameter)
            elements = unit.parameters[parameter].elements
            if parameter in kept:
                addresses = source.base + offset, into.base + offset
                rows.setdefault(dtype, []).append((elements, 0, 0, *addresses))
            else:
                size = elements * getattr(torch, dtype).itemsize
                new.append((into.plus(offset), source.plus(offset), size))
        works = [self._native.copies(new)] if new else []
        for dtype, table in rows.items():
            works.append(self._sweep(f"accumulate_{dtype}", dtype, table, [0, 0]))
        return self._native.several(works)

    def squares(self, op: Op, taking: Collection[int]) -> Work:
        """The sums of the squares of the parameters in `taking`."""
        if self._is_python(op):
            return self._python.squares(op, taking)
        unit, works = op.value.unit, dict[int, Work]()
        for number, pieces in self._plan.profile.by_chunk(unit, taking).items():
            dtype = self._plan.profile.units[unit].gradient_dtype(pieces[0].parameter)
            at, kind = self._home("gradient", unit, number), GRADIENT_NUMBERS[getattr(torch, dtype)]
            if op.reads[0].place.use != "home":
                chunk = self._plan.profile.units[unit].chunks[number]
                at = self.where(op.reads[0]).plus(chunk.gradient_offset)
            given = [
                (
                    self._plan.profile.leaf(unit, span.parameter, span.parameter_start),
                    span.parameter_start // LEAF_ELEMENTS,
                    at.plus(span.chunk_start * _item(dtype)),
                    span.elements,
                )
                for span in pieces
            ]
            works[number] = self._native.squares(self._kernel.index, kind, given)
        return self._stream(op, works, ["gradient"] if op.reads[0].place.use == "home" else [])

    def _is_python(self, op: Op) -> bool:
        """See [Note: Who runs what]."""
        return op.lane is Lane.COMPUTE and not self._device_is_host

    def _stream(
        self, op: Op, works: Mapping[int, Work], kinds: Iterable[Kind], flat: Flat | None = None
    ) -> Work:
        """The works of the chunks of an op: those of its values that are away come and go."""
        unit = op.value.unit
        away = [kind for kind in kinds if self._away(kind, unit)]
        if not away:
            return self._native.several(list(works.values()))
        written = [use.value.kind for use in op.writes if use.place.use == "home"]
        back = [kind for kind in away if kind in written]
        elements = [chunk.elements for chunk in self._plan.profile.units[unit].chunks]
        lane, links = NUMBER[op.lane], []
        for number, work in works.items():
            size = op.bytes * elements[number] // sum(elements)
            links.append(
                [
                    *self._on_drive(_READ, away, unit, number),
                    *self._on_device(_DOWN, away, unit, number, flat or {}),
                    (lane, work, 0, size),
                    *self._on_device(_UP, back, unit, number, flat or {}),
                    *self._on_drive(_WRITE, back, unit, number),
                ]
            )
        return self._native.stream(links)

    def _on_drive(
        self, part: int, kinds: Sequence[Kind], unit: int, number: int
    ) -> Iterator[tuple[int, Work, int, int]]:
        """The stage of a chunk's stream in which those of its values that are on nvme move."""
        there = [kind for kind in kinds if self._plan.home(kind, unit).tier == "nvme"]
        values = [(kind, unit, number, self._home(kind, unit, number)) for kind in there]
        if values:
            size = sum(self._bytes(kind, unit, number) for kind in there)
            yield NUMBER[Lane.DISK], self._transfer(part == _WRITE, values), part, size

    def _on_device(
        self, part: int, kinds: Sequence[Kind], unit: int, number: int, flat: Flat
    ) -> Iterator[tuple[int, Work, int, int]]:
        """The stage of a chunk's stream in which those of its values that are there move."""
        pieces = [
            piece
            for kind in kinds
            if self._plan.home(kind, unit).tier == "device"
            for piece in self._pieces(kind, unit, number, flat)
        ]
        if pieces:
            copies = [
                (stage, lies, n) if part == _DOWN else (lies, stage, n) for stage, lies, n in pieces
            ]
            lane = Lane.D2H if part == _DOWN else Lane.H2D
            yield NUMBER[lane], self._native.copies(copies, True), part, sum(n for *_, n in pieces)

    def _bytes(self, kind: Kind, unit: int, number: int) -> int:
        """Bytes of a chunk that comes through a staging slot."""
        slot = Place("cpu", f"{kind}_chunk", 0)
        return int(self._at(Use(slot, Value(kind, unit, number))).nbytes)

    def _pieces(
        self, kind: Kind, unit: int, number: int, flat: Flat
    ) -> Iterator[tuple[Where, Where, int]]:
        """Of a chunk on the device: in the staging slot, where it lies there, and bytes."""
        stage, value = self._home(kind, unit, number), Value(kind, unit, number)
        if kind not in flat:
            lies = self._at(Use(self._plan.home(kind, unit), value))
            yield stage, Where(lies.data_ptr()), lies.nbytes
            return
        for piece in self._plan.profile.by_chunk(unit, flat[kind])[number]:
            lies = flat[kind][piece.parameter]
            at, there = piece.chunk_start * lies.itemsize, piece.parameter_start * lies.itemsize
            yield stage.plus(at), Where(lies.data_ptr() + there), piece.elements * lies.itemsize

    def norm(self) -> Work:
        """The norm and the factor of the clipping, from all sums."""
        return self._native.combine()

    def update(self, op: Op, taking: Taking, flat: Flat | None = None) -> Work:
        """The update of the parameters in `taking`; weights and gradients may be in `flat`."""
        if self._is_python(op):
            return self._python.update(op, taking, flat)
        here = flat if self._device_is_host else None
        unit, works = op.value.unit, dict[int, Work]()
        for number, pieces in self._plan.profile.by_chunk(unit, taking).items():
            works[number] = self._update(unit, number, pieces, taking, here)
        return self._stream(op, works, KINDS if here is None else ["state"], flat)

    def _update(
        self, unit: int, number: int, pieces: Sequence[Piece], taking: Taking, flat: Flat | None
    ) -> Work:
        """The update of a chunk."""
        chunk = self._plan.profile.units[unit].chunks[number]
        segment = self._plan.profile.units[unit].segments[chunk.segment]
        fmt = self._plan.states.format(segment.dtype)
        dtypes: dict[Kind, str] = {"gradient": segment.gradient_dtype, "weight": segment.dtype}
        at = {
            kind: Where(0) if flat is not None and kind in flat else self._home(kind, unit, number)
            for kind in KINDS
        }
        rows = []
        for span in pieces:
            row = [span.elements, taking[span.parameter], span.parameter_start]
            for kind, dtype in dtypes.items():
                base, first = at[kind].base, span.chunk_start
                if flat is not None:
                    base, first = flat[kind][span.parameter].data_ptr(), span.parameter_start
                row.append(base + first * _item(dtype))
            for slot, offset in zip(fmt.slots, fmt.slot_offsets(chunk.elements)):
                first = span.chunk_start // slot.elements_per_item * slot.bytes_per_item
                row.append(at["state"].base + offset + first)
            rows.append(row)
        strides = [at["gradient"].stride, at["weight"].stride]
        strides += [at["state"].stride] * len(fmt.slots)
        return self._sweep(fmt.name, segment.gradient_dtype, rows, strides)

    def settings(self, steps: Steps, clip: Clip | None) -> Any:
        """What of a step its works are given, see `works`."""
        rows = factor_rows(self._kernel, steps, 1.0)
        return self._native.settings(rows, clip, Settings(steps, clip))

    def _sweep(
        self, name: str, dtype: str, rows: Sequence[Sequence[int]], strides: Sequence[int]
    ) -> Work:
        number = GRADIENT_NUMBERS[getattr(torch, dtype)]
        table = np.array(rows, np.int64).reshape(len(rows), 3 + len(strides))
        operation = self._operations[name]
        return self._native.sweep(self._kernel.index, operation, number, table, list(strides))


def _item(dtype: str) -> int:
    """Bytes of an element."""
    return int(getattr(torch, dtype).itemsize)
