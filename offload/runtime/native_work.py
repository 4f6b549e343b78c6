"""What lanes do without Python and the GIL, made from ops; see `works`, the reference.

[Note: Native work]
A lane of the compiled books runs a work by itself: a copy within CPU memory, the transfers of a
value on nvme with their checksums, the sum of two gradients, sums of squares and their norm, an
update. A work holds addresses, which stay as long as the arenas do. Each does what its namesake of
`PythonWorks` does, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cpu_adam.choice import kernel
from cpu_adam.native import GRADIENT_NUMBERS, factor_rows
from cpu_adam.spans import Steps
from offload.planning.layout import Place, Plan
from offload.planning.profile import KINDS, LEAF_ELEMENTS, Kind, Piece
from offload.program.ops import Op, Use, Value
from offload.runtime.store import Store
from offload.runtime.works import Flat, Taking

Work = Any
"""An object of C++."""


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
        self, native: Any, plan: Plan, at: Callable[[Use], torch.Tensor], store: Store | None
    ):
        """With the extension module and `Memory.at`, where the chosen kernel is compiled."""
        self._native = native
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
        """Where the bytes of a chunk are worked on: at home, from nvme in a staging slot."""
        value, home = Value(kind, unit, number), self._plan.home(kind, unit)
        if home.tier != "nvme":
            return self.where(Use(home, value))
        slots = [Use(Place("cpu", f"{kind}_chunk", slot), value) for slot in (0, 1)]
        first, second = (self._at(slot).data_ptr() for slot in slots)
        return Where(first, second - first)

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
            return self._native.copies([(self.where(into), self.where(source), op.bytes)])
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

    def _stream(self, op: Op, works: Mapping[int, Work], kinds: Iterable[Kind]) -> Work:
        """The works of the chunks of an op: those of its values that are on nvme come and go."""
        unit = op.value.unit
        away = [kind for kind in kinds if self._plan.home(kind, unit).tier == "nvme"]
        if not away:
            return self._native.several(list(works.values()))
        written = [use.value.kind for use in op.writes if use.place.use == "home"]
        back = [kind for kind in away if kind in written]
        elements = [chunk.elements for chunk in self._plan.profile.units[unit].chunks]
        links = []
        for number, work in works.items():
            values = {kind: (kind, unit, number, self._home(kind, unit, number)) for kind in away}
            reads = self._transfer(False, values.values())
            writes = self._transfer(True, [values[kind] for kind in back]) if back else None
            size = op.bytes * elements[number] // sum(elements)
            links.append((reads, work, writes, size))
        return self._native.stream(links)

    def norm(self) -> Work:
        """The norm and the factor of the clipping, from all sums."""
        return self._native.combine()

    def update(self, op: Op, taking: Taking, flat: Flat | None = None) -> Work:
        """The update of the parameters in `taking`; weights and gradients may be in `flat`."""
        unit, works = op.value.unit, dict[int, Work]()
        for number, pieces in self._plan.profile.by_chunk(unit, taking).items():
            works[number] = self._update(unit, number, pieces, taking, flat)
        return self._stream(op, works, KINDS if flat is None else ["state"])

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

    def settings(self, steps: Steps, clip: Any) -> Any:
        """What of a step its works are given, see `works`."""
        return self._native.settings(factor_rows(self._kernel, steps, 1.0), clip)

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
