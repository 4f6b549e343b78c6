"""The phases as the engine runs them: proved, and what would be wrong with them found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from offload.planning.layout import Place, Plan
from offload.planning.profile import profile_of
from offload.planning.tiers import Tier
from offload.program.compile import EARLY, as_run, compile_program, with_waits
from offload.program.ops import Phase, Program, Value, Verb
from offload.program.verify import RUNS, verify, verify_runs
from tests.profiles import all_placements, blocks, plans, program_of, unit
from tests.test_verify import BACKWARD, broken


def test_runs_have_every_pair_that_the_engine_may_run_and_no_other() -> None:
    early = [name + EARLY for name in BACKWARD]
    ends = ("forward", *BACKWARD, *early, "update")
    possible = {(one, two) for one in ends for two in ("forward", "norm")}
    possible |= {("forward", one) for one in (*BACKWARD, *early)}
    possible |= {(one, two) for one in BACKWARD for two in (*BACKWARD, early[1])}
    possible |= {("update", "backward_first"), ("norm", "update")}
    assert set(pairwise(RUNS)) == possible


@pytest.mark.parametrize("weight_slots", [1, 2])
def test_every_placement_verifies_as_run(weight_slots: int) -> None:
    for p in all_placements():
        homes = (p.weight, p.gradient, p.state)
        verify_runs(program_of(blocks(3), *homes, weight_slots=weight_slots))


@given(plans(most=4))
def test_random_models_and_placements_verify_as_run(plan: Plan) -> None:
    verify_runs(compile_program(plan))


def broken_as_run(program: Program, phase: str, index: int | None, rule: str) -> None:
    verify(program)
    broken(program, phase, index, rule, by=verify_runs)


def as_run_wrongly(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Phase]) -> None:
    """Let `wrong` make the phases as run, from those that are right."""

    def made(program: Program, name: str, held: Mapping[Place, int]) -> Phase:
        return wrong(as_run(program, name, held), name)

    monkeypatch.setattr("offload.program.verify.as_run", made)


def test_slots_that_keep_weights_from_before_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(blocks(2), "cpu", "device", "device")
    slot = program.plan.weight_slot[1]
    assert slot is not None
    as_run_wrongly(
        monkeypatch,
        lambda phase, name: replace(phase, exit={slot: 1}) if name == "update" else phase,
    )
    broken_as_run(
        program, "update", None, "does not hold what it declares at exit: weight of block1"
    )


def test_an_early_update_that_keeps_weights_from_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = program_of(blocks(2), "cpu", "device", "device")
    slot = program.plan.weight_slot[0]
    assert slot is not None
    as_run_wrongly(
        monkeypatch,
        lambda phase, name: replace(phase, exit={slot: 0}) if EARLY in name else phase,
    )
    broken_as_run(program, "backward_first", None, "does not hold what it declares at exit")


@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
def test_an_early_update_does_not_overtake_its_backward(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of(blocks(2), tier, tier, tier)
    phase = as_run(program, "backward_first" + EARLY, {})
    of_update = [op.verb is Verb.UPDATE for op in phase.ops]
    first = of_update.index(True)
    assert phase.ops[first].waits
    wrong = [replace(op, waits=()) if i == first else op for i, op in enumerate(phase.ops)]
    as_run_wrongly(
        monkeypatch,
        lambda right, name: replace(right, ops=tuple(wrong)) if EARLY in name else right,
    )
    broken_as_run(program, "backward_first", first, "does not wait for op")


def test_an_update_before_the_last_gradient_of_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = profile_of([unit("a", 100), unit("b", 100)], [0, 1, 0], [0, 1, 0])
    program = program_of(profile, "device", "device", "device")

    def wrong(phase: Phase, name: str) -> Phase:
        if EARLY not in name:
            return phase
        at = next(i for i, op in enumerate(phase.ops) if op.value == Value("state", 0))
        ops = [phase.ops[0], phase.ops[at], *phase.ops[1:at], *phase.ops[at + 1 :]]
        return replace(phase, ops=with_waits(ops))

    as_run_wrongly(monkeypatch, wrong)
    rule = "updates state of a before its gradient is whole"
    broken_as_run(program, "backward_first", None, rule)


def test_an_early_update_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(blocks(2), "device", "device", "device")
    as_run_wrongly(
        monkeypatch,
        lambda phase, name: replace(phase, ops=phase.ops[:-1]) if EARLY in name else phase,
    )
    broken_as_run(program, "backward_first", None, "does not update every unit once")
