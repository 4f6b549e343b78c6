"""Decide: which piece of which value lives in which tier. Pure.

`plan` takes what is asked (Config), what is needed (Profile) and what there is (Machine). Kinds
that the config forces to a tier go there; of the others the longest prefix of a fixed list that
fits goes to the device, the next to the cpu, the rest to nvme. The same input gives the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.config import TIERS, Choice, Config, Tier, format_bytes
from offload.layout import (
    PLACED,
    WEIGHT_SLOTS_MAX,
    Kind,
    Placement,
    Plan,
    Sizes,
    lay_out,
    lay_out_memory,
)
from offload.machine import Machine
from offload.profile import Profile


class BudgetError(ValueError):
    """What is asked does not fit what is given; the message is a table and what to change."""


def budgets_of(config: Config, machine: Machine) -> dict[Tier, int]:
    """The hard budget of each tier in bytes: what the config gives, or a share of what is free."""
    device = config.bytes_of("device_memory")
    if device is None:
        device = machine.device_bytes // 2
    cpu = config.bytes_of("cpu_memory")
    if cpu is None:
        left = machine.cpu_bytes - (device if machine.device_is_cpu else 0)
        cpu = max(0, left) // 2
    nvme = config.bytes_of("nvme_space")
    if nvme is None:
        nvme = machine.nvme_bytes * 9 // 10
    return {"device": device, "cpu": cpu, "nvme": nvme if config.nvme_path else 0}


def plan(profile: Profile, config: Config, machine: Machine) -> Plan:
    """Decide where everything lives.

    [Note: More memory is never slower]
    Of the auto kinds the first `on_device` of a fixed list live on the device, those up to
    `on_cpu` on the cpu, the others on nvme. Before any lives on the device there are all weight
    slots. What the device needs does not depend on `on_cpu`, and with the reserve for chunks what
    the cpu needs falls as `on_device` grows. So the first that fits, the most on the device and
    then the most on the cpu, is in no value slower than what fits smaller budgets.

    Raises:
        BudgetError: no arrangement that the config allows fits the budgets or the machine.
    """
    budgets, clips = budgets_of(config, machine), config.max_grad_norm is not None
    forced: dict[Kind, Choice] = {
        "weight": config.params,
        "gradient": config.gradients,
        "state": config.optimizer,
    }
    auto: list[Kind] = [kind for kind in PLACED if forced[kind] == "auto"]
    reserve = auto if config.nvme_path else []
    units, sizes = range(len(profile.units)), Sizes(profile, config.states)
    count = len(auto) * len(units)

    def placements(on_device: int, on_cpu: int) -> list[Placement]:
        tiers: dict[Kind, list[Tier]] = {}
        for kind, choice in forced.items():
            first = auto.index(kind) * len(units) if choice == "auto" else 0
            ranks = [(first + u >= on_device) + (first + u >= on_cpu) for u in units]
            tiers[kind] = [TIERS[rank] if choice == "auto" else choice for rank in ranks]
        return [Placement(*homes) for homes in zip(*(tiers[kind] for kind in PLACED))]

    def fits(chosen: list[Placement], weight_slots: int, tiers: Sequence[Tier]) -> bool:
        memory = lay_out_memory(profile, chosen, sizes, clips, weight_slots, reserve)
        used = memory.used | {"nvme": sizes.in_file(profile, chosen) if "nvme" in tiers else 0}
        return all(used[tier] <= budgets[tier] for tier in tiers)

    def made(chosen: list[Placement], weight_slots: int) -> Plan:
        return lay_out(
            profile,
            chosen,
            budgets=budgets,
            clips=clips,
            states=config.states,
            weight_slots=weight_slots,
            reserve=reserve,
        )

    floor, ceiling = 0 if config.nvme_path else count, count
    candidates = [(on_device, WEIGHT_SLOTS_MAX) for on_device in range(count, -1, -1)]
    candidates += [(0, weight_slots) for weight_slots in range(WEIGHT_SLOTS_MAX - 1, 0, -1)]
    for on_device, weight_slots in candidates:
        if not fits(placements(on_device, count), weight_slots, ("device",)):
            continue
        lowest = max(on_device, floor)
        for on_cpu in range(ceiling, lowest - 1, -1):
            chosen = placements(on_device, on_cpu)
            if fits(chosen, weight_slots, ("cpu", "nvme")):
                found = made(chosen, weight_slots)
                _check_machine(found, machine)
                return found
        if config.nvme_path:
            ceiling = lowest - 1  # With fewer on the device, these need more of the cpu yet.
    raise BudgetError(_refusal(made(placements(0, floor), 1), config, machine))


def _check_machine(found: Plan, machine: Machine) -> None:
    """Raise when the budgets promise more than the machine has free."""
    device, cpu = found.arena_bytes("device"), found.arena_bytes("cpu")
    host = cpu + (device if machine.device_is_cpu else 0)
    if host > machine.cpu_bytes:
        raise BudgetError(
            f"the plan takes {format_bytes(host)} of host memory but only "
            f"{format_bytes(machine.cpu_bytes)} is free (cgroup limits counted): lower "
            "device_memory or cpu_memory, or move values to nvme with --nvme-path"
        )
    if not machine.device_is_cpu and device > machine.device_bytes:
        raise BudgetError(
            f"the plan takes {format_bytes(device)} of device memory but only "
            f"{format_bytes(machine.device_bytes)} is free: lower device_memory, or move values "
            "to cpu or nvme"
        )


_FLAGS: dict[Tier, str] = {
    "device": "--device-memory",
    "cpu": "--cpu-memory",
    "nvme": "--nvme-space",
}


def _refusal(least: Plan, config: Config, machine: Machine) -> str:
    """Why nothing fits: what the smallest plan needs of each tier, what is given, the flag."""
    lines = [
        "the model does not fit the budgets, even with as little kept in memory as asked",
        f"{'tier':8}{'needed':>14}{'given':>14}   flag",
    ]
    for use in least.tiers():
        needed = use.resident_bytes + use.staging_bytes
        mark = "  <-- too small" if needed > use.budget_bytes else ""
        lines.append(
            f"{use.tier:8}{format_bytes(needed):>14}{format_bytes(use.budget_bytes):>14}"
            f"   {_FLAGS[use.tier]}{mark}"
        )
    if not config.nvme_path:
        lines.append("no nvme path is given: --nvme-path DIR on a local drive opens a third tier")
    else:
        lines.append(
            "raise the marked budget, or move a kind (--params, --gradients, --optimizer)"
            " to a tier with room"
        )
    return "\n".join(lines)
