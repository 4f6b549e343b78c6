"""Valid programs pass; every rule, broken on purpose, is found and named."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from offload.planning.layout import Place, Plan
from offload.planning.profile import profile_of
from offload.program.compile import compile_program, pass_phase
from offload.program.ops import Lane, Program, Use, Value, Verb
from offload.program.verify import ProgramError, place_text, verify_pass
from tests.profiles import all_placements, blocks, find, plans, program_of, unit, with_phase
from tests.profiles import with_op as changed
from tests.proof import CHAIN, verify, waits_of


def broken(
    program: Program,
    phase: str,
    index: int | None,
    rule: str,
    by: Callable[[Program], None] = verify,
) -> None:
    """Assert that `verify` finds this rule broken there, and says so."""
    with pytest.raises(ProgramError, match=rule) as caught:
        by(program)
    assert (caught.value.phase, caught.value.index) == (phase, index)
    text = str(caught.value)
    assert text.startswith(f"{phase}:")
    assert index is None or f"op {index} " in text


def streamed() -> Program:
    """Everything on nvme, clipping: every kind of op there is."""
    return program_of(blocks(4), "nvme", "nvme", "nvme", clips=True)


def without(program: Program, phase: str, index: int) -> Program:
    """`program` with one op left out."""
    ops = program.phases[phase].ops
    return with_phase(program, phase, ops=(*ops[:index], *ops[index + 1 :]))


def with_plan(program: Program, **changes: object) -> Program:
    return replace(program, plan=replace(program.plan, **changes))  # type: ignore[arg-type]


def with_order(program: Program, phase: str, order: Sequence[int]) -> Program:
    """`program` with the ops of a phase in another order."""
    ops = program.phases[phase].ops
    return with_phase(program, phase, ops=tuple(ops[at] for at in order))


# -- what is right passes ---------------------------------------------------------------------


@pytest.mark.parametrize("clips", [False, True])
def test_every_placement_verifies(clips: bool) -> None:
    for p in all_placements():
        for weight_slots in (1, 3):
            homes = (p.weight, p.gradient, p.state)
            verify(program_of(blocks(4), *homes, clips=clips, weight_slots=weight_slots))


@given(plans())
def test_random_models_and_placements_verify(plan: Plan) -> None:
    verify(compile_program(plan))


BACKWARD = ("backward_first", "backward_next")


def test_chain_has_every_legal_pair_and_no_other() -> None:
    ends = ("forward", *BACKWARD, "update")
    legal = {(one, two) for one in ends for two in ("forward", "norm")}
    legal |= {("forward", one) for one in BACKWARD} | {("norm", "update")}
    assert set(pairwise(CHAIN)) == legal


def test_three_thousand_ops_take_about_a_second() -> None:
    program = program_of(blocks(200), "nvme", "nvme", "nvme", clips=True)
    count = sum(len(phase.ops) for phase in program.phases.values())
    assert count > 3000
    start = time.process_time()
    verify(program)
    assert time.process_time() - start < 3.0


# -- waits --------------------------------------------------------------------------------------


def test_a_race_between_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.proof.cells", lambda uses: iter(()))
    program = program_of(blocks(1), "device", "device", "device")
    broken(
        program, "backward_next", 1, "does not wait for an earlier op, with which it shares a home"
    )


# -- one op -------------------------------------------------------------------------------------


def test_an_update_where_the_states_are_not() -> None:
    program = program_of(blocks(2), "device", "device", "device")
    other = replace(program_of(blocks(2)), phases={"update": program.phases["update"]})
    broken(other, "update", 0, "gradient of block0 lives on cpu, not device")


def test_a_slot_that_does_not_exist() -> None:
    program = streamed()
    index, op = find(program.phases["forward"], verb=Verb.MOVE)
    uses = (op.writes[0]._replace(place=Place("cpu", "weight", 7)),)
    wrong = changed(program, "forward", index, writes=uses)
    broken(wrong, "forward", index, "there is no slot cpu weight 7")


def test_a_home_in_another_tier() -> None:
    program = program_of(blocks(3), "cpu", "cpu", "cpu")
    index, op = find(program.phases["forward"], verb=Verb.MOVE)
    uses = (op.reads[0]._replace(place=Place("nvme", "home")),)
    wrong = changed(program, "forward", index, reads=uses)
    broken(wrong, "forward", index, "weight of block0 lives on cpu, not nvme")


def test_a_value_larger_than_its_slot() -> None:
    program = streamed()
    for place, buffer in program.plan.slots.items():
        if place.use.endswith("_chunk"):  # Of streams: what takes them fits, see test_plan.
            continue
        slots = {**program.plan.slots, place: replace(buffer, bytes=0)}
        with pytest.raises(ProgramError, match=f"in {place.tier} {place.use} {place.number} of 0"):
            verify(with_plan(program, slots=slots))


# -- contents -----------------------------------------------------------------------------------


def test_a_slot_with_another_value() -> None:
    program = program_of(blocks(4))
    first, second = program.plan.weight_slot[:2]
    assert first
    assert second
    at = [i for i, op in enumerate(program.phases["forward"].ops) if op.verb is Verb.FORWARD]
    swapped = (Use(second, Value("weight", 0)),)
    wrong = changed(program, "forward", at[0], reads=swapped)
    broken(wrong, "forward", at[0], "reads device weight 1, which nothing in its phase has filled")
    swapped = (Use(first, Value("weight", 1)),)
    wrong = changed(program, "forward", at[1], reads=swapped)
    rule = "reads weight of block1 in device weight 0, which has weight of block0"
    broken(wrong, "forward", at[1], rule)


def test_a_slot_refilled_before_it_was_read() -> None:
    program = program_of(blocks(4), weight_slots=1)
    ops = program.phases["forward"].ops
    assert [op.verb for op in ops[:4]] == [Verb.MOVE, Verb.FORWARD] * 2
    wrong = with_phase(program, "forward", ops=(ops[0], ops[2], ops[1], *ops[3:]))
    broken(wrong, "forward", 2, "reads weight of block0 in device weight 0, which has .* block1")


@pytest.mark.parametrize("phase", ["forward", "backward_first", "backward_next", "norm", "update"])
def test_no_op_can_be_left_out(phase: str) -> None:
    program = streamed()
    ops = program.phases[phase].ops
    at_the_end = {
        Verb.FORWARD: "does not compute in the order of the profile",
        Verb.BACKWARD: "does not compute in the order of the profile",
        Verb.COLLECT: "does not bring home all that was made of",
        Verb.MOVE: "does not bring home all that was made of",
        Verb.ADD: "does not bring home all that was made of",
        Verb.UPDATE: "does not update every unit once",
        Verb.NORM: "does not square every gradient once, then combine",
    }
    for index, op in enumerate(ops):
        made = op.writes[0] if op.writes else None
        later = range(index + 1, len(ops))
        reader = next((i for i in later if made in ops[i].reads), None)
        if reader is None or op.verb in (Verb.UPDATE, Verb.ADD):
            broken(without(program, phase, index), phase, None, at_the_end[op.verb])
            continue
        assert made is not None
        where = place_text(made.place)
        rule = (
            f"{where}, which nothing in its phase has filled|shares {where}|in {where}, which has"
        )
        broken(without(program, phase, index), phase, reader - 1, rule)


def test_entry_that_nothing_provides() -> None:
    program = program_of(blocks(4))
    slot, other = program.plan.weight_slot[0], {program.plan.weight_slot[1]: 1}
    assert slot is not None
    wrong = with_phase(program, "backward_first", entry={slot: 0, **other})
    rule = "does not find at entry what it was compiled for: weight of block0 in device weight 0"
    broken(wrong, "backward_first", None, rule)
    wrong = with_phase(program, "forward", entry={slot: 0})
    broken(wrong, "forward", None, "does not find at entry")


def test_entry_that_is_not_declared() -> None:
    program = program_of(blocks(4))
    wrong = with_phase(program, "backward_first", entry={})
    broken(wrong, "backward_first", 0, "which nothing in its phase has filled")


def test_exit_that_is_not_true() -> None:
    program = program_of(blocks(4))
    slot = program.plan.weight_slot[0]
    assert slot is not None
    wrong = with_phase(program, "forward", exit={slot: 0})
    broken(wrong, "forward", None, "does not hold what it declares at exit: weight of block0")


def test_a_gradient_overwritten_in_its_slot() -> None:
    program = program_of(blocks(3))
    ops = program.phases["backward_first"].ops
    out, _ = find(program.phases["backward_first"], lane=Lane.D2H)
    waits = waits_of(program.phases["backward_first"])
    late = next(i for i, op in enumerate(ops) if op.verb is Verb.COLLECT and out in waits[i])
    assert ops[late].value.unit == 0
    wrong = without(program, "backward_first", out)
    rule = "overwrites gradient of block2 before it has left its slot"
    broken(wrong, "backward_first", late - 1, rule)


def test_a_micro_batch_that_replaces_the_sum() -> None:
    program = program_of(blocks(2))
    phases = {
        **program.phases,
        "backward_next": replace(program.phases["backward_first"], name="backward_next"),
    }
    rule = "does not bring home all that was made of gradient of block0"
    broken(replace(program, phases=phases), "backward_next", None, rule)


def test_a_gradient_added_twice() -> None:
    program = program_of(blocks(1))
    ops = program.phases["backward_next"].ops
    index, op = find(program.phases["backward_next"], verb=Verb.ADD)
    wrong = with_phase(program, "backward_next", ops=(*ops, op))
    broken(wrong, "backward_next", index + 1, "adds a gradient that is in the sum already")


@pytest.mark.parametrize("phase", ["forward", "backward_first"])
def test_compute_in_another_order(phase: str) -> None:
    program = program_of(blocks(2), "device", "device", "device")
    wrong = with_order(program, phase, [1, 0])
    broken(wrong, phase, None, "does not compute in the order of the profile")


def test_a_norm_of_some_units() -> None:
    program = program_of(blocks(2), "device", "device", "device", clips=True)
    for ops in ((), program.phases["norm"].ops[:-1]):
        wrong = with_phase(program, "norm", ops=ops)
        broken(wrong, "norm", None, "does not square every gradient once")


def test_an_update_done_twice() -> None:
    program = program_of(blocks(1))
    ops = program.phases["update"].ops
    wrong = with_phase(program, "update", ops=(*ops, ops[-1]))
    broken(wrong, "update", None, "does not update every unit once")


def test_a_unit_that_needs_no_weights_in_backward() -> None:
    profile = profile_of([unit("embed", 500, backward=False), unit("head", 700)])
    program = program_of(profile)
    verify(program)
    at = [op.value.unit for op in program.phases["backward_first"].ops if op.verb is Verb.BACKWARD]
    assert at == [1, 0]


def test_a_pass_is_refused_without_a_fetch() -> None:
    """In an order of its own, as the engine compiles one; the first unit's slot is filled."""
    plan = program_of(blocks(6), weight_slots=2).plan
    phase, _ = pass_phase(plan, Verb.BACKWARD, (4, 1, 1, 3, 0), 2, {plan.weight_slot[4]: 4})
    verify_pass(plan, phase)
    with pytest.raises(ProgramError, match=r"reads weight of block4 in .* which has nothing"):
        verify_pass(plan, replace(phase, entry={}))
    slots = {place: replace(buffer, bytes=0) for place, buffer in plan.slots.items()}
    with pytest.raises(
        ProgramError, match=r"an op: .* weight of block4 of 8192 bytes is in .* of 0"
    ):
        verify_pass(replace(plan, slots=slots), phase)
