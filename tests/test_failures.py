"""A lane or a drive that fails in a running engine: told at once, closed cleanly."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import attachment
from offload.optim.update import Updates
from offload.program.ops import OF_USER, Lane, Op, Verb
from offload.runtime import runner as runner_module
from offload.runtime.entry import EngineError
from offload.runtime.runner import ChunkCache
from offload.runtime.store import Store
from offload.runtime.works import Work
from tests.faults import nothing_leaks
from tests.simulated import SimulatedIO
from tests.submitting import ops_of
from tests.training import Net, Run, attached, batch, loss_of, some_fast

AT_ONCE_S = 8.0
"""Seconds in which a wait that is woken has ended: far less than until one looks by itself."""


class Broken(Exception):
    """What a lane meets."""


class Breaker:
    """A `pace` that fails in a certain lane and verb, once it is armed."""

    def __init__(self, lane: Lane, verb: Verb, seconds: float = 0.0):
        self.lane, self.verb, self.seconds = lane, verb, seconds
        self.armed = False
        self.failed_at: float | None = None

    def __call__(self, op: Op, since: float) -> float:
        if self.armed and (op.lane, op.verb) == (self.lane, self.verb):
            time.sleep(self.seconds)
            self.failed_at = time.perf_counter()
            raise Broken(f"{op.lane.value} is broken")
        return 0.0


@contextmanager
def running(
    placement: tuple[str, str, str], directory: Path, pace: Any = None, **config: Any
) -> Iterator[Run]:
    """A run that leaves nothing behind, and that says so when it is over."""
    with nothing_leaks():
        with attached(
            placement, directory, build=partial(Net, layers=4), pace=pace, **config
        ) as run:
            try:
                yield run
            finally:
                run.engine.close()
                with pytest.raises(EngineError, match="closed"):
                    run.loss()
        del run


FAILURES: dict[str, tuple[Lane, Verb, tuple[str, str, str], dict[str, Any]]] = {
    "h2d": (Lane.H2D, Verb.MOVE, ("nvme", "cpu", "cpu"), {}),
    "d2h": (Lane.D2H, Verb.MOVE, ("cpu", "nvme", "cpu"), {}),
    "cpu, add": (Lane.CPU, Verb.ADD, ("cpu", "nvme", "cpu"), {}),
    "cpu, update": (Lane.CPU, Verb.UPDATE, ("cpu", "cpu", "cpu"), {}),
    "cpu, norm": (Lane.CPU, Verb.NORM, ("cpu", "cpu", "cpu"), {"max_grad_norm": 1.0}),
    "compute, square": (Lane.COMPUTE, Verb.SQUARE, ("cpu", "device", "cpu"), {"max_grad_norm": 1}),
    "compute, update": (Lane.COMPUTE, Verb.UPDATE, ("device", "cpu", "device"), {}),
    "disk": (Lane.DISK, Verb.MOVE, ("nvme", "nvme", "nvme"), {}),
}


def two_micro_batches(run: Run) -> None:
    for _ in range(2):
        run.loss().backward()
    run.step()
    run.optimizer.grad_norm()  # type: ignore[attr-defined]
    run.engine.settle()


@pytest.mark.parametrize("name", FAILURES)
def test_each_lane_that_fails_surfaces_at_the_next_call(name: str, tmp_path: Path) -> None:
    lane, verb, placement, config = FAILURES[name]
    breaker = Breaker(lane, verb)
    with running(placement, tmp_path, breaker, **config) as run:
        two_micro_batches(run)
        breaker.armed = True
        with pytest.raises(offload.EngineError, match=f"{lane.value} is broken") as caught:
            two_micro_batches(run)
        assert isinstance(caught.value.__cause__, Broken)
        parameter = next(iter(run.model.parameters()))
        calls: list[Callable[[], Any]] = [
            run.loss,
            run.optimizer.step,
            run.engine.settle,
            run.optimizer.state_dict,
            run.model.state_dict,
            lambda: parameter.sum(),
            lambda: parameter.grad,
        ]
        for call in calls:
            with pytest.raises(offload.EngineError) as caught:
                call()
            assert isinstance(caught.value.__cause__, Broken)


@pytest.mark.parametrize("name", ["h2d", "d2h", "cpu, update", "compute, update", "disk"])
def test_a_wait_ends_when_the_lane_fails(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, verb, placement, config = FAILURES[name]
    breaker = Breaker(lane, verb, seconds=0.05)
    with running(placement, tmp_path, breaker, **config) as run:
        two_micro_batches(run)
        breaker.armed = True
        monkeypatch.setattr(runner_module, "LOOK_AGAIN_S", 3 * AT_ONCE_S)
        with pytest.raises(offload.EngineError):
            two_micro_batches(run)
        assert breaker.failed_at is not None
        assert time.perf_counter() - breaker.failed_at < AT_ONCE_S


def test_a_long_wait_looks_whether_the_other_ranks_live(tmp_path: Path) -> None:
    def slow(op: Op, since: float) -> float:
        time.sleep(4 * runner_module.LOOK_AGAIN_S * (op.lane is Lane.DISK))
        return 0.0

    def look(waited_s: float) -> None:
        raise offload.EngineError(f"rank 1 is gone after {waited_s:.1f} s")

    with running(("nvme", "cpu", "cpu"), tmp_path, slow) as run:
        run.engine.runner.look = look
        with pytest.raises(offload.EngineError, match=r"rank 1 is gone after 0\.[12] s"):
            run.loss()


@pytest.mark.usefixtures("one_call")
@pytest.mark.parametrize("code", some_fast([errno.EIO, errno.ENOSPC]))
def test_a_drive_that_fails_at_any_call(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulated(errors: dict[int, int]) -> SimulatedIO:
        io = SimulatedIO(0, errors=errors)
        monkeypatch.setattr(attachment, "Store", partial(Store, io=io))
        return io

    def work() -> None:
        with running(("nvme", "nvme", "nvme"), tmp_path) as run:
            two_micro_batches(run)

    whole = simulated({})
    work()
    calls = len(whole.calls)
    assert calls > 80
    for number in [*range(1, 8), *range(8, calls, 11)]:
        io = simulated({number: code})
        with pytest.raises((OSError, offload.EngineError)) as caught:
            work()
        error: Any = caught.value
        if isinstance(error, offload.EngineError):
            error = error.__cause__
        assert isinstance(error, OSError), number
        assert error.errno == code
        assert str(tmp_path) in str(error), number
        assert not io.inner.files, number  # type: ignore[attr-defined]


def test_a_flipped_bit_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    io = SimulatedIO(3, flip_rate=0.02)
    monkeypatch.setattr(attachment, "Store", partial(Store, io=io))
    with (
        pytest.raises((offload.EngineError, OSError), match="checksum mismatch"),
        running(("nvme", "nvme", "nvme"), tmp_path) as run,
    ):
        for _ in range(20):
            two_micro_batches(run)


def test_a_drive_that_dawdles_and_stutters_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for io in (None, SimulatedIO(5, short_rate=0.2, retry_rate=0.2, delay_s_max=0.002)):
        monkeypatch.setattr(attachment, "Store", partial(Store, io=io))
        with running(("nvme", "nvme", "nvme"), tmp_path) as run:
            for _ in range(2):
                two_micro_batches(run)
            found.append((run.losses, loss_of(run.model, batch(run.generator)).item()))
    assert found[0] == found[1]


def test_an_error_at_the_first_fetch_leaves_a_model_that_can_be_closed(tmp_path: Path) -> None:
    breaker = Breaker(Lane.DISK, Verb.MOVE)
    breaker.armed = True
    with running(("nvme", "cpu", "cpu"), tmp_path, breaker) as run:
        with pytest.raises(offload.EngineError):
            run.loss()
        with pytest.raises(offload.EngineError):
            offload.detach(run.model)


def test_memory_that_runs_out_as_a_backward_is_queued_leaves_no_wrong_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(("nvme", "cpu", "cpu"), tmp_path, device_memory="84KiB") as run:
        x = batch(run.generator)
        loss_of(run.model, x).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        expected = loss_of(run.model, x)
        run.engine.runner._kept.clear()

        def broken(*_: object) -> Any:
            monkeypatch.undo()
            raise MemoryError("on purpose")

        monkeypatch.setattr(run.engine.runner.works, "of", broken)
        with pytest.raises(MemoryError):
            expected.backward()
        run.optimizer.zero_grad()
        assert torch.equal(loss_of(run.model, x), expected)


def half_started(lanes: Any, count: int, wanted: Callable[[Sequence[Op]], bool]) -> Any:
    """A `start` of lanes that fails after so many ops of a phase."""
    start = lanes.start

    def broken(phase: Any, *args: Any) -> Any:
        if not wanted(ops_of(phase)):
            return start(phase, *args)
        ops = ops_of(phase)[:count]
        start(lanes.phase([(x, None if x.verb in OF_USER else Work()) for x in ops]), *args)
        raise MemoryError("on purpose")

    return broken


def test_a_gradient_that_is_half_sent_home_is_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To go on without it would train on a part of the gradient."""
    with running(("cpu", "nvme", "cpu"), tmp_path) as run:
        lanes, start = run.engine.runner._lanes, run.engine.runner._lanes.start
        wanted = (Verb.MOVE, Lane.DISK)
        broken = half_started(lanes, 1, lambda ops: wanted in [(o.verb, o.lane) for o in ops])
        loss = loss_of(run.model, batch(run.generator))
        monkeypatch.setattr(lanes, "start", broken)
        with pytest.raises(MemoryError):
            loss.backward()
        monkeypatch.setattr(lanes, "start", start)
        with pytest.raises(EngineError, match="on purpose"):
            run.optimizer.step()


def test_a_pass_half_queued_ends_every_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(("nvme", "cpu", "cpu"), tmp_path) as run:
        lanes, start = run.engine.runner._lanes, run.engine.runner._lanes.start
        monkeypatch.setattr(lanes, "start", half_started(lanes, 3, lambda ops: True))
        with pytest.raises(MemoryError):
            loss_of(run.model, batch(run.generator))
        monkeypatch.setattr(lanes, "start", start)
        with pytest.raises(EngineError):
            loss_of(run.model, batch(run.generator))


@pytest.mark.parametrize("placement", [("device", "device", "cpu"), ("cpu", "cpu", "nvme")])
def test_a_step_that_fails_midway_is_the_last(
    placement: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(placement, tmp_path) as run:
        run.loss().backward()

        def no_memory(*_: object) -> None:
            raise torch.OutOfMemoryError("of what the step needs")

        monkeypatch.setattr(Updates, "_phase", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            run.optimizer.step()
        with pytest.raises(EngineError, match="what the step needs"):
            run.optimizer.step()


@pytest.mark.parametrize("placement", [("cpu", "cpu", "cpu"), ("nvme", "cpu", "nvme")])
def test_an_edit_that_cannot_go_home_ends_the_engine(
    placement: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(placement, tmp_path) as run:
        weight: Any = run.model.head.weight  # type: ignore[union-attr]
        weight.data.mul_(0.5)

        def broken(*_: object) -> None:
            raise OSError("on purpose")

        monkeypatch.setattr(ChunkCache, "write", broken)
        with pytest.raises(OSError, match="on purpose"):
            run.loss()
        monkeypatch.undo()
        for use in (run.loss, run.model.state_dict, run.step, weight.detach):
            with pytest.raises(EngineError, match="on purpose"):
                use()
