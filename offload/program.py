"""The step as plain data: phases of ops. Pure.

[Note: Phases]
A phase is the ops of one stretch of training: `forward` (with or without gradients), `backward` of
the first micro-batch and of a next one, `norm`, and `update`. Ops are listed in the order in which
they are issued. An op may start when the ops it waits for are done; a lane runs those of its ops
that may start, earliest deadline first. So nothing rests on the order of a lane, every order
between two ops that touch the same place is a wait, and `verify` needs to look at waits alone.

Waits inside a phase are compiled. Between phases the same rule applies to the places: the first
op of a phase that touches a place waits for what the phases before did there. `Scoreboard` is that
rule, used by `phases`, by `simulate` and by the engine.

[Note: Chunks]
On their way through a tier, values lie in *staging rings*, a few slots each that many values share.
The ops of one chunk of `norm` or `update` stand together and use one slot of each ring that they
pass through; the way of the chunk through them is its *passage*. Which slot is known when the
passage starts: until then its index is `IN_RING`, and the slots of two chunks are two places. See
[Note: Passages] of `schedule`.

[Note: Slots between phases]
Forward ends with the last units still in their slots; backward starts with those and does not
fetch them again. `Phase.entry` and `Phase.exit` declare what the weight slots hold; a phase may
follow another when what it wants at entry is there. Only backward wants anything; `norm` and
`update` are the halves of a step, and stand together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import NamedTuple

from offload.layout import Place, Plan
from offload.records import Kind


class Lane(str, Enum):
    """A resource that works beside the others."""

    COMPUTE = "compute"
    """The user's forward and backward, and updates of states that live on the device."""
    H2D = "h2d"
    """Copies to the device, under the compute of earlier units."""
    D2H = "d2h"
    """Copies from the device, under the backward of later units."""
    CPU = "cpu"
    """Adding gradients and updating on the CPU, under backward and the next forward."""
    DISK = "disk"
    """File reads and writes, under everything else."""
    COMM = "comm"
    """Collectives between ranks; no op uses it on a single rank."""

    __hash__ = str.__hash__  # Enum's own is a function of Python, called for every op.


class Verb(str, Enum):
    """What an op does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    MOVE = "move"
    """Copy a value from one tier to the next."""
    ADD = "add"
    """Add the gradient of a micro-batch to the gradient kept."""
    SQUARE = "square"
    """The sum of squares of one chunk of the gradient."""
    NORM = "norm"
    """The clip factor from all sums of squares."""
    UPDATE = "update"
    """The optimizer's step on one chunk."""


OF_USER = (Verb.FORWARD, Verb.BACKWARD)
"""What the user's own modules and autograd do."""

WHOLE = -1
"""The chunk of a value that stands for all of it."""

EVERY = -1
"""The unit of a value that is made of all units."""

IN_RING = -1
"""Index of a staging slot that a chunk has yet to get, see [Note: Chunks]."""


class Value(NamedTuple):
    """A value, or one chunk of it."""

    kind: Kind
    unit: int
    chunk: int = WHOLE


class Use(NamedTuple):
    """A place and the value that an op reads from it or writes to it."""

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
    """What the lane counts: bytes moved, or operands read and written on cpu and compute."""
    deadline: int
    """Position, in its pass, of the compute op that needs it; smaller is more urgent."""
    waits: tuple[int, ...] = ()
    """Indices in the phase of the ops that must be done before it starts."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The ops of one stretch of training, in order of issue."""

    name: str
    ops: tuple[Op, ...]
    entry: Mapping[Place, int]
    """Unit that each weight slot must hold when the phase begins; slots not named may hold
    anything."""
    exit: Mapping[Place, int]
    """Unit that each weight slot holds when the phase has ended."""


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
    """The smallest things that two uses can share: a slot, or one chunk of a value at home."""
    for use in uses:
        place, value = use
        if place.number == IN_RING:
            yield use
        elif place.use != "home":
            yield place
        elif value.chunk != WHOLE:
            yield value
        else:
            yield value
            for chunk in range(len(plan.profile.units[value.unit].chunks)):
                yield Value(value.kind, value.unit, chunk)


FACTOR = Use(Place("cpu", "factor"), Value("gradient", EVERY))
"""The clip factor, made of all gradients: written by `norm`, read by every update."""


def staged(ops: Iterable[Op]) -> bool:
    """Whether the ops of a chunk pass through staging slots."""
    return any(use.place.number == IN_RING for op in ops for use in (*op.reads, *op.writes))


def by_chunk(ops: Iterable[Op]) -> Iterator[list[Op]]:
    """The ops of a phase in their order: those of a chunk together, any other alone."""
    for (_, chunk), group in groupby(ops, lambda op: (op.value.unit, op.value.chunk)):
        if chunk == WHOLE:
            yield from ([op] for op in group)
        else:
            yield list(group)
