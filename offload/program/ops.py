"""The step as plain data: phases of ops. Pure.

[Note: Phases]
A phase is the ops of `forward`, of the `backward` of a first or later micro-batch, of `norm`, or of
`update`, in order of issue. An op may start when the ops that it waits for are done. A lane runs
the most urgent of its ops that may start, so its order guarantees nothing: every order between two
ops that touch the same place is a wait, and `verify` needs to check only waits.

Waits inside a phase are compiled. Between phases the same rule holds: the first op of a phase that
touches a place waits for what earlier phases did there. `Scoreboard` is that rule, used by
`compile`, `simulate` and the engine.

[Note: Chunks]
Values on their way through a tier lie in *staging rings*: a few slots that many values share. The
ops of one chunk of `norm` or `update` are consecutive and use one slot of each ring; the chunk's
way through the rings is its *passage*. The slot is assigned when the passage starts. Until then its
number is `IN_RING`, and two chunks have different places. See [Note: Passages] of `schedule`.

[Note: Slots between phases]
Forward leaves the last units in their slots, and backward does not fetch those again. `Phase.entry`
and `Phase.exit` declare what the weight slots hold. A phase may follow another if it finds what it
requires at entry. Only backward requires anything, and `norm` precedes only `update`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import NamedTuple

from offload.planning.layout import Place, Plan
from offload.planning.profile import Kind


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
    """Collectives between ranks; unused on a single rank."""

    __hash__ = str.__hash__  # Called for every op, and Enum's own is slow Python.


class Verb(str, Enum):
    """What an op does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    MOVE = "move"
    """Copy a value from one tier to the next."""
    ADD = "add"
    """Add the gradient of a micro-batch to the accumulated one."""
    SQUARE = "square"
    """The sum of squares of one chunk of the gradient."""
    NORM = "norm"
    """The clip factor from all sums of squares."""
    UPDATE = "update"
    """The optimizer's step on one chunk."""


OF_USER = (Verb.FORWARD, Verb.BACKWARD)
"""Compute of the user's own modules and autograd."""

ALL_CHUNKS = -1
"""In place of a chunk: the value is that of the unit."""

ALL_UNITS = -1
"""In place of a unit: the value is computed from all units."""

IN_RING = -1
"""In place of a slot's number: it is not assigned yet, see [Note: Chunks]."""


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
    waits: tuple[int, ...] = ()
    """Indices in the phase of the ops that must be done before this one starts."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Ops in order of issue, see [Note: Phases]."""

    name: str
    ops: tuple[Op, ...]
    entry: Mapping[Place, int]
    """The unit that each weight slot must hold at the start; other slots may hold anything."""
    exit: Mapping[Place, int]
    """The unit that each weight slot holds at the end."""


@dataclass(frozen=True, slots=True)
class Program:
    """The phases of a model under a plan."""

    plan: Plan
    phases: Mapping[str, Phase]
    """`forward`, `backward_first`, `backward_next`, `norm` (empty without clipping), `update`."""

    @property
    def step(self) -> tuple[Phase, ...]:
        """One step with one micro-batch."""
        return tuple(self.phases[name] for name in ("forward", "backward_first", "norm", "update"))


def cells(plan: Plan, uses: Iterable[Use]) -> Iterator[object]:
    """What two uses can have in common: a slot, or a chunk of a value at home."""
    for use in uses:
        place, value = use
        if place.number == IN_RING:
            yield use
        elif place.use != "home":
            yield place
        elif value.chunk != ALL_CHUNKS:
            yield value
        else:
            yield value
            for chunk in range(len(plan.profile.units[value.unit].chunks)):
                yield Value(value.kind, value.unit, chunk)


FACTOR = Use(Place("cpu", "factor"), Value("gradient", ALL_UNITS))
"""The clip factor of all gradients: written by `norm`, read by every update."""


def staged(ops: Iterable[Op]) -> bool:
    """Whether the ops of a chunk use staging slots."""
    return any(use.place.number == IN_RING for op in ops for use in (*op.reads, *op.writes))


def by_chunk(ops: Iterable[Op]) -> Iterator[list[Op]]:
    """The ops of a phase in order, grouped: those of a chunk together, any other by itself."""
    for (_, chunk), group in groupby(ops, lambda op: (op.value.unit, op.value.chunk)):
        if chunk == ALL_CHUNKS:
            yield from ([op] for op in group)
        else:
            yield list(group)
