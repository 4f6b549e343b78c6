"""Native lanes on a device: by the stand-in for CUDA's library, over the code that a GPU runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import offload
from cpu_adam.choice import ptx
from offload.program.ops import Lane, Op, Value, Verb
from offload.runtime import device as devices
from offload.runtime.device import Accelerator
from offload.runtime.native import RUNNER_VARIABLE, Native
from offload.runtime.works import At, Copy, Squares, Work
from tests import test_durable, training
from tests.forked import Forked
from tests.paced import paced
from tests.paced_loops import Script, Step, check, draw_script, nap
from tests.stand_in import Driven, controls, driven, library
from tests.test_paced import LATE, LATE_US
from tests.training import ALL_PLACEMENTS, RESIDENT, Net, assert_same, attached, plain, train

native = pytest.importorskip("offload.runtime._runner", reason="not compiled here")

MIXED = ("nvme", "cpu", "device")
OFFLOADED = ("device", "device", "cpu")
"""Gradients down, the update on the CPU, weights up."""

REFUSED = "an illegal memory access was encountered"


def small() -> Net:
    return Net(width=8, layers=2)


# -- bits ------------------------------------------------------------------------------------------


def of_bits() -> list[Any]:
    """Each placement clipped and not; in the fast tier every other one of `SAMPLED`, in turn."""
    fast = {(placement, number % 2) for number, placement in enumerate(training.SAMPLED[::2])}
    return [
        pytest.param(
            placement,
            (None, 0.1)[clips],
            marks=() if (placement, clips) in fast else pytest.mark.slow,
            id=f"{'-'.join(placement)}{'-clipped' * clips}",
        )
        for placement in ALL_PLACEMENTS
        for clips in (0, 1)
    ]


@pytest.mark.parametrize(("placement", "clipped"), of_bits())
def test_native_lanes_have_the_bits_of_the_reference(
    placement: tuple[str, str, str], clipped: float | None, tmp_path: Path
) -> None:
    options: Any = {"max_grad_norm": clipped, "build": small}
    with driven(1, 300) as device:
        found = train(placement, tmp_path, training.two_micro_batches, **options)
    assert not device.timeline.races
    assert device.calls.stand_in_calls() > 100 or placement == RESIDENT
    with pytest.MonkeyPatch.context() as patch, paced():
        patch.setenv(RUNNER_VARIABLE, "python")
        assert_same(found, train(placement, tmp_path, training.two_micro_batches, **options))


@pytest.mark.parametrize(
    ("before", "after"),
    training.some_rows_fast(
        [
            (MIXED, ("cpu", "cpu", "cpu")),
            (OFFLOADED, ("cpu", "cpu", "cpu")),
            (MIXED, RESIDENT),
            (OFFLOADED, RESIDENT),
        ]
    ),
)
def test_a_durable_run_goes_on(before: Any, after: Any, tmp_path: Path) -> None:
    with driven(1, 300) as device, pytest.MonkeyPatch.context() as patch:
        test_durable.test_a_run_goes_on_from_what_was_committed(before, after, tmp_path, patch)
    assert not device.timeline.races


@pytest.mark.parametrize("seed", training.some_fast(range(100), fast=3))
def test_any_delays_end_and_change_no_bit(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    script = draw_script(random, 2)
    placement: Any = random.choice([one for one in ALL_PLACEMENTS if one != RESIDENT])
    on = partial(driven, seed, random.choice([50, 500, LATE_US]))
    check(script, placement, tmp_path, tight=random.random() < 0.5, on=on)


@pytest.mark.parametrize("which", [1, 2], ids=["copies", "the user's compute"])
def test_a_wait_that_is_taken_out_shows(which: int, tmp_path: Path) -> None:
    """The events of lanes' copies, and those of the user's streams."""
    script = Script([Step([], [nap], [nap], LATE)] * 2, False, False, False, None, None)
    expected = script.go(RESIDENT, tmp_path)
    differs = 0
    for placement in (("cpu", "cpu", "cpu"), OFFLOADED):
        with driven(3, LATE_US) as device:
            device.calls.stand_in_unwait(which)
            try:
                found = script.go(placement, tmp_path, device)
            except (offload.EngineError, RuntimeError):
                differs += 1
                continue
            device.timeline.finish()
        pairs = zip(found, expected, strict=True)
        differs += not all(torch.equal(one, other) for one, other in pairs)
    assert differs


def test_the_lanes_are_native_and_tell_what_they_moved(tmp_path: Path) -> None:
    with driven(), attached(("device", "device", "nvme"), tmp_path, build=small) as run:
        assert isinstance(run.engine.runner._lanes, Native)
        assert not run.engine.notices
        for number in range(2):
            plain(run, number)
        run.engine.settle()
        plan, use = run.engine.plan, run.engine.runner.stats.use
        weights = sum(parameter.nbytes for parameter in run.model.parameters())
        states = sum(plan.bytes_of("state", unit) for unit in range(len(plan.profile.units)))
        assert use[Lane.D2H].bytes == 2 * (weights + weights)  # And gradients.
        assert use[Lane.H2D].bytes == 2 * weights
        assert use[Lane.DISK].bytes >= 2 * (states + states)
        assert use[Lane.CPU].operations == use[Lane.H2D].operations
        assert use[Lane.D2H].busy_s > 0


# -- failures --------------------------------------------------------------------------------------

OPENING = {"cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"}
ENDING = {"cuCtxPopCurrent_v2", "cuStreamSynchronize"}
"""What changes nothing where it is refused."""


def two_steps(
    placement: tuple[str, str, str], directory: Path, at: int, *, stays: bool
) -> tuple[str, training.Result | None, str, int]:
    """Train while a call of the driver fails: which, what came of it, what was told, calls."""
    with driven() as device:
        device.calls.stand_in_fail(at, stays)
        with attached(placement, directory, build=small) as run:
            result, told = None, "\n".join(run.engine.notices)
            try:
                torch.manual_seed(2)
                for number in range(2):
                    plain(run, number)
                run.engine.settle()
                run.engine.runner.idle()
                result = training.result_of(run)
            except offload.EngineError as error:
                told = str(error)
                with pytest.raises(offload.EngineError, match=REFUSED):
                    run.optimizer.step()
            failed = device.calls.stand_in_failed().decode()
            calls = int(device.calls.stand_in_calls())
    return failed, result, told, calls


@pytest.mark.parametrize(
    ("placement", "stays", "share"),
    [
        (("cpu", "cpu", "cpu"), False, 101),
        (OFFLOADED, True, 101),
        pytest.param(("cpu", "cpu", "cpu"), False, 11, marks=pytest.mark.slow),
        pytest.param(OFFLOADED, True, 11, marks=pytest.mark.slow),
        pytest.param(("cpu", "cpu", "cpu"), True, 1, marks=pytest.mark.slow),
        pytest.param(OFFLOADED, False, 1, marks=pytest.mark.slow),
        pytest.param(("device", "cpu", "nvme"), False, 1, marks=pytest.mark.slow),
    ],
)
def test_a_call_that_fails_is_told_and_nothing_hangs(
    placement: tuple[str, str, str], stays: bool, share: int, tmp_path: Path
) -> None:
    """Any of two steps, or every so manieth."""
    _, expected, _, calls = two_steps(placement, tmp_path, 0, stays=False)
    assert expected is not None
    seen = set()
    for at in (*range(1, 8), *range(8, calls + 1, share)):
        failed, result, told, _ = two_steps(placement, tmp_path, at, stays=stays)
        seen.add(failed)
        opening = failed in OPENING or "run in Python" in told
        if opening:
            assert "run in Python" in told
            assert REFUSED in told
        if opening or not failed or (failed in ENDING and not stays):
            assert result is not None, (at, failed, told)
            assert_same(result, expected)
        elif not stays or result is None:
            assert result is None, (at, failed)
            assert REFUSED in told, (at, failed, told)
            assert f"refused {failed.removesuffix('_v2')}" in told or stays
    assert seen >= OPENING
    working = {"cuMemcpyAsync", "cuEventRecord", "cuEventSynchronize"}
    assert seen >= working if share == 1 else seen & working


def opened(path: str, patch: pytest.MonkeyPatch) -> Any:
    """What the engine opens where CUDA's driver is at that path."""
    patch.setenv(devices.LIBRARY_VARIABLE, path)
    return Accelerator(torch.device("cuda", 0)).open(native)


def test_a_library_that_cannot_serve_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    controls()
    assert opened(str(library()), monkeypatch) is not None
    with pytest.raises(RuntimeError, match=r"nowhere\.so cannot be opened .*likely no driver"):
        opened(str(tmp_path / "nowhere.so"), monkeypatch)
    with pytest.raises(RuntimeError, match=r"lacks cuStreamCreateWithPriority: .*update"):
        opened(str(library("-DLACKS_STREAMS")), monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(RuntimeError, match="no driver for ROCm"):
        opened(str(library()), monkeypatch)


def lacking(self: Driven, native: Any) -> Any:
    """What stands for a driver without streams."""
    return native.open_cuda(str(library("-DLACKS_STREAMS")), 0)


@pytest.mark.parametrize(
    ("reason", "placement"),
    [
        ("lacks cuStreamCreateWithPriority", MIXED),
        ("unsupported toolchain", MIXED),  # A driver that is older than the kernels' text.
        ("unsupported toolchain", RESIDENT),
        pytest.param("unsupported toolchain", ("cpu", "device", "device"), marks=pytest.mark.slow),
    ],
)
def test_where_a_driver_cannot_serve_python_does(
    reason: str, placement: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is told once, and the bits stay."""
    options: Any = {"max_grad_norm": 0.1, "build": small}
    with driven():
        expected = train(placement, tmp_path, **options)
    with driven() as device:
        if reason.startswith("lacks"):
            monkeypatch.setattr(Driven, "open", lacking)
        else:
            device.calls.stand_in_kernels(b"")
        with attached(placement, tmp_path, **options) as run:
            assert_same(training.trained(run), expected)
            (told,) = run.engine.notices
            assert "the lanes run in Python, which is slower: " in told
            assert reason in told


def test_a_forked_child_calls_nothing(tmp_path: Path) -> None:
    """Not even where it collects what was the parent's."""
    with driven() as device, attached(("cpu", "cpu", "cpu"), tmp_path, build=small) as run:
        plain(run, 0)
        run.engine.runner.idle()
        held = [native.open_cuda(str(library()), 0), run.engine.runner._lanes._runner]

        def child() -> None:
            before = device.calls.stand_in_calls()
            run.engine.runner.__dict__.clear()
            held.clear()
            print(device.calls.stand_in_calls() - before)

        forked = Forked(child)
        printed, errors = forked.communicate()
        assert forked.returncode == 0, errors
        assert printed.split() == ["0"]


def test_what_was_made_is_given_back(tmp_path: Path) -> None:
    calls = controls()
    before = calls.stand_in_live()
    driver = native.open_cuda(str(library()), 0)
    source, into = torch.arange(100), torch.zeros(100, dtype=torch.int64)
    made = Op(Lane.H2D, Verb.MOVE, Value("weight", 0), (), (), 800, 0)
    lanes = Native(driver=driver)
    (task,) = lanes.start(lanes.phase([(made, Work([Copy(At(into), At(source))]))]), 0)
    assert lanes.over(task, 20.0)
    assert torch.equal(into, source)
    assert calls.stand_in_live() == before + 3  # The context, a stream, an event.
    del lanes, task, driver
    assert calls.stand_in_live() == before


def test_updates_on_the_device_are_launches(tmp_path: Path) -> None:
    """Of residents on the user's stream, of others on that of their lane."""
    for placement in (RESIDENT, MIXED):
        with driven(2, 500) as device, attached(placement, tmp_path, build=small) as run:
            before = device.calls.stand_in_calls()
            plain(run, 0)
            run.engine.settle()
            use = run.engine.runner.stats.use
            assert use[Lane.COMPUTE].operations >= len(run.engine.plan.profile.units)
            assert device.calls.stand_in_calls() > before
        assert not device.timeline.races


def test_squares_are_summed_by_as_few_launches_as_have_room() -> None:
    calls = controls()
    gradients = [torch.randn(n, generator=torch.manual_seed(n)) for n in (3000, 5000, 1, 1024)]
    jobs, leaf = [], 0
    for one in gradients:
        jobs.append(Squares(At(one), "float32", leaf, 0))
        leaf += -(-one.numel() // 1024)
    op, norms, made = Op(Lane.D2H, Verb.SQUARE, Value("gradient", 0), (), (), 8, 0), [], []
    for leaves in (5, 8, 10):
        scratch = torch.zeros(leaves, dtype=torch.float64)
        driver = native.open_cuda(str(library()), 0)
        driver.load(ptx().decode())
        lanes = Native(driver=driver, workspace=partial(torch.Tensor.view_as, scratch, scratch))
        clip = lanes.clip(1.0)
        phase = lanes.phase([(op, Work(jobs))])
        before = calls.stand_in_calls()
        (task,) = lanes.start(phase, 0, lanes.settings([], clip))
        assert lanes.over(task, 20.0)
        made.append(calls.stand_in_calls() - before)
        clip.combine()
        norms.append(clip.norm)
    assert norms[:1] * 3 == norms
    assert norms[0] == pytest.approx(torch.cat(gradients).double().norm().item())
    one_more = made[1] - made[2]  # Launch, and copy of what it summed.
    assert one_more > 0
    assert made[0] == made[1] + one_more
