"""The engine on a paced accelerator: right bits and no race, whatever comes late."""

from __future__ import annotations

import os
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import offload
from offload.program.ops import Lane
from tests import paced_loops as loops
from tests.paced import Paced
from tests.paced_loops import Actions, Least, backward_only, check, evaluate, look_at_states, train
from tests.stand_in import driven
from tests.training import ALL_PLACEMENTS, RESIDENT, attached, same_bits, some_fast, some_rows_fast

# -- what the host must wait for ---------------------------------------------------------------

LATE = {"seed": 0, "host_pace": 0.0, "host_pauses_s": 1e-2}
"""A device that does nothing before it must, and lanes that take their time."""

LATER = {**LATE, "host_pauses_s": 1e-1}

# What is done right after a backward, or a step, whose effects are still on their way.
AFTER_A_BACKWARD: dict[str, tuple[str, Actions]] = {
    "show": ("cpu-cpu-cpu", [loops.look_at_gradients]),
    "replace": ("cpu-cpu-cpu", [loops.set_gradients]),
    "replace on the device": ("cpu-device-cpu", [loops.set_gradients_of_the_device]),
    "replace and update on the device": ("cpu-device-device", [loops.set_gradients_of_the_device]),
    "replace by a copy": ("cpu-cpu-cpu", [loops.set_expanded_gradients]),
    "copy into": (
        "cpu-cpu-cpu",
        [loops.copy_into_gradients, loops.step_and_keep_gradients, look_at_states],
    ),
    "copy into, zero, of the drive": (
        "cpu-nvme-cpu",
        [loops.copy_into_gradients, loops.zero_gradients],
    ),
    "copy into, give up": (
        "cpu-cpu-cpu",
        [loops.copy_into_gradients, loops.give_gradients_up, backward_only],
    ),
    "copy into, replace": ("cpu-cpu-cpu", [loops.copy_into_gradients, loops.set_gradients]),
    "put a copy home": ("cpu-nvme-cpu", [loops.edit_gradients, loops.step_and_keep_gradients]),
    "zero, on the drive": (
        "cpu-nvme-cpu",
        [loops.zero_gradients, backward_only, loops.look_at_gradients],
    ),
    "give up what is held": ("cpu-cpu-cpu", [loops.give_up_what_is_held, backward_only]),
    "let go": ("cpu-cpu-cpu", [loops.edit_gradients, loops.step_and_keep_gradients]),
    "stream": ("device-cpu-cpu", [loops.stream_weights]),
    "read states": ("cpu-cpu-device", [train, backward_only, look_at_states]),
    "copy": ("device-cpu-cpu", [loops.look_elsewhere]),
}
AFTER_A_STEP: dict[str, tuple[str, Actions]] = {
    "read states": ("cpu-cpu-cpu", [look_at_states]),
    "read states of the drive": ("cpu-cpu-nvme", [look_at_states]),
    "load states": ("cpu-cpu-cpu", [loops.save_states, train, loops.load_states]),
    "copy": ("cpu-cpu-cpu", [loops.look]),
    "stream": ("cpu-cpu-cpu", [loops.stream_weights]),
    "edit": ("cpu-cpu-nvme", [loops.edit, evaluate]),
    "share a slot": ("cpu-cpu-cpu", [loops.use_one_block_inside_another]),
    "meet": ("device-device-cpu", [train, evaluate]),
    "meet, from the drive": ("device-device-nvme", [train, evaluate]),
    "write what the device has made": ("nvme-cpu-device", [evaluate]),
}


LATE_US = 2000
"""By how much copies of lanes may be late."""


def script_of(
    before: Actions, between: Actions, after: Actions, delays: dict[str, Any] = LATE
) -> loops.Script:
    return loops.Script(
        [loops.Step(before, between, after, delays)], False, False, False, None, None
    )


@pytest.mark.parametrize("name", some_fast(AFTER_A_BACKWARD))
def test_what_is_done_after_a_backward_waits_for_it(name: str, tmp_path: Any) -> None:
    placement, actions = AFTER_A_BACKWARD[name]
    check(
        script_of([], actions, []),
        tuple(placement.split("-")),
        tmp_path,
        tight=True,
        on=partial(driven, 0, LATE_US),
    )


@pytest.mark.parametrize("name", some_fast(AFTER_A_STEP))
def test_what_is_done_after_a_step_waits_for_it(name: str, tmp_path: Any) -> None:
    placement, actions = AFTER_A_STEP[name]
    check(
        script_of([], [], actions),
        tuple(placement.split("-")),
        tmp_path,
        tight=True,
        on=partial(driven, 0, LATE_US),
    )


@pytest.mark.slow
def test_states_are_loaded_before_an_update_needs_them(tmp_path: Any) -> None:
    between = [train, backward_only, loops.save_states, loops.load_states]
    script = script_of([], between, [look_at_states])  # At which only lanes are waited for.
    check(script, ("cpu", "cpu", "device"), tmp_path, tight=True, on=partial(driven, 0, LATE_US))


def gradients_after_detach(
    placement: tuple[str, str, str], directory: Any, device: Paced | None
) -> list[torch.Tensor]:
    with attached(
        placement, directory, build=lambda: loops.Small(tied=False, checkpointed=False)
    ) as run:
        if device is not None:
            device.change(**LATER)
        loops.Loop(run, device).backward()
        offload.detach(run.model)
        return [parameter.grad for parameter in run.model.parameters()]


def test_detach_after_a_backward_waits_for_its_gradients(tmp_path: Any) -> None:
    expected = gradients_after_detach(RESIDENT, tmp_path, None)
    with driven() as device:
        found = gradients_after_detach(("cpu", "cpu", "cpu"), tmp_path, device)
        device.timeline.finish()
    assert not device.timeline.races
    assert all(same_bits(one, other) for one, other in zip(found, expected))


@pytest.mark.parametrize(
    ("clip", "seed"), some_rows_fast([(None, 0), *((0.1, seed) for seed in range(4))], fast=2)
)
def test_residents_and_a_lane_take_turns_at_the_workspace(
    clip: float | None, seed: int, tmp_path: Any
) -> None:
    """And a resident's update waits for the norm, in which all have a part.

    From the second step on a lane sums squares before `step()`.
    """
    script = loops.Script(
        [loops.Step([], [], [], LATE)] * 3, False, False, False, clip, None, loops.Mixed
    )
    expected = script.go(RESIDENT, tmp_path, gradient_dtype="fp32")
    with driven(seed, 10 * LATE_US) as device:
        found = script.go(RESIDENT, tmp_path, device, gradient_dtype="fp32")
        device.timeline.finish()
    assert not device.timeline.races, device.timeline.races[0]
    assert all(same_bits(one, other) for one, other in zip(found, expected))


def test_the_squares_of_residents_wait_for_those_that_a_lane_sums(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both use the device's one workspace."""
    options: Any = {"build": build_mixed, "max_grad_norm": 0.1, "gradient_dtype": "fp32"}
    with driven(0, 25 * LATE_US) as device, attached(RESIDENT, tmp_path, **options) as run:
        runner, over = run.engine.runner, list[bool]()

        def perform(*given: Any) -> None:
            over.extend(task.over for task in sums if given[1][0] == "squares")
            type(runner).perform(runner, *given)

        monkeypatch.setattr(runner, "perform", perform)
        for _ in range(2):  # The first step sums all squares itself.
            loops.Loop(run, device).backward()
            sums = run.engine.updates._sums
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert len(over) > 1
    assert all(over)


def test_a_step_of_residents_waits_for_their_norm_alone(tmp_path: Any) -> None:
    """And once for all of it; the next look at what it has done waits for the update."""
    for clip in (None, 0.1):
        options: Any = {"build": build_least, "max_grad_norm": clip}
        with driven() as device, attached(RESIDENT, tmp_path, **options) as run:
            device.change(**LATE)
            loops.Loop(run, device).backward()
            before = device.waits
            run.optimizer.step()
            assert len(run.engine.plan.residents) > 1
            assert device.waits - before == (clip is not None)
            assert device.stream().items
            run.engine.settle()
            assert not device.stream().items
        assert not device.timeline.races


def build_least() -> Least:
    return Least(tied=False, checkpointed=False)


def build_mixed() -> loops.Mixed:
    return loops.Mixed(tied=False, checkpointed=False)


def test_residents_are_there_for_every_stream_once_attached(tmp_path: Any) -> None:
    def build() -> Least:
        with torch.device("meta"):
            return build_least()

    with driven() as device:
        with attached(RESIDENT, tmp_path, build=build) as run, device.unordered():
            found = [parameter.detach().clone() for parameter in run.model.parameters()]
        device.timeline.finish()
    assert not device.timeline.races
    assert all(torch.isfinite(one).all() for one in found)


def test_residents_are_there_for_every_stream_once_awake(tmp_path: Any) -> None:
    with driven() as device:
        with attached(RESIDENT, tmp_path, build=build_least) as run:
            before = [parameter.detach().clone() for parameter in run.model.parameters()]
            offload.sleep(run.model)
            offload.wake(run.model)
            assert all(device.holds(parameter) for parameter in run.model.parameters())
            with device.unordered():
                after = [parameter.detach().clone() for parameter in run.model.parameters()]
        device.timeline.finish()
    assert not device.timeline.races
    assert all(same_bits(one, other) for one, other in zip(after, before))


def test_zeros_are_there_for_every_stream() -> None:
    with driven() as device:
        made = device.zeros(64)
        with device.unordered():
            made.add_(1)
        device.timeline.finish()
    assert not device.timeline.races
    assert made.sum() == 64


def test_sleep_and_wake_wait_for_all_that_is_under_way(tmp_path: Any) -> None:
    script = script_of([], [], [loops.edit_held, loops.nap, loops.look])
    check(script, RESIDENT, tmp_path, tight=False, on=driven)


def test_an_edit_is_put_home_when_no_lane_touches_that_home(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driven(), attached(("nvme", "cpu", "cpu"), tmp_path, build=build_least) as run:
        runner, called = run.engine.runner, list[str]()
        quiesce, write = runner.quiesce, runner.write_home
        monkeypatch.setattr(
            runner, "quiesce", lambda *a, **b: (called.append(f"quiesce {b}"), quiesce(*a, **b))
        )
        monkeypatch.setattr(runner, "write_home", lambda *a: (called.append("write"), write(*a)))
        with torch.no_grad():
            next(run.model.parameters()).mul_(0.5)
        called.clear()
        run.engine.snapshots.boundary()
        assert "quiesce {}" in called[: called.index("write")]


def test_a_copy_between_memories_waits_asleep_for_what_it_copies(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driven() as device, attached(("cpu", "cpu", "cpu"), tmp_path, build=build_least) as run:
        device.change(**LATE)
        runner, into = run.engine.runner, torch.zeros(64)
        source = device.empty((64,), dtype=torch.float32).fill_(1.0)
        assert device.stream().items
        told = list[Lane]()
        monkeypatch.setattr(runner.stats, "_expose", lambda lane, *_: told.append(lane))
        runner.copy_now(into, source)
        assert told == [Lane.COMPUTE, Lane.D2H]
        assert into.sum() == 64


# -- any schedule -------------------------------------------------------------------------------

STEPS = 20
"""Of an example of the many, each with delays of its own."""


def schedules(examples: int) -> Any:
    """So many examples; nothing is shrunk, as much depends on threads."""
    drawn = given(
        placement=st.sampled_from(ALL_PLACEMENTS), tight=st.booleans(), seed=st.integers(0, 1 << 32)
    )
    options = settings(
        max_examples=examples, deadline=None, phases=[Phase.generate], derandomize=examples < 10
    )
    return lambda test: options(drawn(test))


@schedules(2)
def test_bits_are_those_of_the_resident_run_on_some_schedules(
    tmp_path_factory: pytest.TempPathFactory, placement: Any, tight: bool, seed: int
) -> None:
    script, on = loops.draw_script(Random(seed), 2), partial(driven, seed, seed % LATE_US)
    check(script, placement, tmp_path_factory.getbasetemp(), tight=tight, on=on)


@pytest.mark.slow
@pytest.mark.timeout(0)
@schedules(int(os.environ.get("PACED_SCHEDULES", "500")) // STEPS)
def test_bits_are_those_of_the_resident_run_on_many_schedules(
    tmp_path_factory: pytest.TempPathFactory, placement: Any, tight: bool, seed: int
) -> None:
    """A schedule is a step with its delays; one example in ten is of the larger model."""
    model = loops.Small if seed % 10 == 0 else Least
    script, on = (
        loops.draw_script(Random(seed), STEPS, model),
        partial(driven, seed, seed % LATE_US),
    )
    check(script, placement, tmp_path_factory.getbasetemp(), tight=tight, on=on)
