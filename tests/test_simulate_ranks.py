"""The simulator over ranks: one of them, what it sends, and what it shares with the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.planning.layout import Placement, Plan, lay_out
from offload.planning.machine import Machine
from offload.planning.planner import _Search
from offload.planning.profile import Sharding, StateChoice, lay_out_unit, profile_of
from offload.planning.tiers import Tier
from offload.program.compile import compile_program
from offload.program.ops import Lane, Program, Verb
from offload.program.predict import MICRO_BATCHES, predict
from offload.program.simulate import Timeline, _paces, seconds_of, simulate
from offload.reporting import MODEL
from tests.profiles import AMPLE, moved, plans, unit, wanted_parameters
from tests.test_simulate import BYTES, MACHINE, end_of, spans, ten
from tests.training import some_rows_fast

COMM = replace(MACHINE, link_bytes_per_s=BYTES, nic_bytes_per_s=BYTES)
"""What a rank sends of a block of `program_of` to one other takes a second."""

SLOW = Machine(device_bytes=0, cpu_bytes=0, nodes=4, pcie_bytes_per_s=12e9, hop_seconds=1e-5)


def plan_of(count: int, homes: tuple[Tier, Tier, Tier], ranks: int = 2, **sharding: bool) -> Plan:
    """Blocks of which each rank has 4096 elements."""
    made = [
        lay_out_unit(f"block{i}", [_spec(i, ranks * 4096)], ranks=ranks, chunk_elements=1 << 20)
        for i in range(count)
    ]
    profile = profile_of(made, sharding=Sharding(0, ranks, **sharding))
    placements = [Placement(*homes)] * count
    return lay_out(profile, placements, budgets=AMPLE, clips=False, states=StateChoice())


def _spec(number: int, elements: int) -> Any:
    return unit(f"block{number}", elements).parameters[0]


def program_of(*arguments: Any, **flags: Any) -> Program:
    return compile_program(plan_of(*arguments, **flags))


DEVICE: tuple[Tier, Tier, Tier] = ("device", "device", "device")
CPU: tuple[Tier, Tier, Tier] = ("cpu", "cpu", "cpu")
ALIKE: list[tuple[Tier, Tier, Tier]] = [DEVICE, CPU, ("nvme", "nvme", "nvme")]


# -- by hand ------------------------------------------------------------------------------------


def test_one_block_over_two_ranks() -> None:
    timeline = simulate(program_of(1, DEVICE), COMM, ten, steps=2)
    assert spans(timeline) == [
        ("comm", "gather", 0, 0.0, 1.0),
        ("compute", "forward", 0, 1.0, 11.0),
        ("compute", "backward", 0, 11.0, 21.0),
        ("comm", "exchange", 0, 21.0, 22.0),
        ("compute", "fold", 0, 22.0, 24.0),
        ("compute", "update", 0, 24.0, 37.0),
    ]
    assert timeline.step_seconds == 16 + 1 + 20


def test_collectives_go_beside_the_compute_of_others() -> None:
    timeline = simulate(program_of(4, DEVICE), COMM, ten, steps=1)
    gathers = [s.start for s in timeline.spans if s.op.verb is Verb.GATHER and s.phase == "forward"]
    assert gathers == [0.0, 1.0, 11.0, 21.0], "two slots: one in use, one that comes"
    assert timeline.exposed == 1.0 + 3 * 2.0, "the first, and sums on the compute lane"
    begins = {(s.op.verb, s.op.value.unit): s.start for s in timeline.spans if s.phase != "forward"}
    assert begins[Verb.GATHER, 1] == begins[Verb.BACKWARD, 2] == 51.0
    assert begins[Verb.EXCHANGE, 3] == 52.0, "the gather goes first: it is needed sooner"


def test_a_shard_comes_before_it_is_gathered_and_goes_home_when_it_is_summed() -> None:
    timeline = simulate(program_of(1, CPU), COMM, ten, steps=1)
    assert [(lane, verb) for lane, verb, *_ in spans(timeline)] == [
        ("h2d", "move"),
        ("comm", "gather"),
        ("compute", "forward"),
        ("compute", "backward"),
        ("comm", "exchange"),
        ("compute", "fold"),
        ("d2h", "move"),
        ("cpu", "update"),
    ]


def test_a_collective_takes_the_slower_axis_and_its_hops() -> None:
    (op,) = [op for op in program_of(1, DEVICE, 8).phases["forward"].ops if op.lane is Lane.COMM]
    assert op.bytes == 7 * BYTES
    machine = replace(COMM, nodes=2, op_seconds=0.5, hop_seconds=0.25)
    assert machine.axes(op.bytes, 8, sums=False) == (6 * BYTES, BYTES), "one of each other node"
    assert seconds_of(op, machine, 8) == 6 + 0.5 + 0.25 * (3 + 1)
    machine = replace(machine, nic_bytes_per_s=BYTES / 10)
    assert seconds_of(op, machine, 8) == 10 + 0.5 + 0.25 * (3 + 1)
    machine = replace(machine, nic_exchange=2)
    assert seconds_of(op, machine, 8) == 10 + 0.5 + 0.25 * (3 + 1)
    assert seconds_of(replace(op, verb=Verb.EXCHANGE), machine, 8) == 20 + 0.5 + 1.0
    assert seconds_of(op, replace(machine, axes_in_turn=True), 8) == 6 + 10 + 0.5 + 1.0


@pytest.mark.parametrize(
    ("one", "other", "paces"),
    [
        (0.5, 0.5, (1.0, 1.0)),
        (0.25, 0.7, (1.0, 1.0)),
        (1.0, 1.0, (0.5, 0.5)),
        (0.25, 1.0, (1.0, 0.75)),
        (1.0, 0.25, (0.75, 1.0)),
        (0.8, 0.6, (0.625, 0.5 / 0.6)),
    ],
)
def test_pcie_is_shared_fairly(one: float, other: float, paces: tuple[float, float]) -> None:
    assert _paces(one, other) == pytest.approx(paces)


def test_copies_and_the_nic_share_pcie() -> None:
    """Both want all of it: the first gather goes alone, the second beside the third copy."""
    program = program_of(3, CPU)
    nodes = replace(COMM, nodes=2, h2d_bytes_per_s=BYTES, link_bytes_per_s=1e30)
    alone = simulate(program, nodes, ten, steps=1)
    shared = simulate(program, replace(nodes, pcie_bytes_per_s=BYTES), ten, steps=1)

    def times(timeline: Timeline) -> list[tuple[str, float, float]]:
        return [(lane, a, b) for lane, _, _, a, b in spans(timeline) if b < 10]

    assert times(alone) == [
        ("h2d", 0.0, 1.0),
        ("comm", 1.0, 2.0),
        ("h2d", 1.0, 2.0),
        ("comm", 2.0, 3.0),
        ("h2d", 2.0, 3.0),
    ]
    assert times(shared) == [
        ("h2d", 0.0, 1.0),
        ("comm", 1.0, 3.0),
        ("h2d", 1.0, 3.0),
        ("comm", 3.0, 5.0),
        ("h2d", 3.0, 5.0),
    ]


# -- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("keeps", [False, True])
def test_bytes_sent_are_those_of_the_formulas(ranks: int, micro_batches: int, keeps: bool) -> None:
    """In weights (N - 1) / N: A for the gradients; one for weights that are kept, else 2 A less
    what is in slots yet where a pass begins, but for the first forward."""
    count, steps, program = 6, 3, program_of(6, CPU, ranks, keeps=keeps)
    timeline = simulate(program, COMM, ten, steps=steps, micro_batches=micro_batches)
    passes = 2 * micro_batches
    gathered = count if keeps else passes * count - 2 * (passes - 1)
    shards = micro_batches * count + gathered
    assert moved(timeline, Lane.COMM) == steps * shards * (ranks - 1) * BYTES
    folded = [s.op.bytes for s in timeline.spans if s.op.verb is Verb.FOLD]
    assert sum(folded) == steps * micro_batches * count * ranks * BYTES


# -- for every program --------------------------------------------------------------------------


@given(plans(most=4), st.floats(0, 0.1))
def test_one_rank_shares_nothing(plan: Plan, compute: float) -> None:
    program, machine = compile_program(plan), Machine(device_bytes=0, cpu_bytes=0)
    other = replace(machine, link_bytes_per_s=1.0, nic_bytes_per_s=1.0, pcie_bytes_per_s=1.0)
    one, two = (simulate(program, m, lambda u, v: compute, steps=2) for m in (machine, other))
    assert one == two


@pytest.mark.parametrize("homes", [DEVICE, CPU, ("device", "cpu", "cpu"), ("nvme",) * 3])
def test_more_bandwidth_is_never_slower(homes: tuple[Tier, Tier, Tier]) -> None:
    program = program_of(8, homes, 16)
    names = ("link", "nic", "pcie", "h2d", "d2h", "compute", "cpu", "disk_read", "disk_write")
    machine = replace(SLOW, link_bytes_per_s=3e8, nic_bytes_per_s=2e8, pcie_bytes_per_s=3e8)
    machine = replace(machine, h2d_bytes_per_s=2e8, d2h_bytes_per_s=2e8, op_seconds=0)

    def seconds(machine: Machine, nodes: int = 4) -> float:
        at = replace(machine, nodes=nodes)
        return simulate(program, at, lambda u, v: 1e-4, steps=3).step_seconds

    slow = seconds(machine)
    for name in names:
        field: Any = f"{name}_bytes_per_s"
        fast = seconds(replace(machine, **{field: 2 * getattr(machine, field)}))
        assert fast <= 1.0001 * slow, name
    assert seconds(replace(machine, pcie_bytes_per_s=0.0)) <= slow
    assert seconds(replace(machine, pcie_bytes_per_s=1e30)) <= slow
    assert seconds(replace(machine, hop_seconds=0.0)) < slow
    assert seconds(replace(machine, nic_exchange=4)) > slow


@pytest.mark.parametrize("homes", [DEVICE, CPU])
def test_each_op_takes_its_time_or_longer_and_none_is_lost(homes: tuple[Tier, Tier, Tier]) -> None:
    program = program_of(6, homes, 8)
    machine = replace(SLOW, nodes=2, nic_bytes_per_s=8e9, pcie_bytes_per_s=9e9)
    timeline = simulate(program, machine, lambda u, v: 1e-5, steps=3)
    free: dict[Lane, float] = {}
    for span in timeline.spans:
        assert span.start >= free.get(span.lane, 0.0)
        free[span.lane] = span.stop
        if span.op.verb not in (Verb.FORWARD, Verb.BACKWARD):
            least = seconds_of(span.op, machine, 8)
            assert 0.999999 * least <= span.stop - span.start <= 2.000001 * least
    phases = [phase for name, phase in program.phases.items() if name != "backward_next"]
    told = sum(op.verb is not Verb.COLLECT for phase in phases for op in phase.ops)
    assert len(timeline.spans) >= 3 * told
    assert end_of(timeline) >= timeline.steps[-1]


@pytest.mark.parametrize("homes", ALIKE)
def test_gradients_that_stay_are_sent_once_a_step(homes: tuple[Tier, Tier, Tier]) -> None:
    program = program_of(6, homes, 4, keeps=True, late=True)
    lines = [simulate(program, SLOW, lambda u, v: 1e-6, micro_batches=n) for n in (1, 3)]
    assert moved(lines[0], Lane.COMM) == moved(lines[1], Lane.COMM) > 0
    assert lines[1].step_seconds < 1.01 * lines[0].step_seconds + 3 * 12e-6


# -- predicted steps ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "homes"),
    some_rows_fast([*zip((1e-6, 1e-3, 1e-6), ALIKE), *zip((1e-3, 1e-6, 1e-3), ALIKE)], fast=3),
)
def test_more_micro_batches_are_added_as_if_they_were_simulated(
    homes: tuple[Tier, Tier, Tier], compute: float
) -> None:
    program, machine = program_of(6, homes, 4), replace(SLOW, nodes=2)
    count = MICRO_BATCHES + 6
    found = predict(program, machine, lambda u, v: compute, micro_batches=count, early=False)
    whole = simulate(program, machine, lambda u, v: compute, steps=4, micro_batches=count)
    assert found.step_seconds == pytest.approx(whole.step_seconds, rel=0.01)
    assert found.exposed_seconds == pytest.approx(whole.exposed, rel=0.01, abs=1e-5)
    assert found.busy[MODEL] == pytest.approx(count * 12 * compute)
    assert found.moved["comm"] * 4 == moved(whole, Lane.COMM)


def test_what_bounds_a_step_is_what_would_save_most() -> None:
    program = program_of(6, CPU, 4)
    for lane, machine in {
        "comm": replace(SLOW, nodes=2, nic_bytes_per_s=1e7),
        "cpu": replace(SLOW, nodes=2, cpu_bytes_per_s=1e7),
        MODEL: replace(SLOW, nodes=2),
    }.items():
        seconds = 1e-2 if lane == MODEL else 1e-6
        found = predict(program, machine, lambda u, v, by=seconds: by)
        assert found.bound_by == lane
        assert found.faster[lane] < 0.7 * found.step_seconds
        busiest = predict(program, machine, lambda u, v, by=seconds: by, tries=False)
        assert (busiest.bound_by, busiest.step_seconds) == (lane, found.step_seconds)


# -- the planner's short cut --------------------------------------------------------------------


@given(
    st.lists(wanted_parameters(), min_size=1, max_size=5),
    st.sampled_from([1, 2, 5]),
    st.booleans(),
    st.booleans(),
)
def test_what_values_take_at_least_is_no_more_than_they_take(
    wanted: list[Any], ranks: int, keeps: bool, nvme: bool
) -> None:
    from offload.config import Config

    units = [lay_out_unit(f"u{i}", one, ranks=ranks) for i, one in enumerate(wanted)]
    profile = profile_of(units, sharding=Sharding(0, ranks, keeps and ranks > 1))
    config = Config(nvme_path=("d",) if nvme else ())
    for accelerator in (False, True):
        machine = Machine(device_bytes=0, cpu_bytes=0, device_is_cpu=not accelerator)
        search = _Search(profile, config, machine, "adam")
        for on_device, slots in search.candidates():
            at_least = search.values_bytes[on_device] + search.full[slots]
            assert at_least <= search.device(on_device, slots)
