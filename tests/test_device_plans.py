"""Plans beside an accelerator: the size of chunks, what a larger budget gains, what lies idle."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpu_adam.formats import scratch_bytes
from offload.config import Config
from offload.planning.layout import Place
from offload.planning.machine import Machine
from offload.planning.planner import (
    DRIVE_STAGES_MAX,
    LARGE_CHUNK_ELEMENTS,
    BudgetError,
    Grain,
    better_grain,
    plan,
    plan_cut,
)
from offload.planning.profile import CHUNK_ELEMENTS, CHUNK_STAGES, Profile, Unit, profile_of
from offload.program.compile import compile_program
from offload.program.ops import Verb
from offload.program.simulate import simulate
from tests.profiles import H100, unit
from tests.stand_in import driven
from tests.test_plan import HUGE
from tests.training import RESIDENT, attached, plain

pytest.importorskip("offload.runtime._runner", reason="not compiled here")


@pytest.mark.parametrize(
    ("config", "machine", "largest"),
    [
        (Config(), HUGE, LARGE_CHUNK_ELEMENTS),
        (Config(device_memory="1GiB"), HUGE, 1 << 22),
        (Config(cpu_memory="1MiB"), HUGE, CHUNK_ELEMENTS),
        (Config(), replace(HUGE, device_is_cpu=True), CHUNK_ELEMENTS),
    ],
)
def test_chunks_are_as_large_as_part_of_the_budgets_allows(
    config: Config, machine: Machine, largest: int
) -> None:
    found = better_grain(config, machine, drive=False) or Grain()
    assert found == Grain(largest, CHUNK_STAGES)


def test_more_chunks_are_under_way_where_a_drive_takes_part_and_memory_has_room() -> None:
    host = replace(HUGE, device_is_cpu=True)
    room = {"3GiB": DRIVE_STAGES_MAX, "3071MiB": DRIVE_STAGES_MAX - 1, "1GiB": CHUNK_STAGES}
    for memory, most in room.items():
        config = Config(optimizer="nvme", nvme_path=("/nvme",), cpu_memory=memory)
        found = plan_cut(cut_from([unit("wide", 30_000_000)]), config, host)
        slots = [one for one in found.slots if one.use == "state_chunk"]
        assert len(slots) == most


def test_more_memory_takes_nothing_to_the_drive() -> None:
    """Not where it is enough for more chunks under way, whose slots take some of it."""
    host = replace(HUGE, device_is_cpu=True)
    profile, found = cut_from([unit(f"unit{i}", 12_200_000) for i in range(17)]), []
    options: dict[str, Any] = {"device_memory": "800MiB", "nvme_path": ("/nvme",)}
    for memory in range(1984, 2176, 16):
        config = Config(params="device", gradients="device", cpu_memory=f"{memory}MiB", **options)
        found.append(plan_cut(profile, config, host).taken_bytes("nvme"))
    assert found == sorted(found, reverse=True)
    assert found[0] > 0 == found[-1]


def cut_from(units: list[Unit]) -> Callable[[Grain], Profile]:
    return lambda cut: profile_of(units, chunk_stages=cut.stages)


def test_updates_on_an_accelerator_have_a_workspace_within_the_budget() -> None:
    profile = profile_of([unit("small", 70_000), unit("wide", 3_000_000)])
    need = scratch_bytes(1 << 20)
    for states, on_cpu in itertools.product(("device", "cpu"), (False, True)):
        asked: dict[str, Any] = {"params": "cpu", "gradients": "cpu", "optimizer": states}
        config = Config(**asked)
        found = plan(profile, config, replace(HUGE, device_is_cpu=on_cpu))
        room = found.slots.get(Place("device", "workspace"))
        assert (room is not None) == (states == "device" and not on_cpu)
        if room is not None:
            assert room.bytes == need
            size = found.taken_bytes("device")
            assert room.offset + room.bytes <= size
            assert plan(profile, replace(config, device_memory=size), HUGE) is not None
            with pytest.raises(BudgetError):
                plan(profile, replace(config, device_memory=size - 1), HUGE)


@pytest.mark.parametrize("tokens", [1024, 4096, 16384])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_more_device_memory_is_hardly_ever_slower_and_often_faster(
    clip: float | None, tokens: int
) -> None:
    """All but the updates on the device itself, which nothing hides: a twentieth at most."""
    elements = 190_000_000
    units = [unit(f"block{i}", elements, chunk_elements=LARGE_CHUNK_ELEMENTS) for i in range(18)]

    def seconds(one: int, verb: Verb) -> float:
        return (2 if verb is Verb.FORWARD else 6) * elements * tokens / 400e12

    def step(gigabytes: int) -> float:
        config = Config(
            device_memory=gigabytes * 10**9, cpu_memory="1TiB", max_grad_norm=clip, micro_batches=1
        )
        program = compile_program(plan(profile_of(units), config, H100))
        early = clip is None
        return simulate(program, H100, seconds, updates_in_backward=early).step_seconds

    steps = [step(size) for size in (3, 6, 9, 12, 20, 30, 40, 60)]
    assert all(more <= 1.05 * less for less, more in itertools.pairwise(steps)), steps
    assert max(steps[1:]) <= 1.05 * steps[0]
    if clip is not None or tokens < 16384:
        assert steps[-1] < 0.9 * steps[0]


def test_memory_that_activations_leave_idle_is_told_where_more_would_be_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.paced.Paced.idle_bytes", lambda _: 1 << 30, raising=False)
    for placement, tells in ((("auto",) * 3, True), (("cpu",) * 3, False), (RESIDENT, False)):
        with (
            driven(),
            attached(placement, tmp_path, device_memory="256KiB" if tells else None) as run,
        ):
            for number in range(3):
                assert not run.engine.notices or number > 1
                plain(run, number)
            told = [one for one in run.engine.notices if "were idle" in one]
            assert len(told) == tells
            if tells:
                assert "1.00 GiB" in told[0]
                assert "Config.device_memory='768.25MiB'" in told[0]


SEVEN = [unit(f"b{i}", 185_000_000, chunk_elements=LARGE_CHUNK_ELEMENTS) for i in range(37)]
FORWARD_S, BACKWARD_S = (work * 185_000_000 * 16384 / 450e12 for work in (2, 6))
IN_HBM = 37 * (FORWARD_S + BACKWARD_S + 40 * 185_000_000 / 4.3e12)
"""A step of seven billion parameters and 16k tokens: blocks recomputed at 450 TFLOPS, and the
update of fp32 states at the speed of HBM."""


def in_hbm(clip: float | None = None, **asked: Any) -> tuple[float, float]:
    """A step over one in HBM; and, clipping, over backward and the longer of forward and update."""
    config = Config(cpu_memory="1TiB", max_grad_norm=clip, micro_batches=1, **asked)
    program = compile_program(plan(profile_of(SEVEN), config, H100))

    def seconds(one: int, verb: Verb) -> float:
        return FORWARD_S if verb is Verb.FORWARD else BACKWARD_S

    found = simulate(program, H100, seconds, updates_in_backward=clip is None)
    updates = [one for one in found.spans if one.op.verb is Verb.UPDATE and one.step == 2]
    update = sum(one.stop - one.start for one in updates)
    bound = 37 * BACKWARD_S + max(37 * FORWARD_S, update)
    return found.step_seconds / IN_HBM, found.step_seconds / bound


@pytest.mark.parametrize("params", ["cpu", "device"])
def test_seven_billion_parameters_are_predicted_to_keep_up_with_hbm(params: str) -> None:
    tiers: dict[str, Any] = {"params": params, "gradients": "cpu", "optimizer": "cpu"}
    assert in_hbm(**tiers)[0] <= 1.08
    for states in ("exact", "compact"):
        assert in_hbm(1.0, states=states, **tiers)[1] <= 1.05
    assert in_hbm(1.0, device_memory="80GiB")[0] <= 1.08
