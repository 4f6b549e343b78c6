"""The units of a model and their plan: how it is cut, over ranks too, and where the parts live."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from offload.config import Config
from offload.model.units import UnitModules, merged
from offload.planning.layout import Plan
from offload.planning.machine import Machine
from offload.planning.planner import BudgetError, Grain, plan_cut
from offload.planning.profile import (
    ALONE,
    CHUNK_ELEMENTS,
    KINDS,
    Parameter,
    Profile,
    Sharding,
    TensorPart,
    Unit,
    lay_out_unit,
    profile_of,
)
from offload.planning.tiers import TIERS
from offload.runtime.torch_internals import local_part

UNIT_COST_BYTES = 256 << 10
"""What one more unit costs in a step, as so many bytes do that live one tier further away."""


def spec_of(
    group: UnitModules,
    gradient_dtype: str,
    chunk_elements: int = CHUNK_ELEMENTS,
    ranks: int = 1,
    *,
    trains: bool,
) -> Unit:
    """The layout of a unit whose parameters are known."""
    wanted = [
        Parameter(
            name,
            tuple(local_part(p).shape),
            str(p.dtype)[6:],
            trains and p.requires_grad,
            part=_part_of(p),
        )
        for name, p in group.named.items()
    ]
    return lay_out_unit(
        group.name,
        wanted,
        gradient_dtype=gradient_dtype,
        lasting=group.lasting,
        backward=group.backward,
        chunk_elements=chunk_elements,
        ranks=ranks,
    )


def _part_of(parameter: Any) -> TensorPart | None:
    """What is here of a DTensor on a mesh of one dimension; None of any other parameter."""
    if local_part(parameter) is parameter:
        return None
    (placement,), mesh, shape = parameter.placements, parameter.device_mesh, tuple(parameter.shape)
    number, start = mesh.get_local_rank() if placement.is_shard() else 0, [0] * len(shape)
    if number:  # As torch cuts: the last part may be shorter.
        start[placement.dim] = number * -(-shape[placement.dim] // mesh.size())
    return TensorPart(number, shape, tuple(start))


def planned_alike(
    cut: Callable[[Sharding], tuple[list[UnitModules], Plan]], group: Any, config: Config
) -> tuple[list[UnitModules], Plan]:
    """The plan of each rank of a group, in which ranks send each other least: of those that
    `Config.shard` allows the first that fits all of them. Raises BudgetError where none fits here,
    RuntimeError where none fits another rank."""
    sharding = Sharding(group.position, group.ranks)
    if config.shard != 3:
        try:
            with group.all_or_none():
                found = cut(replace(sharding, keeps=True, late=config.shard == 1))
                if config.shard == "auto" and spills(found[1], lambda: cut(sharding)[1]):
                    raise BudgetError("kept weights would push other values to a drive")
            return found
        except (BudgetError, RuntimeError):
            if config.shard != "auto":
                raise
    with group.all_or_none():
        found = cut(sharding)
        if group.folds < group.ranks:  # Columns keep what they have where nothing else has to go.
            with suppress(BudgetError):
                more = cut(replace(sharding, column=group.folds))
                found = more if _but_columns(more[1]) == _but_columns(found[1]) else found
    return found


def spills(keeping: Plan, other: Callable[[], Plan]) -> bool:
    """Whether a plan that keeps gathered weights has more on a drive than another has."""

    def on_nvme(plan: Plan) -> int:
        return sum(one.of(kind) == "nvme" for one in plan.placements for kind in KINDS)

    return on_nvme(keeping) > 0 and on_nvme(keeping) > on_nvme(other())


def _but_columns(plan: Plan) -> object:
    """Where values live, and the slots but for those that columns keep."""
    return plan.placements, {at: b.bytes for at, b in plan.slots.items() if at.use != "column"}


def planned(
    groups: list[UnitModules],
    config: Config,
    machine: Machine,
    rule: str,
    sharding: Sharding = ALONE,
    *,
    trains: bool,
) -> tuple[list[UnitModules], Plan]:
    """The units and their plan: small neighbours fused or not, whichever costs least. Larger units
    have larger slots, which leave less room in the fast tiers. A BudgetError where nothing fits
    tells what would do where none are fused."""

    def profile(groups: list[UnitModules], cut: Grain) -> Profile:
        how = config.gradient_dtype, cut.elements, sharding.ranks
        units = [spec_of(group, *how, trains=trains) for group in groups]
        return profile_of(units, chunk_stages=cut.stages, sharding=sharding)

    def cost(groups: list[UnitModules]) -> tuple[float, list[UnitModules], Plan | BudgetError]:
        try:
            found = plan_cut(partial(profile, groups), config, machine, rule=rule)
        except BudgetError as error:
            return math.inf, groups, error
        away = sum(row.bytes * TIERS.index(row.tier) for row in found.rows())
        return away + UNIT_COST_BYTES * len(groups), groups, found

    fused = profile(groups, Grain()).fusions([group.listed for group in groups])
    ways = [groups, *(list(merged(groups, parts)) for parts in fused)]
    _, chosen, found = min(map(cost, ways), key=itemgetter(0))
    if isinstance(found, BudgetError):
        raise found
    return chosen, found
