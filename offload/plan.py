"""Decide: which piece of which value lives in which tier. Pure.

`plan` takes what is asked (Config), what is needed (Profile) and what there is (Machine). Kinds
that the config forces to a tier go there; of the others the longest prefix of a fixed list that
fits goes to the device, the next to the cpu, the rest to nvme. The same input gives the same plan.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

from offload.config import BUDGETS, TIERS, Choice, Config, Tier, format_bytes
from offload.layout import WEIGHT_SLOTS_MAX, Plan, lay_out, lay_out_memory
from offload.machine import Machine
from offload.profile import Profile, StateChoice
from offload.records import KINDS, Kind
from offload.sizes import Placement, Sizes


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


def plan(profile: Profile, config: Config, machine: Machine, *, rule: str = "adam") -> Plan:
    """Decide where everything lives, the states those of an update's `rule`.

    Raises:
        BudgetError: no arrangement that the config allows fits the budgets or the machine.
    """
    states = StateChoice(rule, config.states, on_accelerator=not machine.device_is_cpu)
    budgets, search = budgets_of(config, machine), _Search(profile, config, states)
    for arrangement in search.fitting(budgets):
        found = search.made(arrangement, budgets)
        taken = {tier: found.taken_bytes(tier) for tier in TIERS}
        if lacking := _lacking(taken, machine) or _roomless(taken["nvme"], config, machine):
            raise BudgetError(lacking)
        return found
    raise BudgetError(_refusal(search, budgets, config, machine))


class _Arrangement(NamedTuple):
    """How many of the auto values live on the device, and how many there or on the cpu."""

    on_device: int
    on_cpu: int
    weight_slots: int


class _Search:
    """All arrangements that the config allows, and what each takes of each tier.

    [Note: More memory is never slower]
    Of the values of the auto kinds the first `on_device` of a fixed list live on the device, those
    up to `on_cpu` on the cpu, the others on nvme. Before any lives on the device there are all
    weight slots. What the device takes does not depend on `on_cpu`. With an nvme path the cpu keeps
    a reserve for chunks, so what it takes falls as `on_device` grows; without one, `on_cpu` is
    always all of the list. Either way the first that fits, the most on the device and then the most
    on the cpu, is in no value slower than what fits smaller budgets.
    """

    def __init__(self, profile: Profile, config: Config, states: StateChoice) -> None:
        self.profile, self.states = profile, states
        self.clips, self.open = config.max_grad_norm is not None, bool(config.nvme_path)
        self.early = config.micro_batches is not None and not self.clips
        choices = (config.params, config.gradients, config.optimizer)
        self.forced: dict[Kind, Choice] = dict(zip(KINDS, choices))
        self.auto: list[Kind] = [kind for kind in KINDS if self.forced[kind] == "auto"]
        self.reserve = self.auto if self.open else []
        self.sizes = Sizes(profile, self.states)
        self.count = len(self.auto) * len(profile.units)
        self.device, self.cpu, self.nvme = cache(self._device), cache(self._cpu), cache(self._nvme)

    def fitting(self, budgets: Mapping[Tier, float]) -> Iterator[_Arrangement]:
        """What fits, the most on the device first; with so many there, the most on the cpu."""
        most = self.count
        for on_device, weight_slots in self.candidates():
            if self.device(on_device, weight_slots) <= budgets["device"]:
                numbers = self.numbers(on_device, most, budgets["nvme"])
                fits = (n for n in reversed(numbers) if self.cpu(on_device, n) <= budgets["cpu"])
                on_cpu = next(fits, None)
                if on_cpu is not None:
                    yield _Arrangement(on_device, on_cpu, weight_slots)
                if self.open:  # With fewer on the device, what failed needs more of the cpu yet.
                    most = numbers.start - 1 if on_cpu is None else on_cpu

    def candidates(self) -> list[tuple[int, int]]:
        """Numbers of values on the device and of weight slots, the most of the device first."""
        found = [(on_device, WEIGHT_SLOTS_MAX) for on_device in range(self.count, -1, -1)]
        return found + [(0, slots) for slots in range(WEIGHT_SLOTS_MAX - 1, 0, -1)]

    def numbers(self, on_device: int, most: int, nvme_budget: float) -> range:
        """The values of `on_cpu`, up to `most`, whose rest fits on nvme."""
        numbers = range(on_device if self.open else self.count, most + 1)
        return numbers[bisect_left(numbers, True, key=lambda n: self.nvme(n) <= nvme_budget) :]

    def least(self, tier: Tier, budgets: Mapping[Tier, float]) -> int | None:
        """The least budget of a tier that would do, the others given; None if none would."""
        fitting = self.fitting({**budgets, tier: math.inf})
        if tier == "device":
            return min((self.device(n, slots) for n, _, slots in fitting), default=None)
        # With an nvme path, the more is on the device the less is taken of every other tier.
        best = list(itertools.islice(fitting, 1 if self.open else None))
        if tier == "nvme":
            return min((self.nvme(one.on_cpu) for one in best), default=None)
        taken = (
            self.cpu(one.on_device, on_cpu)
            for one in best
            for on_cpu in self.numbers(one.on_device, one.on_cpu, budgets["nvme"])
        )
        return min(taken, default=None)

    def placements(self, on_device: int, on_cpu: int) -> list[Placement]:
        """The homes of every unit's values."""
        units, tiers = range(len(self.profile.units)), list[Sequence[Tier]]()
        for kind, choice in self.forced.items():
            first = self.auto.index(kind) * len(units) if choice == "auto" else 0
            ranks = [(first + u >= on_device) + (first + u >= on_cpu) for u in units]
            tiers.append([TIERS[rank] if choice == "auto" else choice for rank in ranks])
        return [Placement(*homes) for homes in zip(*tiers)]

    def made(self, arrangement: _Arrangement, budgets: Mapping[Tier, int]) -> Plan:
        """The plan, down to the byte."""
        return lay_out(
            self.profile,
            self.placements(arrangement.on_device, arrangement.on_cpu),
            budgets=budgets,
            clips=self.clips,
            states=self.states,
            weight_slots=arrangement.weight_slots,
            reserve=self.reserve,
            early=self.early,
        )

    def smallest(self) -> _Arrangement:
        """The one with the least in memory."""
        return _Arrangement(0, 0 if self.open else self.count, 1)

    def taken(self, one: _Arrangement) -> dict[Tier, int]:
        """Bytes that it takes of each tier."""
        return {
            "device": self.device(one.on_device, one.weight_slots),
            "cpu": self.cpu(one.on_device, one.on_cpu),
            "nvme": self.nvme(one.on_cpu),
        }

    def _memory(self, on_device: int, on_cpu: int, weight_slots: int) -> dict[Tier, int]:
        chosen = self.placements(on_device, on_cpu)
        fixed = weight_slots, self.reserve, self.early
        return lay_out_memory(self.profile, chosen, self.sizes, self.clips, *fixed).used

    def _device(self, on_device: int, weight_slots: int) -> int:
        """Bytes taken of the device, however many of the others live on the cpu."""
        return self._memory(on_device, self.count, weight_slots)["device"]

    def _cpu(self, on_device: int, on_cpu: int) -> int:
        """Bytes taken of the cpu, however many weight slots the device has."""
        return self._memory(on_device, on_cpu, 1)["cpu"]

    def _nvme(self, on_cpu: int) -> int:
        """Bytes of the file; they grow as `on_cpu` falls."""
        return self.sizes.in_file(self.profile, self.placements(0, on_cpu))


def _lacking(taken: Mapping[Tier, int], machine: Machine) -> str:
    """What to say where the budgets promise more than the machine has free; else nothing."""
    device, host = taken["device"], taken["cpu"]
    host += device if machine.device_is_cpu else 0
    if host > machine.cpu_bytes:
        return (
            f"the plan takes {format_bytes(host)} of host memory but only "
            f"{format_bytes(machine.cpu_bytes)} is free (cgroup limits counted): likely the "
            "budgets were given for a larger machine; lower Config.device_memory or "
            "Config.cpu_memory, and leave to nvme what then has no room, with Config.nvme_path"
        )
    if not machine.device_is_cpu and device > machine.device_bytes:
        return (
            f"the plan takes {format_bytes(device)} of device memory but only "
            f"{format_bytes(machine.device_bytes)} is free: likely the budget was given for a "
            "larger device; lower Config.device_memory, and leave the rest to cpu or nvme"
        )
    return ""


def _roomless(taken: int, config: Config, machine: Machine) -> str:
    """What to say where `nvme_space` promises more than the drives have free; else nothing."""
    if taken <= machine.nvme_bytes:
        return ""
    paths = " and ".join(config.nvme_path)
    return (
        f"the plan takes {format_bytes(taken, up=True)} of Config.nvme_path={paths} but "
        f"only {format_bytes(machine.nvme_bytes)} is free there: likely Config.nvme_space "
        "was given for another drive; free some space, or name a directory on a drive with room"
    )


def _refusal(search: _Search, budgets: dict[Tier, int], config: Config, machine: Machine) -> str:
    """Why nothing fits: what is asked, what is needed of each tier and given, the ways out."""
    free = {"cpu": machine.cpu_bytes, "nvme": machine.nvme_bytes}
    free["device"] = machine.cpu_bytes if machine.device_is_cpu else machine.device_bytes
    needed = {tier: search.least(tier, budgets) for tier in TIERS}
    alone = any(amount is not None for amount in needed.values())
    if not alone:
        needed.update(search.taken(search.smallest()))
    lines = [
        f"the model does not fit the budgets, with params {config.params}, gradients "
        f"{config.gradients} and optimizer {config.optimizer}",
        f"{'tier':8}{'needed':>14}{'given':>14}   budget",
    ]
    for tier, amount in needed.items():
        mark = ""
        if amount is not None and amount > budgets[tier]:
            mark = "  <-- too small"
            mark += f" ({format_bytes(free[tier])} is free)" if amount > free[tier] else ""
        shown = "-" if amount is None else format_bytes(amount, up=True)
        lines.append(
            f"{tier:8}{shown:>14}{format_bytes(budgets[tier]):>14}   Config.{BUDGETS[tier]}{mark}"
        )
    lines.append("needed: " + ("of one, the others as given" if alone else "of all together"))
    lines.append(_likely_cause(search, needed, budgets, config))
    ways = [f"  {way}" for way in _ways_out(search, needed, budgets, config, machine)]
    first = "try one of these (all other fields as they are):"
    return "\n".join([*lines, *([first, *ways] if ways else [_NO_WAY])])


_NO_WAY = "no budget that this machine has would do: try a smaller model, or a larger machine"


def _likely_cause(
    search: _Search,
    needed: Mapping[Tier, int | None],
    budgets: Mapping[Tier, int],
    config: Config,
) -> str:
    if config.nvme_path and budgets["nvme"] == 0 and config.nvme_space is None:
        paths = " or ".join(config.nvme_path)
        return f"likely nothing is free on Config.nvme_path={paths}"
    if any(config.bytes_of(field) is not None for field in BUDGETS.values()):
        short = {tier for tier, amount in needed.items() if (amount or 0) > budgets[tier]}
        placed = search.placements(0, search.smallest().on_cpu)
        if short and short.isdisjoint(one.of(kind) for one in placed for kind in KINDS):
            values = search.sizes.value
            most, weights = max(enumerate(values["weight"]), key=itemgetter(1))
            return (
                "likely the budget leaves no room for the slots that values pass through on their "
                "way, several of each kind: they go by the largest unit, not by the size of the "
                f"model; here it is {search.profile.units[most].name!r} with "
                f"{format_bytes(weights)} of weights and {format_bytes(values['state'][most])} of "
                "states"
            )
        return "likely the budgets were given for a smaller model"
    return "likely too little is free: each budget is by default a share of that"


def _ways_out(
    search: _Search,
    needed: Mapping[Tier, int | None],
    budgets: Mapping[Tier, int],
    config: Config,
    machine: Machine,
) -> Iterator[str]:
    """What would do on this machine: budgets raised, a drive for nvme, tiers left to `auto`, or
    states that take half the bytes.
    """

    def other(states: StateChoice = search.states, **changes: Any) -> _Search:
        return _Search(search.profile, replace(config, **changes), states)

    def does(one: _Search, raised: Mapping[Tier, int]) -> bool:
        found = next(one.fitting({**budgets, **raised}), None)
        return found is not None and not _lacking(one.taken(found), machine)

    told: list[Mapping[Tier, int]] = []
    for tier, amount in needed.items():
        if amount is not None and amount > budgets[tier] and does(search, {tier: amount}):
            told.append({tier: amount})
            yield _as_fields(told[-1], machine)
    for one in (search,) if search.open else (search, other(nvme_path="DIR")):
        taken = one.taken(one.smallest())
        raised = {tier: amount for tier, amount in taken.items() if amount > budgets[tier]}
        more = any(all(raised.get(tier, 0) >= way[tier] for tier in way) for way in told)
        if not more and not _lacking(taken, machine):
            told.append(raised)
            yield _as_fields(raised, machine if one is search else None)
    left = other(params="auto", gradients="auto", optimizer="auto")
    if len(search.auto) < len(left.auto) and does(left, {}):
        kinds = ("params", "gradients", "optimizer")
        changed = [f'{kind}="auto"' for kind in kinds if getattr(config, kind) != "auto"]
        yield f"Config({', '.join(changed)})"
    coded = replace(search.states, states="compact")
    if coded.serves(search.profile.units) and does(other(coded), {}):
        yield 'Config(states="compact"), the moments in a byte each: nearly the same, not the bits'


def _as_fields(raised: Mapping[Tier, int], machine: Machine | None) -> str:
    """Budgets as they are written; with a drive still to be named where `machine` has no room."""
    fields = [
        f'{BUDGETS[tier]}="{format_bytes(amount, up=True).replace(" ", "")}"'
        for tier, amount in raised.items()
    ]
    room = machine.nvme_bytes if machine is not None else 0
    if drive := raised.get("nvme", 0) > room:
        fields.append('nvme_path="DIR"')
    return f"Config({', '.join(fields)})" + ", DIR on a local drive with room" * drive
