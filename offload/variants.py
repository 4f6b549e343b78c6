"""The phases as the engine runs them: nothing at hand is fetched, updates begin in backward. Pure.

[Note: As it runs]
`Program` has every phase once, as it runs in a plain step. The engine makes its ops by the same
functions, unit by unit, and differs in two ways. A pass starts with what its slots hold, whatever
ran before: after a backward (more micro-batches, or a second backward of one graph) that is more
than `Phase.entry` asks. After an update it holds no weights that the update has changed. And in the
backward that `Config.micro_batches` makes the last of a step, the update of a unit is issued as
soon as the unit's own backward is over, unless the step clips.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from offload.layout import Place, Plan
from offload.ops import update
from offload.phases import compute_phase, ordered, update_order
from offload.program import Op, Phase, Program

EARLY = "+update"
"""Ends the name of a backward in which updates begin."""


def as_run(program: Program, name: str, held: Mapping[Place, int]) -> Phase:
    """A phase as the engine runs it where the weight slots hold the units `held`.

    Args:
        program: what was compiled.
        name: of one of its phases; of a backward also with `EARLY`.
        held: what the phase before has left; its `exit`.
    """
    plan, profile = program.plan, program.plan.profile
    if name == "norm":
        return replace(program.phases[name], exit=dict(held))
    if name == "update":
        return replace(program.phases[name], exit=_unchanged(plan, held))
    base = name.removesuffix(EARLY)
    order = profile.forward if base == "forward" else profile.backward
    phase = compute_phase(plan, base, order, dict(held))
    return _with_updates(plan, phase) if base != name and not plan.clips else phase


def _unchanged(plan: Plan, held: Mapping[Place, int]) -> dict[Place, int]:
    """What slots hold of weights that no update changes."""
    return {slot: unit for slot, unit in held.items() if not plan.profile.units[unit].trainable}


def _with_updates(plan: Plan, phase: Phase) -> Phase:
    """A backward with the update of each unit behind the last of the unit's own ops."""
    updates: dict[int, list[Op]] = {}
    for unit, chunk, deadline in update_order(plan):
        updates.setdefault(unit, []).extend(update(plan, unit, chunk, deadline))
    last = {op.value.unit: index for index, op in enumerate(phase.ops)}
    ops: list[Op] = []
    for index, op in enumerate(phase.ops):
        ops.append(op)
        if last[op.value.unit] == index:
            ops += updates.pop(op.value.unit, [])
    return replace(phase, ops=ordered(plan, ops), exit=_unchanged(plan, phase.exit))
