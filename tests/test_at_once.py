"""Copies so short that no lane is woken for them: on whose thread they run, and the same bits."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import executor
from offload.books import Books
from offload.device import Device
from offload.lanes import EngineError
from offload.program import Verb
from tests.training import RESIDENT, Run, assert_same, attached, batch, loss_of, result_of

PLACEMENTS = [("cpu", "cpu", "cpu"), ("nvme", "cpu", "nvme"), ("cpu", "nvme", "device")]
SHORT_BYTES = 32 << 10


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch, _lanes_do_all: None) -> None:
    monkeypatch.setattr(executor, "AT_ONCE_BYTES_MAX", SHORT_BYTES)


def train(run: Run, steps: int = 4) -> None:
    for number in range(steps):
        tokens = batch(torch.Generator().manual_seed(number))
        for _ in range(1 + number % 2):
            loss_of(run.model, tokens).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def threads_of_copies(run: Run) -> list[tuple[int, threading.Thread]]:
    """(bytes, thread) of every move within CPU memory from here on."""
    lanes: Any = run.engine.executor.lanes
    work, found = lanes._run, list[tuple[int, threading.Thread]]()

    def recording(lane: Any, task: Any) -> None:
        tiers = {use.place.tier for use in (*task.op.reads, *task.op.writes)}
        if task.op.verb is Verb.MOVE and "nvme" not in tiers:
            found.append((task.op.bytes, threading.current_thread()))
        work(lane, task)

    lanes._run = recording
    return found


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_the_bits_are_those_of_a_resident_run(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    with attached(RESIDENT, tmp_path) as run:
        train(run)
        wanted = result_of(run)
    with attached(placement, tmp_path) as run:
        train(run)
        assert_same(result_of(run), wanted)


def test_short_copies_run_where_they_become_ready_and_long_ones_on_their_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attached(PLACEMENTS[0], tmp_path) as run:
        sizes = sorted(
            {run.engine.plan.bytes_of("weight", u) for u in range(len(run.engine.units))}
        )
    limit = sizes[0]
    monkeypatch.setattr(executor, "AT_ONCE_BYTES_MAX", limit)
    with attached(PLACEMENTS[0], tmp_path) as run:
        found = threads_of_copies(run)
        run.loss().backward()
        run.engine.settle()
        named = [(size <= limit, thread.name) for size, thread in found]
    assert {name for short, name in named if not short} == {"offload-h2d", "offload-d2h"}
    assert {name for short, name in named if short} == {threading.current_thread().name}


def test_one_that_fails_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no copies today")

    with attached(PLACEMENTS[0], tmp_path) as run:
        train(run, 1)
        run.engine.settle()
        monkeypatch.setattr(Device, "copy", fails)
        with pytest.raises(EngineError) as caught:
            run.loss()
        assert isinstance(caught.value.__cause__, OSError)
        monkeypatch.undo()


def test_the_lock_is_let_go_whatever_ends_the_books(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a second Ctrl-C does, at the entry of what ends them."""

    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    with attached(PLACEMENTS[0], tmp_path) as run:
        lanes: Any = run.engine.executor.lanes
        for name in ("__enter__", "__exit__"):
            with monkeypatch.context() as patch:
                patch.setattr(Books, name, pressed)
                with pytest.raises(KeyboardInterrupt):
                    lanes.cancel([])
            assert free(lanes._lock), name


def free(lock: Any) -> bool:
    """Whether another thread can have a lock."""
    found = []

    def take() -> None:
        found.append(lock.acquire(timeout=5))
        if found[0]:
            lock.release()

    other = threading.Thread(target=take)
    other.start()
    other.join()
    return bool(found[0])
