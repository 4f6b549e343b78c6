"""Compiled lanes on a drive of which one transfer fails: every one of two steps in turn."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.runtime.native import native_runner
from tests.training import Run, attached, some_fast

pytestmark = pytest.mark.skipif(native_runner() is None, reason="the runner is not compiled")

PLACEMENTS = [("nvme", "nvme", "nvme"), ("device", "cpu", "nvme"), ("cpu", "nvme", "cpu")]
NEVER = 1 << 40
"""The number of a transfer that nobody makes."""

HANGS_S = 20.0
"""Whoever has not returned by then never will."""


def two_steps(run: Run, *, clips: bool) -> None:
    """With every way of a gradient: the first of a step, one that is added, a norm."""
    for _ in range(2):
        for _ in range(2):
            run.loss().backward()
        run.step()
        if clips:
            run.optimizer.grad_norm()  # type: ignore[attr-defined]
    run.engine.settle()


def resources() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def failing(placement: Any, path: Path, number: int, code: int, clips: float | None) -> None:
    """Two steps of which a transfer fails: told with its cause, and told again."""
    with attached(placement, path, max_grad_norm=clips) as run:
        store: Any = run.engine.runner.store
        for backend in store.chunks.volume._backends:
            backend._engine.fail(number, code)
        with pytest.raises((OSError, offload.EngineError)) as caught:
            two_steps(run, clips=clips is not None)
        told: Any = caught.value
        cause = told.__cause__ if isinstance(told, offload.EngineError) else told
        assert isinstance(cause, OSError), number
        assert cause.errno == code, number
        assert str(path) in str(cause), number
        if isinstance(told, offload.EngineError):  # Of a lane: nobody goes on by mistake.
            with pytest.raises(offload.EngineError):
                run.loss()
            with pytest.raises(offload.EngineError):
                run.optimizer.step()


@pytest.mark.parametrize("every", some_fast([13, 5, 1]))
@pytest.mark.parametrize("clips", some_fast([0.1, None]))
@pytest.mark.parametrize("placement", some_fast(PLACEMENTS), ids="-".join)
def test_each_transfer_of_two_steps_may_fail(
    placement: Any, clips: float | None, every: int, tmp_path: Path
) -> None:
    with attached(placement, tmp_path, max_grad_norm=clips) as run:
        store: Any = run.engine.runner.store
        (backend,) = store.volume._backends
        backend._engine.fail(NEVER, 0)
        two_steps(run, clips=clips is not None)
        count = NEVER - backend._engine.fail(0, 0)
    assert count > 30
    had = resources()
    ended = threading.Event()
    error: list[BaseException] = []

    def each() -> None:
        try:
            for number in range(1, count + 1, every):
                failing(placement, tmp_path, number, (errno.EIO, errno.ENOSPC)[number % 2], clips)
        except BaseException as caught:
            error.append(caught)
        ended.set()

    threading.Thread(target=each, daemon=True).start()
    assert ended.wait(HANGS_S * 5), "a call hangs"
    if error:
        raise error[0]
    assert resources() <= had
