"""Compile a plan into the phases of its program. Pure."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

from offload.layout import Place, Plan
from offload.ops import carry_out, compute, fetch, norm, square, update
from offload.program import Op, Phase, Program, Verb, cells
from offload.scoreboard import Scoreboard


def compile_program(plan: Plan) -> Program:
    """The phases of a model under `plan`, every wait in place."""
    collecting = gc.isenabled()
    gc.disable()  # Ops by the hundred thousand and no garbage: looking for it takes half the time.
    try:
        return _compile(plan)
    finally:
        if collecting:
            gc.enable()


def _compile(plan: Plan) -> Program:
    profile = plan.profile
    forward = compute_phase(plan, "forward", profile.forward, {})
    backward = [
        compute_phase(plan, name, profile.backward, dict(forward.exit))
        for name in ("backward_first", "backward_next")
    ]
    phases = [forward, *backward, _norm_phase(plan), _update_phase(plan)]
    return Program(plan, {phase.name: phase for phase in phases})


def compute_phase(plan: Plan, name: str, order: Sequence[int], held: dict[Place, int]) -> Phase:
    """Forward or backward in `order`, starting with `held` in the slots, which it changes."""
    verb = Verb.FORWARD if name == "forward" else Verb.BACKWARD
    entry: dict[Place, int] = {}
    ops: list[Op] = []
    touched: set[Place] = set()
    units = plan.profile.units
    steps = list(order)
    if verb is Verb.BACKWARD:
        steps += [u for u in range(len(units)) if units[u].trainable and u not in set(order)]
    for position, unit in enumerate(steps):
        slot = plan.weight_slot[unit]
        needed = verb is Verb.FORWARD or units[unit].backward
        if slot is not None and needed:
            if held.get(slot) != unit:
                ops += fetch(plan, unit, position)
            elif slot not in touched:
                entry[slot] = unit
            held[slot] = unit
            touched.add(slot)
        ops.append(compute(plan, unit, verb, position))
        if verb is Verb.BACKWARD and units[unit].trainable:
            first = name == "backward_first" and unit not in steps[:position]
            ops += carry_out(plan, unit, position + 1, first=first)
    return Phase(name, ordered(plan, ops), entry, dict(held))


def _norm_phase(plan: Plan) -> Phase:
    ops: list[Op] = []
    if plan.clips:
        for ordinal, (unit, chunk, _) in enumerate(update_order(plan)):
            ops += square(plan, unit, chunk, ordinal)
        ops.append(norm([op.writes[0] for op in ops if op.verb is Verb.SQUARE]))
    return Phase("norm", ordered(plan, ops), {}, {})


def _update_phase(plan: Plan) -> Phase:
    ops: list[Op] = []
    for unit, chunk, deadline in update_order(plan):
        ops += update(plan, unit, chunk, deadline)
    return Phase("update", ordered(plan, ops), {}, {})


def update_order(plan: Plan) -> Iterator[tuple[int, int, int]]:
    """(unit, chunk, deadline) of every chunk, in the order in which the next forward needs them."""
    profile = plan.profile
    first: dict[int, int] = {}
    for position, unit in enumerate(profile.forward):
        first.setdefault(unit, position)
    late = len(profile.forward)
    for unit in sorted(range(len(profile.units)), key=lambda u: (first.get(u, late), u)):
        for chunk in range(len(profile.units[unit].chunks)):
            yield unit, chunk, first.get(unit, late)


def ordered(plan: Plan, ops: Sequence[Op]) -> tuple[Op, ...]:
    """`ops`, which are new, with the waits of a phase of them in that order."""
    board: Scoreboard[int] = Scoreboard()
    for index, op in enumerate(ops):
        reads, writes = tuple(cells(plan, op.reads)), tuple(cells(plan, op.writes))
        waits = tuple(sorted(board.waits(reads, writes)))
        board.note(index, reads, writes)
        # Nobody has seen the op yet, and a copy of each takes a third of the compilation.
        object.__setattr__(op, "waits", waits)
    return tuple(ops)
