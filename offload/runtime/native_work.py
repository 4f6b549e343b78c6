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
from cpu_adam.formats import StateFormat
from cpu_adam.native import GRADIENT_NUMBERS, factor_rows
from cpu_adam.spans import Steps
from offload.planning.layout import Plan
from offload.program.compile import chunk_range, chunks_of
from offload.program.ops import ALL_CHUNKS, IN_RING, Op, Use
from offload.runtime.store import Store

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
        self.clip: Callable[[float, int], Any] = native.Clip

    def where(self, use: Use) -> Where:
        """Where a use lies in a memory tier."""
        if use.place.number != IN_RING:
            return Where(self._at(use).data_ptr())
        slots = [use.place._replace(number=number) for number in (0, 1)]
        first, second = (self._at(Use(slot, use.value)).data_ptr() for slot in slots)
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
        assert self._store is not None
        writing = into.place.tier == "nvme"
        kind, unit, chunk = op.value
        name = self._plan.profile.units[unit].name
        numbers = self._store.numbers(kind, name, None if chunk == ALL_CHUNKS else chunk)
        chunks = self._store.chunks.native_chunks(numbers)
        at = self.where(source if writing else into)
        given = [
            (number, at.plus(start), size, check, parts)
            for number, start, size, check, parts in chunks
        ]
        moved, step = self._store.chunks.native_counts()
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

    def squares(self, op: Op, ordinal: int, taking: Iterable[int]) -> Work:
        """The sums of the squares of the parameters in `taking`, to the ordinals of the chunks."""
        unit, use, mine = self._plan.profile.units[op.value.unit], op.reads[0], set(taking)
        stretches: dict[str, list[tuple[int, Where, int]]] = {}
        for at, number in enumerate(chunks_of(self._plan, op.value)):
            chunk = unit.chunks[number]
            dtype = unit.segments[chunk.segment].gradient_dtype
            start = self.where(use).plus(chunk_range(self._plan, use.value, number).start)
            stretches.setdefault(dtype, []).extend(
                (ordinal + at, start.plus(span.chunk_start * _item(dtype)), span.elements)
                for span in chunk.slices
                if span.parameter in mine
            )
        works = []
        for dtype, given in stretches.items():
            kind = GRADIENT_NUMBERS[getattr(torch, dtype)]
            works.append(self._native.squares(self._kernel.index, kind, given))
        return self._native.several(works)

    def norm(self) -> Work:
        """The norm and the factor of the clipping, from all sums."""
        return self._native.combine()

    def update(
        self,
        op: Op,
        taking: Mapping[int, int],
        flat: Mapping[str, Mapping[int, torch.Tensor]] | None = None,
    ) -> Work:
        """The update of the parameters in `taking`, each by its row of factors.

        With `flat` weights and gradients lie there.
        """
        unit = self._plan.profile.units[op.value.unit]
        uses: dict[str, Use] = {use.value.kind: use for use in op.reads[:3]}
        places: dict[str, Where] = {
            kind: Where(0) if flat is not None and kind in flat else self.where(use)
            for kind, use in uses.items()
        }
        tables: dict[tuple[StateFormat, str], list[list[int]]] = {}
        for number in chunks_of(self._plan, op.value):
            chunk = unit.chunks[number]
            segment = unit.segments[chunk.segment]
            fmt = self._plan.states.format(segment.dtype)
            at = {
                kind: places[kind].base + chunk_range(self._plan, use.value, number).start
                for kind, use in uses.items()
            }
            rows = tables.setdefault((fmt, segment.gradient_dtype), [])
            for span in chunk.slices:
                if span.parameter not in taking:
                    continue
                row = [span.elements, taking[span.parameter], span.parameter_start]
                for kind, dtype in (
                    ("gradient", segment.gradient_dtype),
                    ("weight", segment.dtype),
                ):
                    if flat is None:
                        row.append(at[kind] + span.chunk_start * _item(dtype))
                    else:
                        mine = flat[kind][span.parameter]
                        row.append(mine.data_ptr() + span.parameter_start * _item(dtype))
                for slot, offset in zip(fmt.slots, fmt.slot_offsets(chunk.elements)):
                    first = span.chunk_start // slot.elements_per_item * slot.bytes_per_item
                    row.append(at["state"] + offset + first)
                rows.append(row)
        strides = [places["gradient"].stride, places["weight"].stride]
        works = [
            self._sweep(
                fmt.name, dtype, rows, [*strides, *[places["state"].stride] * len(fmt.slots)]
            )
            for (fmt, dtype), rows in tables.items()
        ]
        return self._native.several(works)

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
