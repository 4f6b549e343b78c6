"""The engine issues the ops of the program, and the board of their waits stays small.

Who waits for whom follows from the accesses to each place in their order, by the one rule of
`Scoreboard`. So ops that are the same, with the same accesses to every place in the same order,
have the same waits; how a lane orders them beyond that is a matter of urgency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import recording
from offload.planning.layout import Place, Plan
from offload.program.compile import compute_phase, with_squares
from offload.program.ops import Op, Program, cells
from offload.runtime.native import RUNNER_VARIABLE
from tests.submitting import ops_of
from tests.training import TIERS, Run, attached, in_turn, plain, some_fast

NVME = ("nvme", "nvme", "nvme")
MIXED = ("nvme", "cpu", "device")
SAME = [(tier, other, tier) for tier in TIERS for other in TIERS if tier + other != "devicedevice"]
ON_DEVICE = ("device", "cpu", "device")

EARLY = "+update"
"""Of a backward in which updates begin."""

PLAIN = ("forward", "backward_first", "norm", "update")


def recorded(run: Run, loop: Callable[[Run], None]) -> list[Op]:
    """What the engine issues in a step, taken back or not."""
    lanes: Any = run.engine.runner._lanes
    start = lanes.start
    issued = list[tuple[Op, Any]]()

    def recording(phase: Any, *arguments: Any) -> list[Any]:
        tasks: list[Any] = start(phase, *arguments)
        issued.extend(zip(ops_of(phase), tasks, strict=True))
        return tasks

    lanes.start = recording
    try:
        loop(run)
        run.engine.settle()
    finally:
        lanes.start = start
    assert not any(task.cancelled for _, task in issued)
    return [op for op, _ in issued]


def bare(op: Op) -> Op:
    """Urgency apart."""
    return replace(op, deadline=0)


def accesses(plan: Plan, ops: Iterable[Op]) -> dict[object, list[object]]:
    """By place, who writes it and who reads it in between: writers in order, readers in any."""
    found: dict[object, list[tuple[bool, Op]]] = {}
    for op in ops:
        writes = list(cells(op.writes))
        for cell in cells(op.reads):
            if cell not in writes:
                found.setdefault(cell, []).append((False, bare(op)))
        for cell in writes:
            found.setdefault(cell, []).append((True, bare(op)))
    ordered: dict[object, list[object]] = {}
    for cell, entries in found.items():
        for writing, group in groupby(entries, lambda entry: entry[0]):
            run = [op for _, op in group]
            ordered.setdefault(cell, []).extend(run if writing else [Counter(run)])
    return ordered


def work(ops: Iterable[Op]) -> Counter[Op]:
    """But for the user's compute that needs nothing: nobody announces it."""
    return Counter(bare(op) for op in ops if op.reads or op.writes)


def micro_batches(count: int) -> Callable[[Run], None]:
    def loop(run: Run) -> None:
        for _ in range(count):
            run.loss().backward()
        run.step()

    return loop


def evaluation_between(run: Run) -> None:
    with torch.no_grad():
        run.loss()
    plain(run, 0)


def one_graph_twice(run: Run) -> None:
    loss = run.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    run.step()


def phase_of(program: Program, name: str, held: dict[Place, int]) -> list[Op]:
    """A phase by what the slots hold, which it changes."""
    base, plan = name.removesuffix(EARLY), program.plan
    ops = program.phases[base].ops
    if base in ("forward", "backward_first", "backward_next"):
        order = plan.profile.forward if base == "forward" else plan.profile.backward
        ops = (phase := compute_phase(plan, base, order, held)).ops
        held |= phase.exit
    if base.startswith("backward"):  # The last: no loop of several clips.
        ops = tuple(with_squares(plan, ops, again=base == "backward_next"))
    if base == "norm":
        ops = ops[-1:]
    if base != name:
        ops = (*ops, *program.phases["update"].ops)
    if base in (name, "update") and name != "update":
        return list(ops)
    for slot in [slot for slot, unit in held.items() if plan.profile.units[unit].trainable]:
        del held[slot]
    return list(ops)


LOOPS: dict[str, tuple[Callable[[Run], None], dict[str, Any], tuple[str, ...]]] = {
    "clipping": (micro_batches(1), {"max_grad_norm": 1.0}, PLAIN),
    "two micro-batches": (
        micro_batches(2),
        {},
        ("forward", "backward_first", "forward", "backward_next", "norm", "update"),
    ),
    "updates in backward": (
        micro_batches(1),
        {"micro_batches": 1},
        ("forward", "backward_first" + EARLY),
    ),
    "updates in the second backward": (
        micro_batches(2),
        {"micro_batches": 2},
        ("forward", "backward_first", "forward", "backward_next" + EARLY),
    ),
    "evaluation": (evaluation_between, {}, ("forward", *PLAIN)),
    "one graph twice": (
        one_graph_twice,
        {},
        ("forward", "backward_first", "backward_next", "norm", "update"),
    ),
}


def in_steady_state(run: Run, loop: Callable[[Run], None]) -> list[Op]:
    """The ops of a step after two, in which orders are learnt and slots filled."""
    for _ in range(2):
        loop(run)
    run.engine.settle()
    issued = recorded(run, loop)
    assert run.engine.report().misses == 0
    return issued


def assert_same_ops(plan: Plan, issued: Sequence[Op], due: Sequence[Op]) -> None:
    assert work(issued) == work(due)
    found, wanted = accesses(plan, issued), accesses(plan, due)
    assert found.keys() == wanted.keys()
    for cell, order in wanted.items():
        assert found[cell] == order, cell


@pytest.mark.parametrize("placement", some_fast(SAME[::-1], fast=4), ids="-".join)
def test_a_step_issues_the_ops_of_the_program(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    with attached(placement, tmp_path) as run:
        issued = in_steady_state(run, micro_batches(1))
        due = [op for name in PLAIN for op in recording.program_of(run.engine).phases[name].ops]
        assert_same_ops(run.engine.plan, issued, due)


@pytest.mark.parametrize(("name", "placement"), in_turn(LOOPS, [ON_DEVICE, NVME, MIXED]))
def test_every_loop_issues_the_phases_as_run(
    name: str, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    loop, config, names = LOOPS[name]
    with attached(placement, tmp_path, **config) as run:
        issued = in_steady_state(run, loop)
        due, held = list[Op](), dict[Any, int]()
        for phase_name in names:
            due += phase_of(recording.program_of(run.engine), phase_name, held)
        assert_same_ops(run.engine.plan, issued, due)


# -- the board ----------------------------------------------------------------------------------


def longest(engine: offload.Engine) -> int:
    """Of the reference, as the native runner keeps the same."""
    lanes: Any = engine.runner._lanes
    return max(map(len, lanes._board._accesses.values()), default=0)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNNER_VARIABLE, "python")


@pytest.mark.parametrize("placement", [ON_DEVICE, MIXED, ("cpu", "cpu", "nvme")], ids="-".join)
def test_what_is_kept_of_a_place_does_not_grow_with_the_steps(
    reference: None, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    with attached(placement, tmp_path) as run:
        for number in range(12):
            plain(run, number)
            with torch.no_grad():
                run.loss()
        assert longest(run.engine) <= 12, "more than what two steps leave"


def test_what_is_kept_of_a_place_does_not_grow_with_forwards(
    reference: None, tmp_path: Path
) -> None:
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run, torch.no_grad():
        for _ in range(60):
            run.loss()
        assert longest(run.engine) <= 6
