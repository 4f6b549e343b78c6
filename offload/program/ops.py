"""The step as plain data: phases of ops. Pure.

[Note: Phases]
A phase is the ops of `forward`, of the `backward` of a first or later micro-batch, of `norm`, or of
`update`, in order of issue. A lane runs the most urgent of its ops that may start, so its order
guarantees nothing. The order of issue does: an op waits for what was issued before it and touches a
place that it touches, in its phase or an earlier one, unless both only read. `Scoreboard` is that
rule for the simulator and the reference; the native lanes have it in `runtime/src/board.h`.

[Note: Streams]
A unit is updated by one op, and so are its squares summed. What of it lives where the op cannot
work comes through staging slots of the op's own lane, chunk by chunk: read, updated, written back,
several at once. So a drive is busy while the CPU computes, and the program need not say how: the
op touches homes only. `parts_of` says what it moves.

[Note: Slots between phases]
Forward leaves the last units in their slots, and backward does not fetch those again. `Phase.entry`
and `Phase.exit` declare what the weight slots hold. A phase may follow another if it finds at entry
what it was compiled for. `norm` precedes only `update`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from offload.planning.layout import Place, Plan
from offload.planning.profile import Kind
from offload.planning.tiers import Tier


class Lane(str, Enum):
    """A resource that works concurrently with the others."""

    COMPUTE = "compute"
    """The user's forward and backward, and updates of states that live on the device."""
    H2D = "h2d"
    """Copies to the device; overlap the compute of earlier units."""
    D2H = "d2h"
    """Copies from the device; overlap the backward of the units that follow."""
    CPU = "cpu"
    """Sums and updates on the CPU; overlap backward and the next forward."""
    DISK = "disk"
    """File reads and writes; overlap everything else."""
    COMM = "comm"
    """Collectives, which the user's thread launches; overlap the compute of other units."""

    __hash__ = str.__hash__  # Called for every op, and Enum's own is slow Python.


class Verb(str, Enum):
    """What an op does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    COLLECT = "collect"
    """The user's backward puts the gradient of a unit where it is collected."""
    GATHER = "gather"
    """The weights of a unit from all ranks."""
    EXCHANGE = "exchange"
    """Send each rank the part of a unit's gradient that it owns."""
    FOLD = "fold"
    """Sum the parts that came, in the order of ranks."""
    MOVE = "move"
    """Copy a value from one tier to the next."""
    ADD = "add"
    """Add the gradient of a micro-batch to the accumulated one."""
    SQUARE = "square"
    """The sums of squares of a unit's gradient."""
    NORM = "norm"
    """The clip factor from all sums of squares."""
    UPDATE = "update"
    """The optimizer's step on a unit."""


OF_USER = (Verb.FORWARD, Verb.BACKWARD, Verb.COLLECT, Verb.GATHER, Verb.EXCHANGE, Verb.FOLD)
"""Compute of the user's own modules and autograd, and what the same thread does between them."""

ALL_CHUNKS = -1
"""In place of a chunk: the value is that of the unit."""

ALL_UNITS = -1
"""In place of a unit: the value is computed from all units."""


class Value(NamedTuple):
    """A value, or one chunk of it."""

    kind: Kind
    unit: int
    chunk: int = ALL_CHUNKS


class Use(NamedTuple):
    """A place, and the value that an op reads or writes there."""

    place: Place
    value: Value


@dataclass(frozen=True, slots=True)
class Op:
    """One piece of work on a lane."""

    lane: Lane
    verb: Verb
    value: Value
    reads: tuple[Use, ...]
    writes: tuple[Use, ...]
    bytes: int
    """The work for the lane: bytes moved; on cpu and compute, bytes of operands."""
    deadline: int
    """Position in the pass of the compute op that needs the result; smaller is more urgent."""


LANE_OF_MOVE: dict[tuple[Tier, Tier], Lane] = {
    ("nvme", "cpu"): Lane.DISK,
    ("cpu", "nvme"): Lane.DISK,
    ("cpu", "device"): Lane.H2D,
    ("device", "cpu"): Lane.D2H,
}


@dataclass(frozen=True, slots=True)
class Phase:
    """Ops in order of issue, see [Note: Phases]."""

    name: str
    ops: tuple[Op, ...]
    entry: Mapping[Place, int]
    """The unit that each weight slot holds at the start; other slots may hold anything."""
    exit: Mapping[Place, int]
    """The unit that each weight slot holds at the end."""


@dataclass(frozen=True, slots=True)
class Program:
    """The phases of a model under a plan."""

    plan: Plan
    phases: Mapping[str, Phase]
    """`forward`, `backward_first`, `backward_next`, `norm` (empty without clipping), `update`."""


def cells(uses: Iterable[Use]) -> Iterator[object]:
    """What two uses can have in common: a slot, or a value at home."""
    for place, value in uses:
        yield value if place.use == "home" else place


FACTOR = Use(Place("cpu", "factor"), Value("gradient", ALL_UNITS))
"""The clip factor of all gradients: written by `norm`, read by every update."""


def part_of(op: Op, size: int, way: tuple[Tier, Tier] | None) -> Op:
    """What of an op moves so many bytes from one tier to the next, or works on them (None)."""
    if way is None:
        return replace(op, bytes=size)
    source, into = (Use(Place(tier, "home"), op.value) for tier in way)
    lane = LANE_OF_MOVE[way]
    return replace(op, lane=lane, verb=Verb.MOVE, reads=(source,), writes=(into,), bytes=size)
