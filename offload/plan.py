"""Decide: which piece of which value lives in which tier. Pure.

`plan` takes what is asked (Config), what is needed (Profile) and what there is (Machine). Kinds
that the config forces to a tier go there; of the others the longest prefix of a fixed list that
fits goes to the device, the next to the cpu, the rest to nvme. The same input gives the same plan.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
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
    budgets, search = budgets_of(config, machine), _Search(profile, config)
    count = search.count
    floor, ceiling = 0 if config.nvme_path else count, count
    for on_device, weight_slots in search.candidates():
        if search.device(on_device, weight_slots) > budgets["device"]:
            continue
        lowest = max(on_device, floor)
        for on_cpu in range(ceiling, lowest - 1, -1):
            if search.nvme(on_cpu) > budgets["nvme"]:
                break  # Fewer on the cpu are more on nvme.
            if search.cpu(on_device, on_cpu) <= budgets["cpu"]:
                found = search.made(on_device, on_cpu, weight_slots, budgets)
                _check_machine(found, machine)
                return found
        if config.nvme_path:
            ceiling = lowest - 1  # With fewer on the device, these need more of the cpu yet.
    raise BudgetError(_refusal(search, budgets, config, machine))


class _Search:
    """All arrangements that the config allows, and what each takes of each tier.

    An arrangement is two numbers: how many of the auto values live on the device, and how many on
    the device or the cpu. What it takes of a tier changes one way with each (see
    [Note: More memory is never slower]), but for the rings, which are small.
    """

    def __init__(self, profile: Profile, config: Config) -> None:
        self.profile, self.states = profile, config.states
        self.clips, self.open = config.max_grad_norm is not None, bool(config.nvme_path)
        choices = (config.params, config.gradients, config.optimizer)
        self.forced: dict[Kind, Choice] = dict(zip(PLACED, choices))
        self.auto: list[Kind] = [kind for kind in PLACED if self.forced[kind] == "auto"]
        self.reserve = self.auto if self.open else []
        self.sizes = Sizes(profile, config.states)
        self.count = len(self.auto) * len(profile.units)
        sizes = (size for kind in self.auto for size in self.sizes.value[kind])
        self._bytes_before = [0, *itertools.accumulate(sizes)]
        self._nvme: dict[int, int] = {}

    def candidates(self) -> list[tuple[int, int]]:
        """Numbers of values on the device and of weight slots, the most of the device first."""
        found = [(on_device, WEIGHT_SLOTS_MAX) for on_device in range(self.count, -1, -1)]
        return found + [(0, slots) for slots in range(WEIGHT_SLOTS_MAX - 1, 0, -1)]

    def placements(self, on_device: int, on_cpu: int) -> list[Placement]:
        units, tiers = range(len(self.profile.units)), list[Sequence[Tier]]()
        for kind, choice in self.forced.items():
            first = self.auto.index(kind) * len(units) if choice == "auto" else 0
            ranks = [(first + u >= on_device) + (first + u >= on_cpu) for u in units]
            tiers.append([TIERS[rank] if choice == "auto" else choice for rank in ranks])
        return [Placement(*homes) for homes in zip(*tiers)]

    def memory(self, on_device: int, on_cpu: int, weight_slots: int) -> dict[Tier, int]:
        chosen = self.placements(on_device, on_cpu)
        return lay_out_memory(
            self.profile, chosen, self.sizes, self.clips, weight_slots, self.reserve
        ).used

    def device(self, on_device: int, weight_slots: int) -> int:
        """Bytes taken of the device, however many of the others live on the cpu."""
        return self.memory(on_device, self.count, weight_slots)["device"]

    def cpu(self, on_device: int, on_cpu: int) -> int:
        """Bytes taken of the cpu, however many weight slots the device has."""
        return self.memory(on_device, on_cpu, 1)["cpu"]

    def nvme(self, on_cpu: int) -> int:
        """Bytes of the file; they grow as `on_cpu` falls."""
        if on_cpu not in self._nvme:
            chosen = self.placements(0, on_cpu)
            self._nvme[on_cpu] = self.sizes.in_file(self.profile, chosen)
        return self._nvme[on_cpu]

    def made(self, on_device: int, on_cpu: int, slots: int, budgets: dict[Tier, int]) -> Plan:
        return lay_out(
            self.profile,
            self.placements(on_device, on_cpu),
            budgets=budgets,
            clips=self.clips,
            states=self.states,
            weight_slots=slots,
            reserve=self.reserve,
        )

    def least(self, tier: Tier, budgets: dict[Tier, int]) -> int | None:
        """A budget of a tier, about the least, that would do, the others given; None if none."""
        candidates = self.candidates()
        if tier == "device":
            # The less lives on the device, the less of the other tiers is left for the rest.
            done = bisect_left(
                candidates,
                True,
                key=lambda one: self._least_of("cpu", one[0], budgets) > budgets["cpu"],
            )
            return min((self.device(*one) for one in candidates[:done]), default=None)
        for on_device, weight_slots in candidates:
            if self.device(on_device, weight_slots) <= budgets["device"]:
                found = self._least_of(tier, on_device, budgets)
                return int(found) if math.isfinite(found) else None
        return None

    def _least_of(self, tier: Tier, on_device: int, budgets: dict[Tier, int]) -> float:
        """The least of cpu or nvme with so many on the device, within the budget of the other."""
        numbers = range(on_device if self.open else self.count, self.count + 1)
        if tier == "nvme":
            fitting = (n for n in reversed(numbers) if self._may_fit(on_device, n, budgets["cpu"]))
            most = (n for n in fitting if self.cpu(on_device, n) <= budgets["cpu"])
            return next((self.nvme(n) for n in most), math.inf)
        first = bisect_left(numbers, True, key=lambda n: self.nvme(n) <= budgets["nvme"])
        least = math.inf
        for on_cpu in numbers[first:]:
            if not self._may_fit(on_device, on_cpu, least):
                break
            least = min(least, self.cpu(on_device, on_cpu))
        return least

    def _may_fit(self, on_device: int, on_cpu: int, budget: float) -> bool:
        """False where the homes on the cpu alone are more than a budget."""
        return self._bytes_before[on_cpu] - self._bytes_before[on_device] <= budget


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


_FIELDS: dict[Tier, str] = {
    "device": "device_memory",
    "cpu": "cpu_memory",
    "nvme": "nvme_space",
}


def _refusal(search: _Search, budgets: dict[Tier, int], config: Config, machine: Machine) -> str:
    """Why nothing fits: what is needed of each tier, what is given, what to raise."""
    free = {"cpu": machine.cpu_bytes, "nvme": machine.nvme_bytes}
    free["device"] = machine.cpu_bytes if machine.device_is_cpu else machine.device_bytes
    needed = {tier: search.least(tier, budgets) for tier in TIERS}
    alone = any(amount is not None for amount in needed.values())
    if not alone:
        least = search.made(0, 0 if search.open else search.count, 1, budgets)
        needed = {tier: least.arena_bytes(tier) for tier in TIERS}
    lines = [
        "the model does not fit the budgets, even with as little kept in memory as asked",
        f"{'tier':8}{'needed':>14}{'given':>14}   budget",
    ]
    for tier, amount in needed.items():
        mark = ""
        if amount is not None and amount > budgets[tier]:
            mark = "  <-- too small"
            mark += f" ({format_bytes(free[tier])} is free)" if amount > free[tier] else ""
        shown = "-" if amount is None else format_bytes(amount)
        name = _FIELDS[tier]
        lines.append(
            f"{tier:8}{shown:>14}{format_bytes(budgets[tier]):>14}"
            f"   {name} (--{name.replace('_', '-')}){mark}"
        )
    marked = sum("<--" in line for line in lines)
    if marked > 1:
        lines.append(
            "raising " + ("any one" if alone else "all") + " of the marked budgets will do"
        )
    lines.append(_way_out(config, budgets, marked))
    return "\n".join(lines)


def _way_out(config: Config, budgets: dict[Tier, int], marked: int) -> str:
    kinds = "params, gradients or optimizer (--params, --gradients, --optimizer)"
    if not config.nvme_path:
        return (
            "no nvme path is given: nvme_path (--nvme-path DIR) on a local drive opens a third tier"
        )
    if budgets["nvme"] == 0 and config.nvme_space is None:
        return (
            f"nothing is free on nvme_path {config.nvme_path[0]} (--nvme-path): free some space, "
            "or give a directory on another drive"
        )
    raised = "raise the marked budget" if marked == 1 else "raise them"
    return f"{raised}, or move {kinds} to a tier with room"
