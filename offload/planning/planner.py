"""Decide which value lives in which tier. Pure.

`plan` weighs what is asked (Config), what is needed (Profile) and what there is (Machine). Kinds
that the config assigns to a tier go there. Values of the others (`auto`) go to the device unit by
unit, as many as fit; of the rest as many as fit go to the cpu, weights first and states last, and
the others to nvme. Equal inputs give equal plans.

[Note: Unit by unit]
A unit that is all on the device costs the lanes nothing, and those used first, which come first,
leave no edge between steps. Weights alone there save fetches, which compute hides, and leave the
update on the CPU, which it often does not: simulated for seven billion parameters on an H100, steps
are up to 0.7 times as long, and a few hundredths longer only where nearly all fits. On the cpu, a
byte of weights or gradients saves a drive as much as one of states, and more with micro-batches.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

from offload.config import BUDGETS, Choice, Config
from offload.planning.layout import (
    WEIGHT_SLOTS_MAX,
    Placement,
    Plan,
    Sizes,
    full_slots_bytes,
    lay_out,
)
from offload.planning.machine import Machine
from offload.planning.profile import (
    CHUNK_ELEMENTS,
    CHUNK_STAGES,
    ITEM_BYTES,
    KINDS,
    Kind,
    Profile,
    StateChoice,
)
from offload.planning.tiers import TIERS, Tier, format_bytes

LARGE_CHUNK_ELEMENTS = 1 << 24
"""Elements in a full chunk where an accelerator shares values with CPU memory alone."""

DRIVE_STAGES_MAX, STAGED_ITEM_BYTES = 12, 16
"""Slots of a ring for chunks that go to and from a drive, and at most the bytes of weight, gradient
and states in them for one element: see docs/decisions.md."""

RING_SHARE = 1 / 16
"""Of a memory budget, at most, for staging slots of chunks."""

IDLE_BYTES_TOLD = 256 << 20
"""So much of a budget that lies idle is told."""


class BudgetError(ValueError):
    """The model does not fit the budgets; the message is a table and what to change."""


def budgets_of(config: Config, machine: Machine) -> dict[Tier, int]:
    """The budget of each tier in bytes: what the config gives, else a share of what is free."""
    device = config.bytes_of("device_memory")
    if device is None:
        device = machine.device_bytes // 2
    cpu = config.bytes_of("cpu_memory")
    if cpu is None:
        left = (machine.cpu_bytes - device) // 2  # Activations, too, lie in that memory.
        cpu = max(0, left) if machine.device_is_cpu else machine.cpu_bytes * 3 // 4
    nvme = config.bytes_of("nvme_space")
    if nvme is None:
        nvme = machine.nvme_bytes * 9 // 10
    return {"device": device, "cpu": cpu, "nvme": nvme if config.nvme_path else 0}


@dataclass(frozen=True)
class Grain:
    """How values are cut to be stored and updated; the defaults, those of now, serve any plan."""

    elements: int = field(default_factory=lambda: CHUNK_ELEMENTS)
    """In a full chunk."""
    stages: int = CHUNK_STAGES
    """Slots of each staging ring for chunks."""


def plan_cut(
    profile: Callable[[Grain], Profile], config: Config, machine: Machine, *, rule: str = "adam"
) -> Plan:
    """The plan of a profile that may be cut in any grain: the usual, or a `better_grain` where its
    staging slots change nothing of whether a drive takes part. Raises as `plan`, of the usual."""
    found = plan(profile(Grain()), config, machine, rule=rule)
    drive = bool(found.file)
    if cut := better_grain(config, machine, drive=drive):
        with suppress(BudgetError):
            other = plan(profile(cut), config, machine, rule=rule)
            found = other if bool(other.file) == drive else found
    return found


def better_grain(config: Config, machine: Machine, *, drive: bool) -> Grain | None:
    """What to plan with rather than the usual grain, where the budgets have room: more small chunks
    under way keep a drive busy, large ones a bus. See docs/decisions.md."""
    budgets = budgets_of(config, machine)
    if drive:
        room = int(budgets["cpu"] * RING_SHARE) // (CHUNK_ELEMENTS * STAGED_ITEM_BYTES)
        return Grain(stages=min(room, DRIVE_STAGES_MAX)) if room > CHUNK_STAGES else None
    staged = ITEM_BYTES["bfloat16"] * 2  # Weights and gradients: no states, where no drive is.
    room = int(min(budgets["device"], budgets["cpu"]) * RING_SHARE) // (CHUNK_STAGES * staged)
    large = min(LARGE_CHUNK_ELEMENTS, 1 << max(room, 1).bit_length() - 1)
    fits = large > CHUNK_ELEMENTS and not machine.device_is_cpu
    return Grain(large) if fits else None


def plan(profile: Profile, config: Config, machine: Machine, *, rule: str = "adam") -> Plan:
    """Decide where everything lives; `rule`, that of the updates, decides the size of states.

    Raises:
        BudgetError: no arrangement that the config allows fits the budgets or the machine.
    """
    search = _Search(profile, config, machine, rule)
    for arrangement in search.fitting(search.budgets):
        found = search.plan_of(arrangement)
        if lack := _lack({tier: found.taken_bytes(tier) for tier in TIERS}, config, machine):
            raise BudgetError(lack)
        return found
    raise BudgetError(_refusal(search))


def remarks(found: Plan, config: Config, machine: Machine) -> Iterator[str]:
    """What to tell the user of the memory budgets that `config` gives, a sentence each."""
    forced = {name: getattr(config, name) for name in ("params", "gradients", "optimizer")}
    memory: dict[Tier, int] = {"device": machine.device_bytes, "cpu": machine.cpu_bytes}
    for tier, free in memory.items():
        field, taken = BUDGETS[tier], found.taken_bytes(tier)
        budget = config.bytes_of(field)
        if budget is None:
            continue
        if budget > free:
            yield (
                f"Config.{field} is {format_bytes(budget)}, but only {format_bytes(free)} is free "
                f"here: likely it was given for a larger machine; the plan takes "
                f"{format_bytes(taken)} of it"
            )
        below = TIERS[TIERS.index(tier) + 1 :]
        slower = [name for name, choice in forced.items() if choice in below]
        if slower and min(budget, free) - taken >= max(budget // 2, IDLE_BYTES_TOLD):
            yield (
                f"the plan takes {format_bytes(taken)} of the {format_bytes(budget)} that "
                f"Config.{field} gives, as {', '.join(slower)} are in a slower tier by name: "
                "'auto' would use the rest, and steps would be faster"
            )


class _Arrangement(NamedTuple):
    """How many auto values live on the device, in one order; and how many, in the other, at least
    on the cpu."""

    on_device: int
    on_cpu: int
    weight_slots: int


class _Search:
    """All arrangements that the config allows, and the bytes that each takes of each tier.

    [Note: More memory is never slower]
    Values of `auto` kinds are ranked in two fixed orders: by unit, where ranks below `on_device`
    live on the device, and by kind, where ranks below `on_cpu` live on the cpu if not there; the
    others on nvme. A value lives on the device only if all weight slots fit. The device's bytes do
    not depend on `on_cpu`. With an nvme path the staging rings for chunks are always reserved on
    the cpu, so that the cpu's bytes fall as `on_device` grows; without one, `on_cpu` is the length
    of the list. So the first arrangement that fits (most on the device, then most on the cpu)
    places no value slower than one for smaller budgets.
    """

    def __init__(self, profile: Profile, config: Config, machine: Machine, rule: str) -> None:
        self.profile, self.config, self.machine = profile, config, machine
        self.budgets = budgets_of(config, machine)
        self.states = StateChoice(rule, config.states, on_accelerator=not machine.device_is_cpu)
        self.clips, self.open = config.max_grad_norm is not None, bool(config.nvme_path)
        self.early = config.micro_batches is not None and not self.clips
        choices = (config.params, config.gradients, config.optimizer)
        self.forced: dict[Kind, Choice] = dict(zip(KINDS, choices))
        self.auto: list[Kind] = [kind for kind in KINDS if self.forced[kind] == "auto"]
        self.reserve = self.auto if self.open else []
        self.sizes = Sizes(profile, self.states)
        self.count = len(self.auto) * len(profile.units)
        values = zip(*(self.sizes.value[kind] for kind in self.auto))
        self.values_bytes = [*itertools.accumulate(itertools.chain(*values), initial=0)]
        """Bytes of so many values on the device."""
        self.full = [full_slots_bytes(profile, slots) for slots in range(WEIGHT_SLOTS_MAX + 1)]
        """Bytes of slots for full units, by the number of weight slots."""
        self.device, self.cpu, self.nvme = cache(self._device), cache(self._cpu), cache(self._nvme)

    def fitting(self, budgets: Mapping[Tier, float]) -> Iterator[_Arrangement]:
        """Those that fit: the most on the device first, each with the most on the cpu."""
        most = self.count
        for on_device, weight_slots in self.candidates():
            at_least = self.values_bytes[on_device] + self.full[weight_slots]
            if at_least > budgets["device"]:
                continue  # As the closer look would show, which takes its time.
            if self.device(on_device, weight_slots) <= budgets["device"]:
                numbers = self.numbers(on_device, most, budgets["nvme"])
                on_cpu = self.most_on_cpu(on_device, numbers, budgets["cpu"])
                if on_cpu is not None:
                    yield _Arrangement(on_device, on_cpu, weight_slots)
                if self.open:  # With fewer on the device, those that failed need even more cpu.
                    most = numbers.start - 1 if on_cpu is None else on_cpu

    def candidates(self) -> list[tuple[int, int]]:
        """(values on the device, weight slots), those that take most of the device first."""
        found = [(on_device, WEIGHT_SLOTS_MAX) for on_device in range(self.count, -1, -1)]
        return found + [(0, slots) for slots in range(WEIGHT_SLOTS_MAX - 1, 0, -1)]

    def numbers(self, on_device: int, most: int, nvme_budget: float) -> range:
        """The choices of `on_cpu`, up to `most`, with which the rest fits on nvme."""
        numbers = range(0 if self.open else self.count, most + 1)
        fits = bisect_left(numbers, True, key=lambda n: self.nvme(on_device, n) <= nvme_budget)
        return numbers[fits:]

    def most_on_cpu(self, on_device: int, numbers: range, budget: float) -> int | None:
        """The largest of `numbers` that fits: most are passed over by their values' bytes alone, as
        no fewer slots go with less on the cpu than with all."""

        def values(on_cpu: int) -> int:
            return self.sizes.at_home(self.placements(on_device, on_cpu), "cpu")

        slots = self.cpu(on_device, self.count) - values(self.count)
        end = bisect_right(numbers, budget - slots, key=values)
        fits = (n for n in reversed(numbers[:end]) if self.cpu(on_device, n) <= budget)
        return next(fits, None)

    def least(self, tier: Tier, budgets: Mapping[Tier, float]) -> int | None:
        """The least budget of a tier with which something fits, the others as given, or None."""
        fitting = self.fitting({**budgets, tier: math.inf})
        if tier == "device":
            return min((self.device(n, slots) for n, _, slots in fitting), default=None)
        # With an nvme path, the first that fits takes the least of the other tiers.
        best = list(itertools.islice(fitting, 1 if self.open else None))
        if tier == "nvme":
            return min((self.nvme(one.on_device, one.on_cpu) for one in best), default=None)
        taken = (
            self.cpu(one.on_device, on_cpu)
            for one in best
            for on_cpu in self.numbers(one.on_device, one.on_cpu, budgets["nvme"])
        )
        return min(taken, default=None)

    def placements(self, on_device: int, on_cpu: int) -> list[Placement]:
        """The homes of every unit's values."""
        units, tiers = len(self.profile.units), list[list[Tier]]()
        for kind, choice in self.forced.items():
            if choice != "auto":
                tiers.append([choice] * units)
                continue
            at, many = self.auto.index(kind), len(self.auto)
            here = min(units, max(0, -((at - on_device) // many)))
            there = min(units, max(here, on_cpu - at * units))
            rest = units - there
            counts: dict[Tier, int] = {"device": here, "cpu": there - here, "nvme": rest}
            tiers.append([tier for tier, count in counts.items() for _ in range(count)])
        return [Placement(*homes) for homes in zip(*tiers)]

    def other(self, **changes: Any) -> _Search:
        """That with changes to the config."""
        changed = replace(self.config, **changes)
        return _Search(self.profile, changed, self.machine, self.states.rule)

    def plan_of(self, arrangement: _Arrangement) -> Plan:
        """Down to the byte."""
        return lay_out(
            self.profile,
            self.placements(arrangement.on_device, arrangement.on_cpu),
            budgets=self.budgets,
            clips=self.clips,
            states=self.states,
            sizes=self.sizes,
            weight_slots=arrangement.weight_slots,
            reserve=self.reserve,
            early=self.early,
        )

    def smallest(self) -> _Arrangement:
        """The arrangement that takes the least memory."""
        return _Arrangement(0, 0 if self.open else self.count, 1)

    def taken(self, one: _Arrangement) -> dict[Tier, int]:
        """Bytes that an arrangement takes of each tier."""
        return {
            "device": self.device(one.on_device, one.weight_slots),
            "cpu": self.cpu(one.on_device, one.on_cpu),
            "nvme": self.nvme(one.on_device, one.on_cpu),
        }

    def _device(self, on_device: int, weight_slots: int) -> int:
        """Bytes taken of the device, whatever `on_cpu` is."""
        return self.plan_of(_Arrangement(on_device, self.count, weight_slots)).taken_bytes("device")

    def _cpu(self, on_device: int, on_cpu: int) -> int:
        """Bytes taken of the cpu, whatever the number of weight slots."""
        return self.plan_of(_Arrangement(on_device, on_cpu, 1)).taken_bytes("cpu")

    def _nvme(self, on_device: int, on_cpu: int) -> int:
        """Bytes of the file; they grow as either falls."""
        return self.sizes.at_home(self.placements(on_device, on_cpu), "nvme")


def _lack(taken: Mapping[Tier, int], config: Config, machine: Machine) -> str:
    """The message if a plan takes more than the machine has free, else empty."""
    device, host = taken["device"], taken["cpu"]
    host += device if machine.device_is_cpu else 0
    if host > machine.cpu_bytes:
        return (
            f"the plan takes {format_bytes(host)} of host memory but only "
            f"{format_bytes(machine.cpu_bytes)} is free (cgroup limits counted): likely the "
            "budgets were given for a larger machine; lower Config.device_memory or "
            "Config.cpu_memory, and give Config.nvme_path for what then does not fit"
        )
    if not machine.device_is_cpu and device > machine.device_bytes:
        return (
            f"the plan takes {format_bytes(device)} of device memory but only "
            f"{format_bytes(machine.device_bytes)} is free: likely the budget was given for a "
            "larger device; lower Config.device_memory, and leave the rest to cpu or nvme"
        )
    if taken["nvme"] > machine.nvme_bytes:
        return (
            f"the plan takes {format_bytes(taken['nvme'], up=True)} of Config.nvme_path="
            f"{' and '.join(config.nvme_path)} but only {format_bytes(machine.nvme_bytes)} is free "
            "there: likely Config.nvme_space was given for another drive; free some space, or name "
            "a directory on a drive with room"
        )
    return ""


def _refusal(search: _Search) -> str:
    """Why nothing fits: what is asked, a table of needed and given by tier, ways out."""
    config, machine, budgets = search.config, search.machine, search.budgets
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
    lines.append(
        "needed: "
        + ("the least of one tier, while the others stay as given" if alone else "of all together")
    )
    lines.append(_likely_cause(search, needed))
    ways = [f"  {way}" for way in _ways_out(search, needed)]
    first = "try one of these (all other fields as they are):"
    none = "no budget that this machine has would do: try a smaller model, or a larger machine"
    return "\n".join([*lines, *([first, *ways] if ways else [none])])


def _likely_cause(search: _Search, needed: Mapping[Tier, int | None]) -> str:
    config, budgets = search.config, search.budgets
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
                "likely the budget leaves no room for the slots that values pass through, several "
                "for each kind: they are sized by the largest unit, not by the size of the "
                f"model; here it is {search.profile.units[most].name!r} with "
                f"{format_bytes(weights)} of weights and {format_bytes(values['state'][most])} of "
                "states"
            )
        return "likely the budgets were given for a smaller model"
    return "likely too little is free: by default each budget is a share of what is free"


def _ways_out(search: _Search, needed: Mapping[Tier, int | None]) -> Iterator[str]:
    """Changes to the config that fit this machine."""
    config, machine, budgets = search.config, search.machine, search.budgets

    def lacks(taken: Mapping[Tier, int]) -> str:
        return _lack({**taken, "nvme": 0}, config, machine)  # A drive can be another.

    def fits(one: _Search, raised: Mapping[Tier, int]) -> bool:
        found = next(one.fitting({**budgets, **raised}), None)
        return found is not None and not lacks(one.taken(found))

    offered: list[Mapping[Tier, int]] = []
    for tier, amount in needed.items():
        if amount is not None and amount > budgets[tier] and fits(search, {tier: amount}):
            offered.append({tier: amount})
            yield _as_fields(offered[-1], machine)
    for one in (search,) if search.open else (search, search.other(nvme_path="DIR")):
        taken = one.taken(one.smallest())
        raised = {tier: amount for tier, amount in taken.items() if amount > budgets[tier]}
        covered = any(all(raised.get(tier, 0) >= way[tier] for tier in way) for way in offered)
        if not covered and not lacks(taken):
            offered.append(raised)
            yield _as_fields(raised, machine if one is search else None)
    left = search.other(params="auto", gradients="auto", optimizer="auto")
    if len(search.auto) < len(left.auto) and fits(left, {}):
        kinds = ("params", "gradients", "optimizer")
        changed = [f'{kind}="auto"' for kind in kinds if getattr(config, kind) != "auto"]
        yield f"Config({', '.join(changed)})"
    with suppress(ValueError):  # Weights of float32 have no compact states.
        if fits(search.other(states="compact"), {}):
            yield 'Config(states="compact"), the moments in a byte each: close, but not bit for bit'


def _as_fields(raised: Mapping[Tier, int], machine: Machine | None) -> str:
    """Budgets as the user writes them, with a drive to be named where `machine` has no room."""
    fields = [
        f'{BUDGETS[tier]}="{format_bytes(amount, up=True).replace(" ", "")}"'
        for tier, amount in raised.items()
    ]
    room = machine.nvme_bytes if machine is not None else 0
    if drive := raised.get("nvme", 0) > room:
        fields.append('nvme_path="DIR"')
    return f"Config({', '.join(fields)})" + ", DIR on a local drive with room" * drive
