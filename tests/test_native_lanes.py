"""Lanes that work without Python: while another holds the GIL, on drives that fail, to the bit."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.runtime.native import RUNNER_VARIABLE
from tests.training import Run, assert_same, attached, plain, train, two_micro_batches

pytest.importorskip("offload.runtime._runner", reason="not compiled here")

NVME = ("nvme", "nvme", "nvme")
PLACEMENTS = [
    ("device", "device", "cpu"),
    ("device", "cpu", "nvme"),
    ("cpu", "cpu", "cpu"),
    ("cpu", "cpu", "nvme"),
    NVME,
]


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUNNER_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("clipped", "placement"),
    [
        pytest.param(
            clipped, one, marks=pytest.mark.slow if number % 2 == at else (), id=f"{clipped}-{one}"
        )
        for number, one in enumerate(PLACEMENTS)
        for at, clipped in enumerate([None, 0.1])
    ],
)
def test_the_native_runner_has_the_bits_of_the_reference(
    placement: tuple[str, str, str],
    clipped: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for chosen in ("native", "python"):
        monkeypatch.setenv(RUNNER_VARIABLE, chosen)
        found.append(train(placement, tmp_path, two_micro_batches, max_grad_norm=clipped))
    assert_same(*found)


def asleep_with_the_gil(seconds: float) -> None:
    """Sleep in a C call that keeps the GIL."""
    held: Any = ctypes.PyDLL(None)
    held.usleep(int(seconds * 1e6))


@pytest.mark.parametrize("placement", [("cpu", "cpu", "cpu"), ("cpu", "cpu", "nvme"), NVME])
def test_lanes_work_while_another_thread_holds_the_gil(
    placement: tuple[str, str, str], native: None, tmp_path: Path
) -> None:
    """The updates of a step, with their reads and writes, and what was moved before them."""
    with attached(placement, tmp_path) as run:
        plain(run, 0)
        run.loss().backward()
        run.optimizer.step()
        asleep_with_the_gil(0.3)
        since = time.perf_counter()
        tasks = run.engine.runner.all()
        assert all(task.over for task in tasks)
        run.engine.settle()
        assert time.perf_counter() - since < 0.2


def spoiled(run: Run, how: str) -> None:
    """Let the drive of an attached model go wrong."""
    store = run.engine.runner.store
    assert store is not None
    (file,) = store.volume.files
    if how == "lost the write":
        with open(f"/proc/self/fd/{file.fd}", "r+b") as again:
            before = again.read()
            plain(run, 1)
            run.engine.settle()
            again.seek(0)
            again.write(before)
        return
    if how == "checksum mismatch":
        there = os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR)
        (byte,) = os.pread(there, 1, 0)
        os.pwrite(there, bytes([255 - byte]), 0)
        os.close(there)
        return
    away = os.open("/dev/null", os.O_RDONLY)
    os.dup2(away, file.fd)
    os.close(away)


@pytest.mark.parametrize("placement", [NVME, ("device", "device", "nvme")])
@pytest.mark.parametrize("how", ["checksum mismatch", "lost the write", "the file ends"])
def test_a_drive_that_goes_wrong_is_told_with_the_chunk(
    how: str, placement: tuple[str, str, str], native: None, tmp_path: Path
) -> None:
    with attached(placement, tmp_path) as run:
        plain(run, 0)
        run.engine.settle()
        spoiled(run, how)
        with pytest.raises(offload.EngineError, match=how) as raised:
            for number in range(1, 3):
                plain(run, number)
                run.engine.settle()
        cause = raised.value.__cause__
        assert isinstance(cause, OSError)
        assert "chunk" in str(cause)
        assert str(tmp_path) in str(cause)
        for look in (run.loss, run.model.head.weight.sum, run.optimizer.step):  # type: ignore
            with pytest.raises(offload.EngineError, match=how):
                look()
