"""The plan: inside its budgets or refused, as asked, the same each time, never worse for more."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.config import Config
from offload.planning.layout import Placement, Plan, lay_out, route, site
from offload.planning.machine import Machine
from offload.planning.planner import BudgetError, _Search, budgets_of, plan
from offload.planning.profile import BLOCK_BYTES, KINDS, Profile, StateChoice, profile_of, round_up
from offload.planning.tiers import TIERS, Tier
from offload.program.compile import compile_program
from tests.profiles import (
    AMPLE,
    all_placements,
    blocks,
    large_model,
    plan_of,
    plans,
    profiles,
    unit,
)
from tests.proof import verify

HUGE = Machine(device_bytes=1 << 60, cpu_bytes=1 << 60, nvme_bytes=1 << 60)

CHOICES = st.sampled_from(["auto", "auto", "device", "cpu", "nvme"])

SIZES = st.one_of(
    st.just(0), st.integers(0, 1 << 16), st.integers(0, 1 << 22), st.integers(0, 1 << 28)
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    nvme = draw(st.integers(0, 3)) > 0
    choices = {name: draw(CHOICES) for name in ("params", "gradients", "optimizer")}
    if not nvme:
        choices = {name: "cpu" if c == "nvme" else c for name, c in choices.items()}
    return Config(
        **choices,  # type: ignore[arg-type]
        nvme_path=("/nvme",) if nvme else (),
        device_memory=draw(SIZES),
        cpu_memory=draw(SIZES),
        nvme_space=draw(st.one_of(SIZES, st.just(1 << 40))),
        max_grad_norm=draw(st.sampled_from([None, 1.0])),
    )


def tiers_of(found: Plan) -> list[Tier]:
    """The tier of every value that has any bytes."""
    return [
        placement.of(kind)
        for kind in KINDS
        for u, placement in enumerate(found.placements)
        if found.bytes_of(kind, u)
    ]


def states_of(config: Config) -> StateChoice:
    """Those of `HUGE`."""
    return StateChoice("adam", config.states)


def attempt(profile: Profile, config: Config) -> Plan | None:
    try:
        return plan(profile, config, HUGE)
    except BudgetError:
        return None


# -- budgets ------------------------------------------------------------------------------------


@given(profiles(), configs())
def test_a_plan_fits_or_says_what_is_missing(profile: Profile, config: Config) -> None:
    budgets = budgets_of(config, HUGE)
    try:
        found = plan(profile, config, HUGE)
    except BudgetError as error:
        text = str(error)
        assert "needed" in text
        assert "given" in text
        assert "<-- too small" in text
        assert "Config.device_memory" in text
        return
    for tier in TIERS:
        assert found.taken_bytes(tier) <= budgets[tier]
    for use in found.tiers():
        assert use.resident_bytes + use.staging_bytes == found.taken_bytes(use.tier)
        assert use.budget_bytes == budgets[use.tier]
        assert use.staging_bytes >= 0
    buffers = [*found.homes.values(), *found.slots.values()]
    for tier in TIERS[:2]:
        ends = (one.offset + one.bytes for one in buffers if one.tier == tier)
        assert found.taken_bytes(tier) == max(ends, default=0)
    verify(compile_program(found))


@given(profiles(), configs())
def test_forced_tiers_are_honoured_and_auto_is_a_prefix(profile: Profile, config: Config) -> None:
    found = attempt(profile, config)
    if found is None:
        return
    auto: list[Tier] = []
    for kind, choice in zip(KINDS, (config.params, config.gradients, config.optimizer)):
        homes = [placement.of(kind) for placement in found.placements]
        if choice == "auto":
            auto += homes
        else:
            assert set(homes) <= {choice}
    assert auto == sorted(auto, key=TIERS.index)


@given(profiles(), configs(), st.data())
def test_more_memory_is_never_slower(profile: Profile, config: Config, data: st.DataObject) -> None:
    before = attempt(profile, config)
    if before is None:
        return
    sizes = {
        name: (config.bytes_of(name) or 0) + data.draw(SIZES, label=name)
        for name in ("device_memory", "cpu_memory", "nvme_space")
    }
    more = replace(config, **sizes)  # type: ignore[arg-type]
    after = plan(profile, more, HUGE)
    for old, new in zip(tiers_of(before), tiers_of(after)):
        assert TIERS.index(new) <= TIERS.index(old)


@given(profiles(), configs())
def test_the_same_input_gives_the_same_plan(profile: Profile, config: Config) -> None:
    assert attempt(profile, config) == attempt(profile, config)


# -- layout -------------------------------------------------------------------------------------


@given(plans())
def test_buffers_are_aligned_and_disjoint(found: Plan) -> None:
    for tier in ("device", "cpu"):
        buffers = [b for b in (*found.homes.values(), *found.slots.values()) if b.tier == tier]
        buffers.sort(key=lambda b: b.offset)
        assert all(b.offset % BLOCK_BYTES == b.bytes % BLOCK_BYTES == 0 for b in buffers)
        assert all(one.offset + one.bytes <= two.offset for one, two in pairwise(buffers))
    sizes = [size for chunks in found.file.values() for size in chunks]
    assert all(size > 0 and size % BLOCK_BYTES == 0 for size in sizes)
    assert sum(sizes) == found.taken_bytes("nvme")
    for kind in KINDS:
        for u in range(len(found.profile.units)):
            away = found.home(kind, u).tier == "nvme" and found.bytes_of(kind, u) > 0
            assert ((kind, u) in found.file) == away
            home = found.homes.get((kind, u))
            assert home is None or home.tier == found.home(kind, u).tier
            room = sum(found.file.get((kind, u), ())) if home is None else home.bytes
            assert room >= found.bytes_of(kind, u)


@pytest.mark.parametrize("clips", [False, True])
def test_all_placements_of_a_small_model(clips: bool) -> None:
    profile = blocks(2, 5000)
    for first in all_placements():
        for second in all_placements():
            found = lay_out(
                profile, [first, second], budgets=AMPLE, clips=clips, states=StateChoice()
            )
            for kind in KINDS:
                for u in range(2):
                    assert found.home(kind, u).tier == found.placements[u].of(kind)
            for kind, slots in (("weight", found.weight_slot), ("gradient", found.gradient_slot)):
                assert [slot is None for slot in slots] == [
                    one.of(kind) == "device" for one in (first, second)
                ]
            assert sum(row.bytes for row in found.rows()) == sum(
                found.bytes_of(kind, u) for kind in KINDS for u in range(2)
            )
            if second in (first, Placement("nvme", "nvme", "nvme")):
                verify(compile_program(found))


def test_what_torch_holds_of_residents_is_counted_in_its_blocks() -> None:
    """Of 512 bytes, and where they are large a MiB more; where the device is the CPU as it lies."""
    sizes = [3, 512, 1 << 18, 524_289, 3 << 20]
    blocks = [512, 1024, 1 << 19, (2 << 20) + 512, 7 << 20]  # bfloat16.
    profile = profile_of([unit(f"u{size}", size) for size in sizes])
    on_device: Any = dict.fromkeys(("params", "gradients", "optimizer"), "device")
    for on_cpu in (False, True):
        machine = replace(HUGE, device_is_cpu=on_cpu)
        found = plan(profile, Config(**on_device), machine)
        assert len(found.residents) == len(sizes)
        taken = found.taken_bytes("device") - found.arena_bytes["device"]
        held = sum(found.bytes_of(kind, u) for kind in KINDS[:2] for u in range(len(sizes)))
        assert taken == (held if on_cpu else 2 * sum(round_up(size, 4096) for size in blocks))
        size = found.taken_bytes("device")
        asked = Config(**on_device, device_memory=size)
        assert plan(profile, asked, machine) is not None
        with pytest.raises(BudgetError):
            plan(profile, replace(asked, device_memory=size - 1), machine)


def test_records_lie_one_after_the_other() -> None:
    found = plan_of(profile_of([unit("wide", 3_000_000)]))
    sizes = found.sizes.chunks["state"][0]
    assert found.sizes.record_offsets[0][:3] == [0, sizes[0], sum(sizes[:2])]
    assert sum(sizes) == found.bytes_of("state", 0)
    assert sizes[0] == (1 << 20) * 10


def test_a_lasting_unit_has_slots_of_its_own() -> None:
    made = [unit(f"u{i}", 5000, lasting=i == 1) for i in range(5)]
    found = plan_of(profile_of(made), weight_slots=1)
    for slots in (found.weight_slot, found.gradient_slot):
        assert slots.count(slots[1]) == 1
        assert slots[1] is not None


def test_a_unit_without_parameters_takes_nothing() -> None:
    empty = unit("empty", 0, frozen=[0])
    for placement in all_placements():
        profile = profile_of([empty, unit("block", 500)])
        found = lay_out(profile, [placement] * 2, budgets=AMPLE, clips=True, states=StateChoice())
        assert all(u == 1 for _, u in found.homes)
        verify(compile_program(found))


def test_site_and_route() -> None:
    assert site(Placement("nvme", "nvme", "device")) == "device"
    assert site(Placement("device", "device", "nvme")) == "cpu"
    assert route("nvme", "device") == ("nvme", "cpu", "device")
    assert route("device", "cpu") == ("device", "cpu")
    assert route("cpu", "cpu") == ("cpu",)


# -- defaults and refusals ----------------------------------------------------------------------


def test_default_budgets_are_shares_of_what_is_free() -> None:
    machine = Machine(device_bytes=1000, cpu_bytes=1000, nvme_bytes=1000, device_is_cpu=True)
    assert budgets_of(Config(), machine) == {"device": 500, "cpu": 250, "nvme": 0}
    paths = Config(nvme_path=("/nvme",), device_memory=100)
    assert budgets_of(paths, machine) == {"device": 100, "cpu": 450, "nvme": 900}
    greedy = Config(device_memory=5000)
    assert budgets_of(greedy, machine)["cpu"] == 0
    beside = replace(machine, device_is_cpu=False)
    assert budgets_of(Config(), beside) == {"device": 500, "cpu": 750, "nvme": 0}


def test_the_refusal_is_a_table_with_what_to_change() -> None:
    config = Config(device_memory="1MiB", cpu_memory="16KiB")
    with pytest.raises(BudgetError) as caught:
        plan(blocks(4, 100_000), config, HUGE)
    text = str(caught.value).splitlines()
    assert text[1].split() == ["tier", "needed", "given", "budget"]
    assert [line.split()[0] for line in text[2:5]] == list(TIERS)
    assert "Config.device_memory  <-- too small" in text[2]
    assert text[3].endswith("Config.cpu_memory  <-- too small")
    assert "16.00 KiB" in text[3]
    assert text[4].split()[1] == "-"
    assert text[5:7] == [
        "needed: the least of one tier, while the others stay as given",
        "likely the budgets were given for a smaller model",
    ]
    assert text[7].startswith("try one of these")
    shown = re.compile(r'  Config\((\w+)="[\d.]+[KMG]iB"\)')
    fields = [found[1] for found in map(shown.fullmatch, text[8:]) if found]
    assert fields == ["device_memory", "cpu_memory"]


def test_the_refusal_tells_of_slots_where_nothing_lives_in_what_is_too_small() -> None:
    """A small model, all on nvme: it is no smaller model that the budget was given for."""
    config = Config(
        params="nvme", gradients="nvme", optimizer="nvme", nvme_path="/a", cpu_memory="16KiB"
    )
    with pytest.raises(BudgetError) as caught:
        plan(profile_of([unit("small", 1000), unit("large", 100_000)]), config, HUGE)
    (likely,) = [line for line in str(caught.value).splitlines() if line.startswith("likely")]
    assert "no room for the slots that values pass through" in likely
    assert "size of the model; here it is 'large' with" in likely


def test_the_refusal_of_auto_names_every_tier() -> None:
    config = Config(device_memory="1MiB", cpu_memory="1MiB")
    with pytest.raises(BudgetError) as caught:
        plan(blocks(4, 20_000_000), config, HUGE)
    ways = [line for line in str(caught.value).splitlines() if line.startswith("  Config")]
    assert [re.findall(r"(\w+)=", way) for way in ways] == [
        ["device_memory"],
        ["device_memory", "cpu_memory"],
        ["device_memory", "cpu_memory", "nvme_space", "nvme_path"],
    ]
    assert ways[-1].endswith('nvme_path="DIR"), DIR on a local drive with room')


def test_the_refusal_tells_what_no_budget_alone_can_mend() -> None:
    config = Config(device_memory="1MiB", cpu_memory="1MiB", params="device", optimizer="cpu")
    with pytest.raises(BudgetError, match="needed: of all together") as caught:
        plan(blocks(4, 1_000_000), config, HUGE)
    assert str(caught.value).count("<-- too small") == 2
    assert "  Config(device_memory=" in str(caught.value)


def test_the_refusal_names_a_forced_tier_where_leaving_it_would_do() -> None:
    config = Config(device_memory="2MiB", cpu_memory="1GiB", params="device")
    with pytest.raises(BudgetError, match=r'  Config\(params="auto"\)'):
        plan(blocks(4, 200_000), config, HUGE)


def test_the_refusal_names_states_that_would_fit() -> None:
    config = Config(device_memory="2MiB", cpu_memory="12MiB")
    with pytest.raises(BudgetError) as caught:
        plan(blocks(4, 300_000), config, HUGE)
    assert '  Config(states="compact"), the moments in a byte each' in str(caught.value)
    assert plan(blocks(4, 300_000), replace(config, states="compact"), HUGE)
    with pytest.raises(BudgetError) as caught:
        plan(blocks(4, 1_000_000), config, HUGE)
    assert "compact" not in str(caught.value)


def test_the_refusal_names_no_budget_that_the_machine_has_not() -> None:
    machine = Machine(device_bytes=0, cpu_bytes=2 << 20, device_is_cpu=True)
    with pytest.raises(BudgetError) as caught:
        plan(blocks(4, 1_000_000), Config(), machine)
    assert "likely too little is free" in str(caught.value)
    assert str(caught.value).endswith("try a smaller model, or a larger machine")


def test_the_refusal_tells_of_a_drive_without_room() -> None:
    config = Config(params="nvme", gradients="nvme", optimizer="nvme", nvme_path=("/full",))
    with pytest.raises(BudgetError, match=r"nothing is free on Config.nvme_path=/full"):
        plan(blocks(4, 1000), config, Machine(device_bytes=1 << 30, cpu_bytes=1 << 30))


@given(profiles(), configs())
def test_every_way_out_that_a_refusal_names_does(profile: Profile, config: Config) -> None:
    try:
        plan(profile, config, HUGE)
    except BudgetError as error:
        ways = [line for line in str(error).splitlines() if line.startswith("  Config")]
        assert ways
        for way in ways:
            asked = dict(re.findall(r'(\w+)="(.*?)"', way))
            assert attempt(profile, replace(config, **asked)) is not None


@given(profiles(most=4), configs(), st.data())
def test_the_search_finds_what_trying_everything_finds(
    profile: Profile, config: Config, data: st.DataObject
) -> None:
    """Budgets at the very edge of what some arrangement takes, or one byte less."""
    search = _Search(profile, config, HUGE, "adam")
    taken = {
        (on_device, on_cpu, slots): {
            "device": search.device(on_device, slots),
            "cpu": search.cpu(on_device, on_cpu),
            "nvme": search.nvme(on_device, on_cpu),
        }
        for on_device, slots in search.candidates()
        for on_cpu in range(search.count, -1, -1)
        if config.nvme_path or on_cpu == search.count
    }
    budgets: dict[Tier, int] = {}
    for tier in TIERS:
        edges = st.sampled_from(sorted({one[tier] for one in taken.values()}))
        budgets[tier] = data.draw(edges, label=tier) - data.draw(st.integers(0, 1))

    def fitting(tiers: Sequence[Tier]) -> list[tuple[int, int, int]]:
        return [key for key, one in taken.items() if all(one[t] <= budgets[t] for t in tiers)]

    assert next(search.fitting(budgets), None) == next(iter(fitting(TIERS)), None)
    for tier in TIERS:
        others = fitting([t for t in TIERS if t != tier])
        least = min((taken[key][tier] for key in others), default=None)
        assert search.least(tier, budgets) == least


def test_one_unit_of_one_element_needs_the_least_where_all_is_in_memory() -> None:
    """The weight at home on the device would pass through more of the cpu than it takes there."""
    profile = profile_of([unit("one", 1)])
    config = Config(device_memory="1GiB", cpu_memory=0, optimizer="cpu", gradients="cpu")
    search = _Search(profile, config, HUGE, "adam")
    at_home = [search.cpu(on_device, 1) for on_device in (0, 1)]
    assert at_home[0] < at_home[1]
    assert search.least("cpu", search.budgets) == at_home[0]


def test_budgets_that_the_machine_does_not_have() -> None:
    profile = blocks(4, 1_000_000)
    poor = Machine(device_bytes=1 << 20, cpu_bytes=1 << 20, nvme_bytes=1 << 20)
    with pytest.raises(BudgetError, match=r"host memory but only 1\.00 MiB is free"):
        plan(profile, Config(device_memory="8GiB", cpu_memory="8GiB", params="cpu"), poor)
    with pytest.raises(BudgetError, match=r"device memory but only 1\.00 MiB is free"):
        plan(profile, Config(device_memory="8GiB", cpu_memory=0), poor)
    told = r"of Config.nvme_path=/a but only 1\.00 MiB is free there: likely Config.nvme_space"
    small = Machine(device_bytes=1 << 30, cpu_bytes=1 << 30, nvme_bytes=1 << 20)
    with pytest.raises(BudgetError, match=told):
        plan(profile, Config(optimizer="nvme", nvme_path="/a", nvme_space="1GiB"), small)


# -- speed --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large() -> Profile:
    return large_model()


def test_planning_twenty_billion_parameters() -> None:
    test_planning_seventy_billion_parameters(large_model(units=30), "64GiB")


@pytest.mark.slow
@pytest.mark.parametrize("cpu_memory", ["1GiB", "64GiB", "2TiB"])
def test_planning_seventy_billion_parameters(large: Profile, cpu_memory: str) -> None:
    config = Config(
        device_memory="16GiB", cpu_memory=cpu_memory, nvme_space="4TiB", nvme_path=("/nvme",)
    )
    start = time.process_time()
    attempt(large, config)
    assert time.process_time() - start < 6.0  # About one on a quiet machine.


@pytest.mark.slow
@pytest.mark.parametrize("cpu_memory", ["1GiB", "500GiB"])
@pytest.mark.parametrize("device_memory", ["1GiB", "16GiB"])
def test_refusing_seventy_billion_parameters(
    large: Profile, device_memory: str, cpu_memory: str
) -> None:
    for more in ({}, {"nvme_path": ("/nvme",), "nvme_space": "100GiB"}):
        config = Config(device_memory=device_memory, cpu_memory=cpu_memory, **more)
        start = time.process_time()
        assert attempt(large, config) is None
        assert time.process_time() - start < 8.0  # About one on a quiet machine.


@pytest.mark.slow
def test_compiling_ten_thousand_units() -> None:
    found = plan_of(
        large_model(units=10_000, elements=7 * 10**5), "nvme", "nvme", "nvme", clips=True
    )
    start = time.process_time()
    program = compile_program(found)
    assert time.process_time() - start < 3.0  # About one on a quiet machine.
    assert sum(len(phase.ops) for phase in program.phases.values()) > 50_000
