"""Small profiles, placements and programs for tests: by hand, and random ones for hypothesis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from hypothesis import strategies as st

from offload.planning.layout import Placement, Plan, lay_out
from offload.planning.machine import DriveSpeed, Machine
from offload.planning.profile import (
    CHUNK_ELEMENTS,
    Parameter,
    Profile,
    StateChoice,
    Unit,
    lay_out_unit,
    profile_of,
)
from offload.planning.tiers import TIERS, Tier
from offload.program.compile import compile_program
from offload.program.ops import Lane, Op, Phase, Program
from offload.program.simulate import Timeline
from offload.reporting import seconds

AMPLE: Mapping[Tier, int] = dict.fromkeys(TIERS, 1 << 50)
"""Budgets that never bind."""

SPEED = DriveSpeed(
    read_bytes_per_s=5.123e9,
    write_bytes_per_s=3e9,
    both_bytes_per_s=4e9,
    measured="2026-11-21T12:00:00",
)
"""What was measured of a drive."""

H100 = Machine(
    device_bytes=1 << 50,
    cpu_bytes=1 << 50,
    h2d_bytes_per_s=46e9,
    d2h_bytes_per_s=49e9,
    disk_read_bytes_per_s=6e9,
    disk_write_bytes_per_s=5e9,
    cpu_bytes_per_s=139e9,
    compute_bytes_per_s=1.5e12,
    op_seconds=3e-5,
)
"""As its lanes were measured (benchmarks/results), with a drive that such a machine may have."""


def unit(
    name: str,
    *elements: int,
    dtype: str = "bfloat16",
    frozen: Sequence[int] = (),
    gradient_dtype: str = "param",
    lasting: bool = False,
    backward: bool = True,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Unit:
    """A unit of trainable parameters of `elements` each, and frozen ones."""
    wanted = [Parameter(f"{name}.p{i}", (n,), dtype, True) for i, n in enumerate(elements)]
    wanted += [Parameter(f"{name}.f{i}", (n,), dtype, False) for i, n in enumerate(frozen)]
    return lay_out_unit(
        name,
        wanted,
        gradient_dtype=gradient_dtype,
        lasting=lasting,
        backward=backward,
        chunk_elements=chunk_elements,
    )


def blocks(count: int, elements: int = 3000, dtype: str = "bfloat16") -> Profile:
    """`count` equal units used one after the other."""
    return profile_of([unit(f"block{i}", elements, dtype=dtype) for i in range(count)])


def plan_of(
    profile: Profile,
    weight: Tier = "cpu",
    gradient: Tier = "cpu",
    state: Tier = "cpu",
    *,
    clips: bool = False,
    budgets: Mapping[Tier, int] = AMPLE,
    weight_slots: int = 3,
) -> Plan:
    """The plan with every unit placed alike."""
    placements = [Placement(weight, gradient, state)] * len(profile.units)
    return lay_out(
        profile,
        placements,
        budgets=budgets,
        clips=clips,
        states=StateChoice(),
        weight_slots=weight_slots,
    )


def program_of(profile: Profile, *tiers: Tier, **options: Any) -> Program:
    """The program with every unit placed alike: of a plan as `plan_of` makes it."""
    return compile_program(plan_of(profile, *tiers, **options))


def all_placements() -> Iterator[Placement]:
    """Every home of one unit: 27."""
    for weight, gradient, state in product(TIERS, repeat=3):
        yield Placement(weight, gradient, state)


def large_model(units: int = 100, elements: int = 70 * 10**7, dtype: str = "bfloat16") -> Profile:
    """A model of 70 billion parameters in a hundred blocks, as far as sizes go."""
    width = elements // 10
    made = [unit(f"block{i}", *[width] * 10, dtype=dtype) for i in range(units)]
    return profile_of(made)


def with_phase(program: Program, name: str, **changes: object) -> Program:
    """`program` with fields of one phase replaced."""
    phases = dict(program.phases)
    phases[name] = replace(phases[name], **changes)  # type: ignore[arg-type]
    return replace(program, phases=phases)


def with_op(program: Program, phase: str, index: int, **changes: object) -> Program:
    """`program` with fields of one op replaced."""
    ops = list(program.phases[phase].ops)
    ops[index] = replace(ops[index], **changes)  # type: ignore[arg-type]
    return with_phase(program, phase, ops=tuple(ops))


def find(phase: Phase, **wanted: object) -> tuple[int, Op]:
    """The first op of a phase whose fields are as wanted."""
    for index, op in enumerate(phase.ops):
        if all(getattr(op, name) == value for name, value in wanted.items()):
            return index, op
    raise LookupError(wanted)


_SIZES = st.one_of(
    st.integers(1, 300),
    st.sampled_from([1, 127, 128, 2048, 4096, 10_000]),
    st.integers(1, 3_000_000),
)

_DTYPES = st.sampled_from(["bfloat16", "float32"])


@st.composite
def wanted_parameters(draw: st.DrawFn, name: str = "unit") -> list[Parameter]:
    """Some parameters of mixed dtypes, some of them frozen, some of several dimensions."""
    made = []
    for i in range(draw(st.integers(1, 4))):
        size = draw(_SIZES)
        shape = draw(st.sampled_from([(size,), (1, size), (size, 1, 1)]))
        made.append(Parameter(f"{name}.p{i}", shape, draw(_DTYPES), draw(st.integers(0, 4)) > 0))
    return made


@st.composite
def units(draw: st.DrawFn, name: str = "unit") -> Unit:
    """A unit of a random layout."""
    return lay_out_unit(
        name,
        draw(wanted_parameters(name)),
        gradient_dtype=draw(st.sampled_from(["param", "fp32"])),
        lasting=draw(st.integers(0, 4)) == 0,
        backward=draw(st.integers(0, 4)) > 0,
    )


@st.composite
def profiles(draw: st.DrawFn, *, most: int = 6) -> Profile:
    """A model of a few units, some used twice or never, in their order or another."""
    count = draw(st.integers(1, most))
    made = [draw(units(f"unit{i}")) for i in range(count)]
    if draw(st.booleans()):
        return profile_of(made)
    forward = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=2 * count))
    if draw(st.booleans()):
        return profile_of(made, forward)
    used = sorted(set(forward))
    backward = draw(st.lists(st.sampled_from(used), max_size=2 * count))
    return replace(profile_of(made, forward), backward=tuple(backward))


@st.composite
def plans(draw: st.DrawFn, *, most: int = 6) -> Plan:
    """Random homes for a random model."""
    profile = draw(profiles(most=most))
    one = st.sampled_from(list(all_placements()))
    count = len(profile.units)
    alike = draw(st.booleans())
    placements = [draw(one)] * count if alike else [draw(one) for _ in range(count)]
    return lay_out(
        profile,
        placements,
        budgets=AMPLE,
        clips=draw(st.booleans()),
        states=StateChoice(),
        weight_slots=draw(st.integers(1, 3)),
    )


def busy(timeline: Timeline, lane: Lane) -> float:
    """Seconds in which at least one op ran on a lane."""
    return seconds((span.start, span.stop) for span in timeline.spans if span.lane is lane)


def moved(timeline: Timeline, lane: Lane) -> int:
    """The sum of `Op.bytes` on a lane."""
    return sum(span.op.bytes for span in timeline.spans if span.lane is lane)
