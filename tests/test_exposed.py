"""Whoever waits for a device has it booked on the lane that is the reason."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload import reporting
from offload.cli.breakdown import breakdown, verdict
from offload.program.ops import Lane, Value
from offload.reporting import Wait
from tests import paced_loops as loops
from tests.paced import Paced
from tests.paced_loops import Actions, Loop, Small, backward_only, edit, evaluate, look, train
from tests.paced_streams import Event
from tests.stand_in import driven
from tests.test_report import MADE
from tests.training import attached, some_fast

LATE_S = 0.02

Slept = tuple[float, float, str]
"""From when to when, and who called."""

CASES: dict[str, tuple[str, Actions, Lane | None]] = {
    "residents, the step after": ("device-device-device", [train, train], Lane.COMPUTE),
    "a gradient shown": ("nvme-nvme-cpu", [backward_only, loops.look_at_gradients], None),
    "residents, their norm": ("device-device-device", [train], Lane.COMPUTE),
    "a gradient edited": (
        "cpu-device-cpu",
        [backward_only, loops.edit_gradients, loops.step_and_keep_gradients],
        Lane.COMPUTE,
    ),
    "a gradient set": (
        "cpu-cpu-cpu",
        [backward_only, loops.copy_into_gradients, loops.step_only],
        Lane.COMPUTE,
    ),
    "a look": ("cpu-cpu-cpu", [train, look], Lane.H2D),
    "a look at residents' company": ("device-cpu-cpu", [train, look], Lane.COMPUTE),
    "an edit": ("cpu-cpu-cpu", [train, edit, evaluate], Lane.D2H),
    "an edit of the drive": ("nvme-cpu-nvme", [train, edit, evaluate], Lane.D2H),
    "an edit of a home on the device": ("device-cpu-cpu", [train, edit, evaluate], Lane.COMPUTE),
    "all weights": ("cpu-cpu-cpu", [train, loops.stream_weights], Lane.H2D),
    "states": ("cpu-cpu-device", [train, loops.look_at_states], Lane.COMPUTE),
}


def test_what_the_host_has_put_home_in_its_own_memory_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        runner, value = run.engine.runner, Value("weight", 0)
        drained: list[int] = []
        monkeypatch.setattr(runner, "drain", lambda: drained.append(1))
        runner.write_home(value, runner.read_home(value).clone())
        assert not drained
        monkeypatch.setattr(runner.device, "holds", lambda _: True)
        runner.write_home(value, runner.read_home(value).clone())
        assert drained


@contextmanager
def late(device: Paced, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Slept]]:
    """A device that takes a while whenever somebody waits: when this thread did, in the engine."""
    waited: list[Slept] = []
    mine, synchronize = threading.get_ident(), Event.synchronize

    def slow(event: Event) -> None:
        if not event.passed:
            since = time.perf_counter()
            time.sleep(LATE_S)
            if threading.get_ident() == mine and (who := in_the_engine()):
                waited.append((since, time.perf_counter(), who))
        synchronize(event)

    device.change(0, host_pace=0.0, host_pauses_s=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Event, "synchronize", slow)
        yield waited


def in_the_engine() -> str | None:
    """The function of the engine that this thread is in."""
    frame: Any = sys._getframe()
    while frame is not None and not frame.f_globals["__name__"].startswith("offload."):
        frame = frame.f_back
    return frame and frame.f_code.co_name


@pytest.mark.parametrize("name", some_fast(CASES, fast=2))
def test_all_waits_for_a_device_are_booked(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement, actions, lane = CASES[name]
    clip = 0.1 if "norm" in name else None
    options: Any = {"build": lambda: Small(tied=False, checkpointed=False), "max_grad_norm": clip}
    with driven() as device:
        a, b, c = placement.split("-")
        with attached((a, b, c), tmp_path, **options) as run:
            loop = Loop(run, device)
            with late(device, monkeypatch) as waited:
                for action in actions:
                    action(loop)
                run.engine.settle()
            traced = run.engine.runner.stats.traced()
            use = run.engine.runner.stats.use
            # None: where a gradient is on its way to the drive by then no test decides.
            exposed = sum(use[one].exposed_s for one in use if lane in (None, one))
        device.timeline.finish()
    assert waited
    booked = [(one.start, one.stop) for one in traced.waited]
    missing = [
        one for one in waited if reporting.seconds(reporting.clip(booked, *one[:2])) < 0.9 * LATE_S
    ]
    assert not missing
    assert exposed >= 0.9 * LATE_S
    total = sum(one.stop - one.start for one in traced.waited)
    assert total == pytest.approx(sum(stop - start for start, stop in booked))  # Nothing twice.


def test_what_bounds_a_run_whose_host_waits_for_the_device_is_the_device() -> None:
    made = replace(MADE, device="cuda:0", device_is_host=False, prediction=None)
    made = replace(made, waits=[Wait("compute", 10.0, 27.0)])
    told = verdict(made, breakdown(made))[0]
    assert told.startswith("cuda:0 bounds the step: training waits 85% of the time for what")
