"""What a model needs: its units, the layout of each in memory, and the order of their use. Pure.

A unit is the parameters that move together. Its weights are one flat buffer of segments: one per
dtype and trainability, each starting at a multiple of 4 KiB. Inside a segment parameters follow one
another, each starting at a multiple of 1024 elements: a leaf of the norm, and whole groups of
compact states, so no result depends on where a cut at such a multiple falls. Gradients are a second
buffer, with the same element numbering, of the trainable segments only. States are kept per chunk:
at most `Unit.chunk_elements` consecutive elements of one trainable segment.

[Note: Shards]
Over several ranks a unit has two layouts. The *full* one is that of its slots on the device, with
every parameter in its shape. Each of its segments is cut into as many equal ranges as there are
ranks, and those at a rank's position are its *shard*, a unit of flat parameters: that is what has
homes, chunks and records. The position is the rank itself, but for [Note: Two levels] of
`parallel`. Cuts fall at leaves of the norm, so no result depends on them. With one rank both are
the same object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

from cpu_adam.formats import SUM_BLOCK_ELEMENTS, StateFormat, format_for, scratch_bytes

BLOCK_BYTES = 4096
"""Offsets and sizes on disk are multiples of this, as O_DIRECT requires."""

Kind = Literal["weight", "gradient", "state"]
"""A kind of value."""

KINDS: tuple[Kind, ...] = ("weight", "gradient", "state")
"""All kinds, those first that gain most from a fast home."""

CHUNK_ELEMENTS = 1 << 20
"""Elements in a full chunk, the grain in which values are stored and updates stream, where a drive
takes part or the host computes."""

CHUNK_STAGES = 4
"""Slots of each staging ring for chunks, at least: so many are between their first read and last
write."""

FUSED_BYTES_MAX = 2 << 20
"""Weights of neighbours that are fused to one unit: above it nothing is gained, and from twice as
much on copies and updates hide less well under compute."""

FUSED_PARTS_MIN = 4
"""A list stays at least so many units: one is in use while others come and go."""

LEAF_ELEMENTS = SUM_BLOCK_ELEMENTS
"""Of the norm's tree. Each parameter starts at a multiple of this in its segment, and each cut of
one falls there."""

PART_LEAVES = 1 << 36
"""So far apart are the leaves of two parts of a tensor: they are those of different parameters."""

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes per element of the parameter dtypes that a unit may hold."""


def round_up(count: int, multiple: int) -> int:
    """The least such multiple that is at least `count`."""
    return -(-count // multiple) * multiple


class TensorPart(NamedTuple):
    """What a parameter is of a tensor that lies on several ranks (a DTensor)."""

    number: int
    """Of the parts of that tensor; 0 where each rank has all of it."""
    shape: tuple[int, ...]
    """Of the tensor."""
    start: tuple[int, ...]
    """Where in the tensor it begins."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a unit."""

    name: str
    """Qualified name in the model; the first of several for a tied parameter."""
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    part: TensorPart | None = None
    """None of a tensor that is here as a whole."""
    segment: int = 0
    """Index of its segment in the unit; this and `start` are given by `lay_out_unit`."""
    start: int = 0
    """Its first element in the segment's numbering."""
    first: int = 0
    """In a shard: which element of the full parameter is the first here."""

    @property
    def elements(self) -> int:
        """Those that are here."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Segment:
    """The parameters of a unit with one dtype and trainability."""

    dtype: str
    trainable: bool
    elements: int
    """Elements including padding to blocks, of the weight and of the gradient."""
    gradient_dtype: str
    weight_offset: int = 0
    """Bytes from the start of the unit's weight buffer."""
    gradient_offset: int = 0
    """Bytes from the start of the unit's gradient buffer; unused when not trainable."""

    @property
    def weight_bytes(self) -> int:
        """Size in the weight buffer."""
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def gradient_bytes(self) -> int:
        """Size in the gradient buffer."""
        return self.elements * ITEM_BYTES[self.gradient_dtype] if self.trainable else 0


class Piece(NamedTuple):
    """Consecutive elements of one parameter in one chunk."""

    unit: int
    chunk: int
    """Which of the unit's chunks: `Unit.chunks`, then those of frozen segments."""
    parameter: int
    """Index of the parameter in the unit."""
    chunk_start: int
    """First element in the chunk's numbering."""
    parameter_start: int
    """First element in the numbering of the parameter, as far as it is here."""
    elements: int

    @property
    def parameter_stop(self) -> int:
        """One past its last element in the parameter's numbering."""
        return self.parameter_start + self.elements

    def parts(self, most: int) -> Iterator[Piece]:
        """It in parts of so many elements at most."""
        for at in range(0, self.elements, most):
            in_chunk, in_parameter = self.chunk_start + at, self.parameter_start + at
            elements = min(most, self.elements - at)
            yield self._replace(
                chunk_start=in_chunk, parameter_start=in_parameter, elements=elements
            )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive elements of one trainable segment, whose states form one record."""

    segment: int
    start: int
    """First element in the segment's numbering."""
    elements: int
    gradient_offset: int
    gradient_bytes: int


@dataclass(frozen=True)
class Unit:
    """Parameters that move together, laid out. Made by `lay_out_unit`."""

    name: str
    parameters: tuple[Parameter, ...]
    segments: tuple[Segment, ...]
    lasting: bool = False
    """Stays in its slot, which is its own, until the pass ends: it is tied, or encloses others."""
    backward: bool = True
    """Backward needs its weights (an embedding's does not)."""
    chunk_elements: int = CHUNK_ELEMENTS
    """Elements in a full chunk, a multiple of a leaf of the norm."""

    @cached_property
    def weight_bytes(self) -> int:
        """Size of the flat weight buffer, a multiple of 4 KiB."""
        return sum(one.weight_bytes for one in self.segments)

    @cached_property
    def gradient_bytes(self) -> int:
        """Size of the flat gradient buffer, a multiple of 4 KiB; 0 when nothing is trainable."""
        return sum(one.gradient_bytes for one in self.segments)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The grain of gradients and states."""
        return tuple(
            Chunk(
                segment=at,
                start=start,
                elements=count,
                gradient_offset=one.gradient_offset + start * ITEM_BYTES[one.gradient_dtype],
                gradient_bytes=count * ITEM_BYTES[one.gradient_dtype],
            )
            for at, one in enumerate(self.segments)
            for start, count in _cuts(0, one.elements, self.chunk_elements)
            if one.trainable
        )

    @cached_property
    def weight_chunks(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of the chunks in which weights are stored: `chunks`, then frozen ones."""
        return tuple(
            (one.weight_offset + start * item, count * item)
            for one, item in ((one, ITEM_BYTES[one.dtype]) for one in self.segments)
            for start, count in _cuts(0, one.elements, self.chunk_elements)
        )

    @property
    def trainable(self) -> bool:
        """Whether any parameter receives a gradient."""
        return self.gradient_bytes > 0

    def weight_offset(self, parameter: int) -> int:
        """Bytes from the start of the weight buffer to a parameter."""
        one = self.parameters[parameter]
        return self.segments[one.segment].weight_offset + one.start * ITEM_BYTES[one.dtype]

    def gradient_offset(self, parameter: int) -> int:
        """Bytes from the start of the gradient buffer to a parameter."""
        one = self.parameters[parameter]
        segment = self.segments[one.segment]
        return segment.gradient_offset + one.start * ITEM_BYTES[segment.gradient_dtype]

    def gradient_dtype(self, parameter: int) -> str:
        """The dtype in which gradients of a parameter are accumulated."""
        return self.segments[self.parameters[parameter].segment].gradient_dtype


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model is cut over ranks, see [Note: Shards]."""

    position: int = 0
    """Which of the equal ranges this rank has."""
    ranks: int = 1
    keeps: bool = False
    """Whether gathered weights stay on the device until they are updated (ZeRO-2); else until
    others need their slot (ZeRO-3)."""
    late: bool = False
    """Whether gradients stay on the device of the rank that made them until the last backward of a
    step (ZeRO-1); else they are summed over ranks in each."""
    column: int = 0
    """The ranks of a column, whose parts of a unit stay on the device from their first gathering
    until a weight changes, see [Note: Two levels] of `parallel`; 0 where they do not."""


ALONE = Sharding()
"""One rank has all."""


@dataclass(frozen=True)
class Profile:
    """The units of a model, as far as this rank has them, and the order of their use.

    `forward` and `backward` are indices into `units`, one entry per use.
    """

    units: tuple[Unit, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    chunk_stages: int
    """Slots of each staging ring for chunks."""
    full: tuple[Unit, ...] = field(repr=False)
    """The units as they are used, of which `units` are shards."""
    sharding: Sharding

    @property
    def names(self) -> list[str]:
        """Those of the units."""
        return [unit.name for unit in self.units]

    @cached_property
    def _places(self) -> dict[str, tuple[int, int, int]]:
        """By name: unit, index and first leaf in the norm of a parameter."""
        found, leaf, units = dict[str, tuple[int, int, int]](), 0, enumerate(self.units)
        named = ((p.name, u, i) for u, one in units for i, p in enumerate(one.parameters))
        for name, unit, parameter in sorted(named):
            spec = self.full[unit].parameters[parameter]
            number = 0 if spec.part is None else spec.part.number
            found[name] = unit, parameter, leaf + number * PART_LEAVES
            leaf += -(-spec.elements // LEAF_ELEMENTS)
        return found

    def leaf(self, unit: int, parameter: int, element: int) -> int:
        """The number, in the norm, of the leaf that starts with an element of a full parameter.
        Leaves are counted by name: an order that no placement, and no cut into units, changes."""
        name = self.units[unit].parameters[parameter].name
        return self._places[name][2] + element // LEAF_ELEMENTS

    def locate(self, name: str) -> Iterator[Piece]:
        """Where what is here of a parameter lies: its pieces in order. A piece is of every kind of
        value: it starts so many elements into the chunk of the weight, the gradient and the record.
        """
        unit, parameter, _ = self._places[name]
        segments, one = self.units[unit].segments, self.units[unit].parameters[parameter]
        full = self.units[unit].chunk_elements
        before = sum(-(-s.elements // full) for s in segments[: one.segment])
        for at, count in _cuts(one.start, one.start + one.elements, full):
            chunk, start = divmod(at, full)
            yield Piece(unit, before + chunk, parameter, start, at - one.start, count)

    def name_of(self, piece: Piece) -> str:
        """The name of the parameter that a piece is of."""
        return self.units[piece.unit].parameters[piece.parameter].name

    def element(self, piece: Piece) -> int:
        """Which element of its full parameter is the first of a piece."""
        return self.units[piece.unit].parameters[piece.parameter].first + piece.parameter_start

    def own_weights(self, unit: int) -> Iterator[slice]:
        """Where in the weights of a full unit the chunks of this rank are, in bytes."""
        for full, shard in zip(self.full[unit].segments, self.units[unit].segments):
            first, item = self.sharding.position * shard.elements, ITEM_BYTES[shard.dtype]
            for at, count in _cuts(0, shard.elements, self.units[unit].chunk_elements):
                start = full.weight_offset + (first + at) * item
                yield slice(start, start + count * item)

    def by_chunk(
        self, unit: int, parameters: Container[int] | None = None
    ) -> dict[int, list[Piece]]:
        """The pieces of all parameters of a unit, or of some, by chunk and in order."""
        found: dict[int, list[Piece]] = {}
        for at, one in enumerate(self.units[unit].parameters):
            if parameters is None or at in parameters:
                for piece in self.locate(one.name):
                    found.setdefault(piece.chunk, []).append(piece)
        return found

    def fusions(self, lists: Sequence[str]) -> Iterator[list[list[int]]]:
        """Ways to fuse small neighbours: indices of units in order, the coarsest first.

        Neighbours are fused if they are of one list, as `lists` names it by unit (empty: none),
        alike in being trained and in what backward needs of them, and not lasting; and as long as
        their weights are at most `FUSED_BYTES_MAX`, and such a part of the list that
        `FUSED_PARTS_MIN` units are left. The next way has half of that, as long as any are fused.
        """
        total = Counter[str]()
        for unit, name in zip(self.full, lists):
            total[name] += unit.weight_bytes
        most = {name: min(FUSED_BYTES_MAX, n // FUSED_PARTS_MIN) for name, n in total.items()}
        while any(most.values()):
            found, before, size = list[list[int]](), None, 0
            for index, (unit, name) in enumerate(zip(self.full, lists)):
                kind = (name, unit.backward, unit.trainable) if name and not unit.lasting else None
                size += unit.weight_bytes
                if kind is None or kind != before or size > most[name]:
                    found.append([])
                    size = unit.weight_bytes
                found[-1].append(index)
                before = kind
            if len(found) == len(self.units):
                return
            yield found
            most = {name: size // 2 for name, size in most.items()}


@dataclass(frozen=True, slots=True)
class StateChoice:
    """What decides the state format of a weight, besides its dtype."""

    rule: str = "adam"
    """The update rule, `cpu_adam.StateFormat.rule`."""
    states: str = "exact"
    """`Config.states`."""
    on_accelerator: bool = True
    """Torch updates the states that live on the device, and needs a workspace there."""

    def format(self, weight_dtype: str) -> StateFormat:
        """The state format of trainable weights of a dtype."""
        return format_for(weight_dtype, self.states, self.rule)

    def scratch_bytes(self, unit: Unit, chunk: Chunk) -> int:
        """Bytes of the workspace in which torch updates a chunk."""
        coded = self.format(unit.segments[chunk.segment].dtype).coded
        return scratch_bytes(chunk.elements, coded=coded)


def profile_of(
    units: Sequence[Unit],
    forward: Sequence[int] | None = None,
    *,
    chunk_stages: int = CHUNK_STAGES,
    sharding: Sharding = ALONE,
) -> Profile:
    """A profile; the default order is that of declaration, and that of backward the reverse. Over
    several ranks `units` are the full ones, laid out for as many."""
    ahead = tuple(forward) if forward is not None else tuple(range(len(units)))
    behind = tuple(dict.fromkeys(u for u in reversed(ahead) if units[u].backward))
    shards = units if sharding.ranks == 1 else [shard_of(unit, sharding) for unit in units]
    return Profile(tuple(shards), ahead, behind, chunk_stages, tuple(units), sharding)


def shard_of(unit: Unit, sharding: Sharding) -> Unit:
    """What a rank has of a unit, see [Note: Shards]."""
    cut = (replace(one, elements=one.elements // sharding.ranks) for one in unit.segments)
    parameters, segments = list[Parameter](), _in_a_row(cut)
    for whole in unit.parameters:
        elements = segments[whole.segment].elements
        begin = sharding.position * elements
        start, stop = (
            min(max(edge, begin), begin + elements)
            for edge in (whole.start, whole.start + whole.elements)
        )
        first, here = min(max(start - whole.start, 0), whole.elements), start - begin
        parameters.append(replace(whole, shape=(stop - start,), start=here, first=first))
    return replace(unit, parameters=tuple(parameters), segments=segments)


def lay_out_unit(
    name: str,
    wanted: Iterable[Parameter],
    *,
    gradient_dtype: str = "param",
    lasting: bool = False,
    backward: bool = True,
    chunk_elements: int = CHUNK_ELEMENTS,
    ranks: int = 1,
) -> Unit:
    """Lay out a unit: segments by (trainable first, dtype), parameters in the given order.

    `gradient_dtype` is that of `Config`; segments can be cut over so many `ranks`; for the other
    arguments see `Unit`. Raises ValueError for a dtype that a unit cannot hold.
    """
    groups: dict[tuple[bool, str], list[Parameter]] = {}
    for one in wanted:
        if one.dtype not in ITEM_BYTES:
            raise ValueError(
                f"parameter {one.name} is of dtype {one.dtype}: a unit holds "
                f"{', '.join(ITEM_BYTES)}; convert it (a complex one by torch.view_as_real, and "
                "torch.view_as_complex in the forward), or keep it as a buffer if not trained"
            )
        groups.setdefault((not one.trainable, one.dtype), []).append(one)
    parameters: list[Parameter] = []
    segments: list[Segment] = []
    for (frozen, dtype), members in sorted(groups.items()):
        kept = "float32" if gradient_dtype == "fp32" else dtype
        start = 0
        for one in members:
            parameters.append(replace(one, segment=len(segments), start=start))
            start += round_up(one.elements, LEAF_ELEMENTS)
        # Whole blocks of the narrower dtype are whole blocks of the wider one, too.
        block = max(LEAF_ELEMENTS, BLOCK_BYTES // min(ITEM_BYTES[dtype], ITEM_BYTES[kept]))
        segments.append(Segment(dtype, not frozen, round_up(start, ranks * block), kept))
    return Unit(name, tuple(parameters), _in_a_row(segments), lasting, backward, chunk_elements)


def _in_a_row(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Segments one after the other in the buffers of their unit."""
    found, weight, gradient = list[Segment](), 0, 0
    for one in segments:
        found.append(replace(one, weight_offset=weight, gradient_offset=gradient))
        weight += one.weight_bytes
        gradient += one.gradient_bytes
    return tuple(found)


def _cuts(start: int, stop: int, full: int) -> Iterator[tuple[int, int]]:
    """Elements of a segment cut where chunks of `full` end: (start, number) of each part."""
    while start < stop:
        elements = min(stop, (start // full + 1) * full) - start
        yield start, elements
        start += elements
