"""The compiled phases: what each holds, in which order, and what it waits for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given

from offload.planning.layout import Place, Placement, Plan, lay_out
from offload.planning.profile import StateChoice, profile_of
from offload.program.compile import (
    add_gradient,
    compile_program,
    fetch,
    offload_gradient,
    parts_of,
    square,
    update,
    update_order,
    weight_in_use,
)
from offload.program.ops import FACTOR, Lane, Op, Phase, Use, Value, Verb, cells
from offload.program.schedule import Scoreboard
from tests.profiles import AMPLE, blocks, plan_of, plans, program_of, unit
from tests.proof import waits_of

NAMES = ["forward", "backward_first", "backward_next", "norm", "update"]


def path(ops: list[Op]) -> list[tuple[str, str, str]]:
    """(lane, from, to) of each move."""
    return [
        (op.lane.value, _text(op.reads[0].place), _text(op.writes[0].place))
        for op in ops
        if op.verb is Verb.MOVE
    ]


def _text(place: Place) -> str:
    return f"{place.tier} {place.use}"


def turns(phase: Phase, verb: Verb) -> list[int]:
    return [op.value.unit for op in phase.ops if op.verb is verb]


# -- the pieces ---------------------------------------------------------------------------------


def test_fetch_goes_from_tier_to_tier() -> None:
    profile = blocks(3)
    assert path(fetch(plan_of(profile, "cpu"), 1, 0)) == [("h2d", "cpu home", "device weight")]
    assert path(fetch(plan_of(profile, "nvme"), 1, 0)) == [
        ("disk", "nvme home", "cpu weight"),
        ("h2d", "cpu weight", "device weight"),
    ]


def test_weight_in_use() -> None:
    profile = blocks(2)
    assert weight_in_use(plan_of(profile, "device"), 0) == Place("device", "home")
    assert weight_in_use(plan_of(profile, "nvme"), 1) == Place("device", "weight", 1)


def test_offload_gradient_puts_the_first_gradient_and_adds_the_next() -> None:
    profile = blocks(2)
    assert offload_gradient(plan_of(profile, gradient="device"), 0, 1) == []
    cpu, nvme = plan_of(profile), plan_of(profile, gradient="nvme")
    assert path(offload_gradient(cpu, 0, 1)) == [("d2h", "device gradient", "cpu home")]
    assert path(offload_gradient(nvme, 0, 1)) == [
        ("d2h", "device gradient", "cpu gradient"),
        ("disk", "cpu gradient", "nvme home"),
    ]
    assert path(add_gradient(cpu, 0, 1)) == [("d2h", "device gradient", "cpu gradient")]
    ops = add_gradient(nvme, 0, 1)
    assert path(ops) == [
        ("d2h", "device gradient", "cpu gradient"),
        ("disk", "nvme home", "cpu deposit"),
        ("disk", "cpu deposit", "nvme home"),
    ]
    add = next(op for op in ops if op.verb is Verb.ADD)
    assert add.lane is Lane.CPU
    assert add.writes == add.reads[1:]


@pytest.mark.parametrize(
    ("placement", "moves"),
    [
        (Placement("cpu", "cpu", "cpu"), {}),
        (Placement("device", "device", "device"), {}),
        (
            Placement("device", "cpu", "nvme"),
            {("device", "cpu"): 1, ("nvme", "cpu"): 5, ("cpu", "device"): 1, ("cpu", "nvme"): 5},
        ),
        (
            Placement("nvme", "nvme", "device"),
            {("nvme", "cpu"): 2, ("cpu", "device"): 2, ("device", "cpu"): 1, ("cpu", "nvme"): 1},
        ),
    ],
)
def test_an_update_moves_inside_what_it_needs(
    placement: Placement, moves: dict[tuple[str, str], int]
) -> None:
    """In weights of 4096 elements of bfloat16, beside which a record is five times as large."""
    profile = blocks(1, 4096)
    plan = lay_out(profile, [placement], budgets=AMPLE, clips=False, states=StateChoice())
    one = update(plan, 0, 0)
    assert one.lane is (Lane.COMPUTE if placement.state == "device" else Lane.CPU)
    assert {use.place.use for use in (*one.reads, *one.writes)} == {"home"}
    assert one.writes == one.reads[1:]
    size = plan.bytes_of("weight", 0)
    found = {
        (part.reads[0].place.tier, part.writes[0].place.tier): part.bytes / size
        for part in itertools.chain(*parts_of(plan, one))
    }
    assert found == moves


def test_square_reads_the_gradient_where_it_is() -> None:
    lanes = {"device": Lane.COMPUTE, "cpu": Lane.CPU, "nvme": Lane.CPU}
    for tier, expected in lanes.items():
        plan = plan_of(blocks(1), gradient=tier, clips=True)  # type: ignore[arg-type]
        one = square(plan, 0)
        assert one.lane is expected
        before, after = parts_of(plan, one)
        assert [part.lane for part in before] == [Lane.DISK] * (tier == "nvme")
        assert not after


def test_updates_come_in_the_order_of_the_next_forward() -> None:
    made = [unit("a", 5), unit("b", 3_000_000), unit("c", 5), unit("never", 5)]
    profile = profile_of(made, forward=[2, 1, 0, 1])
    every = [(2, 0), (1, 1), (0, 2), (3, 4)]
    assert list(update_order(plan_of(profile, state="nvme"))) == every


# -- the phases ---------------------------------------------------------------------------------


def test_phases_and_step() -> None:
    program = program_of(blocks(3))
    assert list(program.phases) == NAMES
    assert program.phases["norm"].ops == ()
    assert turns(program.phases["forward"], Verb.FORWARD) == [0, 1, 2]
    assert turns(program.phases["backward_next"], Verb.BACKWARD) == [2, 1, 0]


def test_backward_takes_over_what_forward_left_in_the_slots() -> None:
    program = program_of(blocks(5), weight_slots=2)
    held = {Place("device", "weight", 0): 4, Place("device", "weight", 1): 3}
    assert program.phases["forward"].exit == held
    backward = program.phases["backward_first"]
    assert backward.entry == held
    fetched = [op.value.unit for op in backward.ops if op.lane is Lane.H2D]
    assert fetched == [2, 1, 0]
    assert backward.exit == {Place("device", "weight", 0): 0, Place("device", "weight", 1): 1}


def test_a_unit_used_again_while_it_is_held_is_not_fetched_again() -> None:
    made = [unit(f"u{i}", 100, lasting=i == 0) for i in range(4)]
    plan = plan_of(profile_of(made, forward=[0, 1, 2, 3, 0]), weight_slots=1)
    phase = compile_program(plan).phases["forward"]
    assert [op.value.unit for op in phase.ops if op.verb is Verb.MOVE] == [0, 1, 2, 3]
    assert turns(phase, Verb.FORWARD) == [0, 1, 2, 3, 0]


def test_a_unit_used_twice_in_backward_is_put_once_and_then_added() -> None:
    made = [unit("a", 100), unit("b", 100)]
    plan = plan_of(replace(profile_of(made, forward=[0, 1, 0]), backward=(0, 1, 0)))
    program = compile_program(plan)
    assert turns(program.phases["backward_first"], Verb.ADD) == [0]
    assert turns(program.phases["backward_next"], Verb.ADD) == [0, 1, 0]


def test_trainable_units_that_backward_does_not_announce_come_last() -> None:
    made = [unit("embed", 100, backward=False), unit("a", 100), unit("frozen", frozen=[100])]
    program = program_of(replace(profile_of(made), backward=(2, 1)))
    backward = program.phases["backward_first"]
    assert turns(backward, Verb.BACKWARD) == [2, 1, 0]
    last = [op for op in backward.ops if op.verb is Verb.BACKWARD][-1]
    assert last.reads == ()
    first = next(op for op in backward.ops if op.verb is Verb.BACKWARD)
    assert first.writes == ()


def test_clipping_combines_every_unit_before_any_update() -> None:
    profile = profile_of([unit("a", 2_500_000), unit("b", 5)])
    program = program_of(profile, "cpu", "nvme", "cpu", clips=True)
    norm = program.phases["norm"]
    assert turns(norm, Verb.SQUARE) == [0, 1]
    combine = norm.ops[-1]
    assert combine.verb is Verb.NORM
    assert combine.writes == (FACTOR,)
    assert len(combine.reads) == len({use.place for use in combine.reads}) == 2
    updates = [op for op in program.phases["update"].ops if op.verb is Verb.UPDATE]
    assert all(FACTOR in op.reads for op in updates)


@given(plans())
def test_deadlines_of_random_programs(plan: Plan) -> None:
    program = compile_program(plan)
    assert list(program.phases) == NAMES
    for phase in program.phases.values():
        own = [op.deadline for op in phase.ops if op.verb in (Verb.FORWARD, Verb.BACKWARD)]
        assert own == list(range(len(own)))
        waits = waits_of(phase)
        for at, op in enumerate(phase.ops):
            needed = [o.deadline for o, of in zip(phase.ops, waits) if of and of[-1] == at]
            if op.verb is Verb.MOVE and op.lane is Lane.H2D and needed:
                assert op.deadline <= max(needed)


@given(plans())
def test_the_same_plan_gives_the_same_program(plan: Plan) -> None:
    assert compile_program(plan) == compile_program(plan)


def test_more_slots_let_fetches_run_further_ahead() -> None:
    for slots in (1, 2, 3):
        phase = program_of(blocks(6), weight_slots=slots).phases["forward"]
        moves = [index for index, op in enumerate(phase.ops) if op.verb is Verb.MOVE]
        for number, index in enumerate(moves):
            used = [phase.ops[wait].value.unit for wait in waits_of(phase)[index]]
            before = number - slots
            assert (before in used) == (before >= 0)


# -- the rule between phases --------------------------------------------------------------------


def test_scoreboard_keeps_what_is_under_way_and_little_more() -> None:
    board, running = Scoreboard[SimpleNamespace](), list[SimpleNamespace]()
    for number in range(1000):
        task = SimpleNamespace(over=False, cancelled=False)
        board.note(task, ["only read", number % 7], ["written"] if number % 5 == 0 else [])
        running.append(task)
        if number >= 3:
            running[number - 3].over = True
    assert all(len(accesses) <= 4 for accesses in board._accesses.values())


def test_the_cell_of_a_home_is_its_value_and_that_of_a_slot_the_slot() -> None:
    home, slot, value = Place("cpu", "home"), Place("device", "weight", 0), Value("weight", 0)
    assert list(cells([Use(home, value), Use(slot, value)])) == [value, slot]
