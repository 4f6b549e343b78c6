"""The simulator: small cases worked out by hand, bounds and sums that hold for every program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.planning.layout import Place, Placement, Plan, lay_out, site
from offload.planning.machine import Machine
from offload.planning.profile import KINDS, StateChoice, profile_of
from offload.program.compile import (
    STREAMED,
    compile_program,
    compute_phase,
    parts_of,
    passing,
    square,
)
from offload.program.ops import Lane, Op, Phase, Verb
from offload.program.schedule import FLYING_BYTES_MAX
from offload.program.simulate import Timeline, seconds_of, simulate
from tests.profiles import AMPLE, H100, all_placements, blocks, busy, moved, plans, program_of, unit
from tests.proof import waits_of

BYTES = 8192
"""Weights and gradients of a block of 4096 bfloat16; its record has 10 bytes per element."""

MACHINE = Machine(
    device_bytes=0,
    cpu_bytes=0,
    h2d_bytes_per_s=BYTES,
    d2h_bytes_per_s=BYTES,
    disk_read_bytes_per_s=BYTES,
    disk_write_bytes_per_s=BYTES / 2,
    cpu_bytes_per_s=BYTES,
    compute_bytes_per_s=BYTES,
    op_seconds=0.0,
)
"""A block's weights take one second on every lane, two to be written to disk."""

UPDATE_SECONDS = 1 + 2 * (1 + 5)
"""Operands of an update: gradient read, weight and record read and written."""


def homes(placement: Placement) -> list[Any]:
    return [placement.of(kind) for kind in KINDS]


def ten(unit: int, verb: Verb) -> float:
    return 10.0


USER = (Verb.FORWARD, Verb.BACKWARD)
STEP = ("forward", "backward_first", "norm", "update")


def spans(timeline: Timeline, step: int = 0) -> list[tuple[str, str, int, float, float]]:
    """(lane, verb, unit, start, stop) of one step."""
    return [
        (s.lane.value, s.op.verb.value, s.op.value.unit, s.start, s.stop)
        for s in timeline.spans
        if s.step == step
    ]


def end_of(timeline: Timeline) -> float:
    """When the last op ended."""
    return max(span.stop for span in timeline.spans)


# -- by hand ------------------------------------------------------------------------------------


def test_one_block_on_the_device() -> None:
    program = program_of(blocks(1, 4096), "device", "device", "device")
    timeline = simulate(program, MACHINE, ten, steps=3)
    assert spans(timeline) == [
        ("compute", "forward", 0, 0.0, 10.0),
        ("compute", "backward", 0, 10.0, 20.0),
        ("compute", "update", 0, 20.0, 33.0),
    ]
    assert timeline.steps == (20.0, 53.0, 86.0)
    assert timeline.step_seconds == 33.0
    assert timeline.exposed == UPDATE_SECONDS
    assert end_of(timeline) == 99.0
    assert busy(timeline, Lane.COMPUTE) == 99.0
    assert busy(timeline, Lane.H2D) == 0.0


def test_one_block_on_the_cpu() -> None:
    program = program_of(blocks(1, 4096))
    timeline = simulate(program, MACHINE, ten, steps=3)
    assert spans(timeline) == [
        ("h2d", "move", 0, 0.0, 1.0),
        ("compute", "forward", 0, 1.0, 11.0),
        ("compute", "backward", 0, 11.0, 21.0),
        ("d2h", "move", 0, 21.0, 22.0),
        ("cpu", "update", 0, 22.0, 35.0),
    ]
    assert timeline.step_seconds == 20 + 1 + UPDATE_SECONDS + 1
    assert timeline.exposed == 1 + UPDATE_SECONDS + 1


def test_updates_hide_under_the_next_forward() -> None:
    program = program_of(blocks(3, 4096))
    timeline = simulate(program, MACHINE, lambda unit, verb: 20.0, steps=3)
    # The first unit's gradient comes out a second after step(): the lane has begun another by then.
    assert timeline.exposed == 2 * UPDATE_SECONDS + 1
    assert timeline.step_seconds == 2 * 3 * 20 + timeline.exposed
    first = [s for s in timeline.spans if s.op.verb is Verb.UPDATE and s.step == 0]
    assert [s.op.value.unit for s in first] == [1, 0, 2]
    assert first[2].stop > next(
        s.start for s in timeline.spans if s.step == 1 and s.op.verb in USER
    )


@pytest.mark.parametrize("early", [False, True])
def test_updates_begin_when_those_of_the_step_before_are_done(early: bool) -> None:
    program = program_of(blocks(1, 4096), "device", "device", "nvme")
    timeline = simulate(program, MACHINE, ten, steps=2, updates_in_backward=early)
    assert spans(timeline)[-5:] == [
        ("d2h", "move", 0, 20.0, 22.0),
        ("disk", "move", 0, 22.0, 27.0),
        ("cpu", "update", 0, 27.0, 40.0),
        ("h2d", "move", 0, 40.0, 41.0),
        ("disk", "move", 0, 41.0, 51.0),
    ]
    assert timeline.steps == (20.0, 51.0 + 20.0)
    quick = simulate(program, MACHINE, lambda u, v: 1.0, steps=2, updates_in_backward=early)
    assert quick.steps == (2.0, 33.0 + 2.0)
    second = [
        start for _, verb, _, start, _ in spans(quick, 1) if verb not in ("forward", "backward")
    ]
    assert min(second) == 35.0


def test_slots_bound_how_far_fetches_run_ahead() -> None:
    program = program_of(blocks(4, 4096), weight_slots=2)
    timeline = simulate(program, MACHINE, ten, steps=1)
    moves = [s.start for s in timeline.spans if s.lane is Lane.H2D and s.phase == "forward"]
    assert moves == [0.0, 1.0, 11.0, 21.0]
    assert timeline.exposed == 1.0


def test_one_slot_means_no_overlap() -> None:
    program = program_of(blocks(4, 4096), weight_slots=1)
    timeline = simulate(program, MACHINE, ten, steps=1)
    assert timeline.exposed == 4 + 3


def test_through_the_disk_and_back() -> None:
    program = program_of(blocks(1, 4096), "nvme", "cpu", "nvme")
    timeline = simulate(program, MACHINE, ten, steps=1)
    assert spans(timeline) == [
        ("disk", "move", 0, 0.0, 1.0),
        ("h2d", "move", 0, 1.0, 2.0),
        ("compute", "forward", 0, 2.0, 12.0),
        ("compute", "backward", 0, 12.0, 22.0),
        ("d2h", "move", 0, 22.0, 23.0),
        ("disk", "move", 0, 23.0, 29.0),
        ("cpu", "update", 0, 29.0, 42.0),
        ("disk", "move", 0, 42.0, 54.0),
    ]


def test_the_chunks_of_a_stream_go_beside_each_other_and_are_waited_for() -> None:
    program = program_of(blocks(1, (1 << 20) + 4096), "device", "device", "nvme")
    assert len(program.plan.profile.units[0].chunks) == 2
    machine = replace(MACHINE, device_is_cpu=True)
    timeline = simulate(program, machine, ten, steps=2)
    first = [s for s in timeline.spans if s.step == 0 and s.phase == "update"]
    reads, works, writes = (
        [s for s in first if s.lane is lane and s.op.verb is verb and s.op.writes[0].place == home]
        for lane, verb, home in (
            (Lane.DISK, Verb.MOVE, Place("cpu", "home")),
            (Lane.CPU, Verb.UPDATE, Place("device", "home")),
            (Lane.DISK, Verb.MOVE, Place("nvme", "home")),
        )
    )
    assert len(reads) == len(works) == len(writes) == 2
    assert reads[1].start == reads[0].stop
    assert works[0].start == reads[0].stop < works[1].start
    assert sum(s.op.bytes for s in works) == program.phases["update"].ops[0].bytes
    again = next(s for s in timeline.spans if s.step == 1)
    assert again.start == max(s.stop for s in writes) > max(s.stop for s in works)


def test_op_seconds_and_host_seconds() -> None:
    program = program_of(blocks(1, 4096), "device", "device", "device")
    machine = replace(MACHINE, op_seconds=0.5)
    timeline = simulate(program, machine, ten, steps=3, host_seconds=3.0)
    assert timeline.step_seconds == 20 + UPDATE_SECONDS + 0.5
    assert timeline.exposed == UPDATE_SECONDS + 0.5 - 3.0
    timeline = simulate(program, machine, ten, steps=3, host_seconds=30.0)
    assert timeline.step_seconds == 50.0
    assert timeline.exposed == 0.0


def test_on_a_cpu_device_updates_run_beside_the_user() -> None:
    profile = blocks(2, 4096)
    program = program_of(profile, "device", "device", "device")
    shared = simulate(program, MACHINE, ten, steps=3)
    beside = simulate(program, replace(MACHINE, device_is_cpu=True), ten, steps=3)
    assert shared.exposed == 2 * UPDATE_SECONDS
    assert beside.exposed == UPDATE_SECONDS + (UPDATE_SECONDS - 10)
    assert busy(beside, Lane.COMPUTE) <= end_of(beside)


# -- for every program --------------------------------------------------------------------------


@given(plans(most=4), st.integers(1, 3), st.floats(0.0, 0.1), st.booleans())
def test_rules_and_bounds(
    plan: Plan, micro_batches: int, compute: float, device_is_cpu: bool
) -> None:
    program = compile_program(plan)
    machine = Machine(device_bytes=0, cpu_bytes=0, device_is_cpu=device_is_cpu)
    steps = 6
    timeline = simulate(
        program, machine, lambda u, v: compute, steps=steps, micro_batches=micro_batches
    )

    def spans_of(phase: Phase) -> int:
        return sum(spans_of_op(plan, op, device_is_cpu=device_is_cpu) for op in phase.ops)

    once = [p for name, p in program.phases.items() if name not in ("backward_next", "norm")]
    count = sum(map(spans_of, once))
    for op in program.phases["norm"].ops:
        if op.verb is Verb.SQUARE:  # Of what is in memory as it goes home.
            op = square(plan, op.value.unit, passing(plan, op.value.unit, again=micro_batches > 1))
        count += spans_of_op(plan, op, device_is_cpu=device_is_cpu)
    again = compute_phase(
        plan, "forward", plan.profile.forward, dict(program.phases["backward_first"].exit)
    )
    count += (micro_batches - 1) * spans_of(again)
    count += (micro_batches - 1) * spans_of(program.phases["backward_next"])
    assert len(timeline.spans) == steps * count
    lane_stops: dict[str, float] = {}
    for span in timeline.spans:
        user = span.op.verb in USER
        resource = "user" if user and device_is_cpu else span.lane.value
        assert span.start >= lane_stops.get(resource, 0.0), "one op at a time"
        lane_stops[resource] = span.stop
        seconds = compute if user else seconds_of(span.op, machine)
        assert span.stop - span.start == pytest.approx(seconds)
    mine = len(plan.profile.forward) + len({*plan.profile.backward, *_extra(plan)})
    mine += len(plan.profile.backward) - len(set(plan.profile.backward))
    period = timeline.step_seconds
    assert period == pytest.approx(mine * compute * micro_batches + timeline.exposed)
    for lane in Lane:
        assert end_of(timeline) >= busy(timeline, lane)


def spans_of_op(plan: Plan, op: Op, *, device_is_cpu: bool) -> int:
    """How many are told of it: of collecting none, of a stream each move and work of each piece."""
    before, after = parts_of(plan, op)
    parts = [p for p in (*before, *after) if p.lane is Lane.DISK or not device_is_cpu]
    streams = parts or (op.verb in STREAMED and op.lane is Lane.CPU and not device_is_cpu)
    chunks = len(plan.profile.units[op.value.unit].chunks) if streams else 1
    count = min(chunks, plan.profile.chunk_stages) * (len(parts) + 1)
    return count if op.verb is not Verb.COLLECT else 0


def _extra(plan: Plan) -> set[int]:
    return {u for u, unit in enumerate(plan.profile.units) if unit.trainable}


@given(plans(most=4))
def test_the_waits_of_the_phase_are_kept(plan: Plan) -> None:
    """Of an op in pieces no piece is looked at: see the case by hand."""
    program = compile_program(plan)
    timeline = simulate(program, MACHINE, lambda u, v: 0.01, steps=2)
    for step in range(2):
        for phase in (program.phases[name] for name in STEP):
            begins, ends = dict[Any, float](), dict[Any, float]()
            of_phase = [s for s in timeline.spans if (s.step, s.phase) == (step, phase.name)]
            whole = {id(op): op for op in phase.ops}
            for span in (s for s in of_phase if id(s.op) in whole):
                begins[id(span.op)], ends[id(span.op)] = span.start, span.stop
            for op, waits in zip(phase.ops, waits_of(phase)):
                for wait in (phase.ops[wait] for wait in waits):
                    if id(op) in begins and id(wait) in ends:
                        assert begins[id(op)] >= ends[id(wait)]


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(one, marks=() if sum(divmod(number, 9)) % 4 == 0 else pytest.mark.slow)
        for number, one in enumerate(all_placements())
    ],
)
def test_a_step_takes_as_long_as_its_busiest_lane(placement: Placement) -> None:
    profile = blocks(6, 200_000)
    program = program_of(profile, *homes(placement), weight_slots=1)
    machine = Machine(device_bytes=0, cpu_bytes=0)
    for compute in (1e-5, 1e-3, 1e-1):
        few, more = (
            simulate(program, machine, lambda u, v, by=compute: by, steps=n) for n in (4, 5)
        )
        assert more.step_seconds == pytest.approx(few.step_seconds)
        for lane in Lane:
            assert more.step_seconds >= 0.9999 * (busy(more, lane) - busy(few, lane))
        assert more.step_seconds >= 0.9999 * 12 * compute


AWAY = [one for one in all_placements() if one.state != "device"]


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(
            one,
            marks=pytest.mark.slow if number % 3 != number // 6 else (),
            id="-".join(map(one.of, KINDS)),
        )
        for number, one in enumerate(AWAY)
    ],
)
def test_under_longer_compute_only_the_edge_is_exposed(placement: Placement) -> None:
    """What lanes do for the unit that is used first, between its backward and its next forward; and
    what a drive had under way before."""
    plan = lay_out(
        blocks(24, 4 << 20),
        [placement] * 24,
        budgets=AMPLE,
        clips=False,
        states=StateChoice(),
        weight_slots=3,
        early=True,
    )
    program = compile_program(plan)

    def run(seconds: float, steps: int = 5) -> Timeline:
        def compute(unit: int, verb: Verb) -> float:
            return seconds * (1 if verb is Verb.FORWARD else 2)

        return simulate(program, H100, compute, steps=steps, updates_in_backward=True)

    idle = run(1e-9), run(1e-9, steps=4)
    slowest = max(busy(idle[0], lane) - busy(idle[1], lane) for lane in Lane)
    found = run(1.25 * slowest / 72)
    first = [
        s for s in found.spans if s.step == 3 and s.op.value.unit == 0 and s.op.verb not in USER
    ]
    edge = sum(span.stop - span.start for span in first)
    before = (
        2 * FLYING_BYTES_MAX / H100.disk_write_bytes_per_s if "nvme" in homes(placement) else 0.0
    )
    assert found.exposed <= edge + before + 0.02 * found.step_seconds
    assert edge < 0.08 * found.step_seconds


# -- bytes --------------------------------------------------------------------------------------


def _expected_bytes(plan: Plan, micro_batches: int) -> dict[Lane, int]:
    """Bytes per lane of a step of equal units that share one slot and do not clip."""
    placement, count = plan.placements[0], len(plan.profile.units)
    weight, gradient, state = (plan.bytes_of(kind, 0) for kind in KINDS)
    h2d = d2h = disk = cpu = compute = 0
    # In both directions all units but the one that is still in the slot at each turn: that of the
    # next step's forward was updated.
    fetches = 2 * (count - 1) * micro_batches + 1
    if placement.weight != "device":
        h2d += fetches * weight
    if placement.weight == "nvme":
        disk += fetches * weight
    if placement.gradient != "device":
        d2h += count * micro_batches * gradient
        cpu += count * (micro_batches - 1) * 3 * gradient
    if placement.gradient == "nvme":
        disk += count * (2 * micro_batches - 1) * gradient
    at = site(placement)
    operands = gradient + 2 * (weight + state)
    compute, cpu = (count * operands, cpu) if at == "device" else (compute, cpu + count * operands)
    for home, there, back in (
        (placement.gradient, gradient, 0),
        (placement.weight, weight, weight),
        (placement.state, state, state),
    ):
        crosses = (home == "device") != (at == "device")
        if home == "nvme":
            disk += count * (there + back)
        if crosses:
            up, down = (there, back) if at == "device" else (back, there)
            h2d, d2h = h2d + count * up, d2h + count * down
    return {
        Lane.COMPUTE: compute,
        Lane.H2D: h2d,
        Lane.D2H: d2h,
        Lane.CPU: cpu,
        Lane.DISK: disk,
        Lane.COMM: 0,
    }


@pytest.mark.parametrize("placement", list(all_placements()))
def test_bytes_of_a_step_are_those_of_the_formula(placement: Placement) -> None:
    for elements in (4096, (1 << 21) + 5000):
        program = program_of(blocks(3, elements), *homes(placement), weight_slots=1)
        for micro_batches in (1, 3):
            timeline = simulate(program, MACHINE, ten, steps=2, micro_batches=micro_batches)
            expected = _expected_bytes(program.plan, micro_batches)
            assert {lane: moved(timeline, lane) // 2 for lane in Lane} == expected


def test_clipping_reads_gradients_once_more_in_memory_and_not_on_nvme() -> None:
    profile = blocks(3, 4096)
    for tier, lane in (("device", Lane.COMPUTE), ("cpu", Lane.CPU), ("nvme", Lane.CPU)):
        totals = []
        for clips in (False, True):
            program = program_of(profile, tier, tier, tier, clips=clips)
            timeline = simulate(program, MACHINE, ten, steps=1)
            totals.append({one: moved(timeline, one) for one in Lane})
        assert totals[1][lane] - totals[0][lane] == 3 * BYTES
        assert totals[1][Lane.DISK] == totals[0][Lane.DISK]


@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_squares_are_summed_in_the_last_backward(tier: Any, micro_batches: int) -> None:
    program = program_of(blocks(3, 4096), tier, tier, tier, clips=True)
    timeline = simulate(program, MACHINE, ten, steps=1, micro_batches=micro_batches)
    squares = [span for span in timeline.spans if span.op.verb is Verb.SQUARE]
    backwards = [span for span in timeline.spans if span.op.verb is Verb.BACKWARD]
    assert [span.op.value.unit for span in squares] == [2, 1, 0]
    for one, backward in zip(squares, backwards[-3:]):
        assert one.op.value.unit == backward.op.value.unit
        assert one.start >= backward.stop
    assert squares[0].start < backwards[-1].stop


def test_a_program_that_clips_updates_after_its_norm_whatever_is_asked() -> None:
    program = program_of(blocks(3, 4096), clips=True)
    asked, plain = (
        simulate(program, MACHINE, ten, steps=2, updates_in_backward=early)
        for early in (True, False)
    )
    assert asked == plain
    for step in (0, 1):
        (normed,) = [s.stop for s in asked.spans if s.op.verb is Verb.NORM and s.step == step]
        updates = [s for s in asked.spans if s.op.verb is Verb.UPDATE and s.step == step]
        assert len(updates) == 3
        assert min(update.start for update in updates) >= normed


def test_frozen_units_are_only_fetched() -> None:
    profile = profile_of([unit(f"frozen{i}", frozen=[4096]) for i in range(3)])
    timeline = simulate(program_of(profile), MACHINE, ten, steps=2)
    verbs = {span.op.verb for span in timeline.spans}
    assert verbs == {Verb.MOVE, Verb.FORWARD, Verb.BACKWARD}
    assert moved(timeline, Lane.D2H) == moved(timeline, Lane.CPU) == 0


def test_seconds_of_reads_and_writes_differ() -> None:
    program = program_of(blocks(1, 4096), "nvme", "nvme", "nvme")
    (op,) = program.phases["update"].ops
    before, after = parts_of(program.plan, op)
    assert [seconds_of(part, MACHINE) for part in before] == [1.0 + 1.0 + 5.0]
    assert [seconds_of(part, MACHINE) for part in after] == [2.0 + 10.0]
