"""Forked children: they get none of the arenas, delete nothing, and are told so clearly."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from offload import interrupt
from offload.recorded import run_of
from tests.faults import in_child
from tests.training import VOCABULARY, Run, attached, loss_of, plain, result_of, same_bits

EVERYTHING = ("nvme", "cpu", "nvme")


class Tokens(Dataset[torch.Tensor]):
    """Batches made in the worker."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, VOCABULARY, (16,), generator=generator)


def loader(workers: int) -> Iterator[torch.Tensor]:
    """Batches of two, from forked workers."""
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
    with warnings.catch_warnings():
        # Python 3.12 on: a process with threads (lanes, here) forks.
        warnings.filterwarnings("ignore", r".*use of fork\(\) may lead", DeprecationWarning)
        yield from DataLoader(Tokens(), batch_size=2, num_workers=workers, **options)


def arenas(run: Run) -> list[tuple[int, int]]:
    """First and last address of each arena."""
    found = [arena.tensor for arena in run.engine.executor.memory.arenas.values()]
    return [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in found if t.nbytes]


def mapped(start: int, stop: int) -> bool:
    """Whether this process has any memory between two addresses."""
    with open("/proc/self/maps") as file:
        for line in file:
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            if low < stop and start < high:
                return True
    return False


def message_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_a_child_forked_while_a_thread_has_the_lock_is_told(tmp_path: Path) -> None:
    """Nobody gives it back there."""
    with attached(EVERYTHING, tmp_path) as run:
        plain(run, 0)
        taken, over = threading.Event(), threading.Event()

        def keep() -> None:
            with run.engine.lock:
                taken.set()
                over.wait(60)

        thread = threading.Thread(target=keep)
        thread.start()
        taken.wait(60)

        def touch() -> None:
            signal.alarm(30)  # Where it hangs.
            parameter = next(run.model.parameters())
            assert "forked process" in message_of(lambda: parameter.detach())
            assert "forked process" in message_of(run.optimizer.zero_grad)
            assert "forked process" in message_of(lambda: run.engine.values_of(0, 0))

        status = in_child(touch)
        over.set()
        thread.join()
        assert status == 0


def train(run: Run, workers: int) -> None:
    """Fork while weights are in slots and updates are under way."""
    for _ in range(2):
        for tokens in loader(workers):
            loss = loss_of(run.model, tokens)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.losses.append(loss.item())


def test_forked_workers_change_no_bit(tmp_path: Path) -> None:
    found = []
    for workers in (0, 2):
        with attached(EVERYTHING, tmp_path) as run:
            train(run, workers)
            found.append(result_of(run))
    assert found[0].losses == found[1].losses
    for name, value in found[0].weights.items():
        assert same_bits(value, found[1].weights[name])
    assert list(tmp_path.iterdir()) == []


def test_workers_that_start_inside_a_forward(tmp_path: Path) -> None:
    with attached(EVERYTHING, tmp_path) as run:
        statuses: list[int] = []

        def fork(*_: Any) -> None:
            statuses.append(in_child(lambda: None))

        run.model.blocks[2].register_forward_pre_hook(fork)  # type: ignore[index,union-attr]
        plain(run, 0)
        losses = [loss_of(run.model, torch.zeros(2, 16, dtype=torch.long)).item()]
        assert statuses == [0, 0]
    with attached(EVERYTHING, tmp_path) as run:
        plain(run, 0)
        assert [loss_of(run.model, torch.zeros(2, 16, dtype=torch.long)).item()] == losses


def test_children_have_none_of_the_arenas(tmp_path: Path) -> None:
    with attached(EVERYTHING, tmp_path) as run:
        plain(run, 0)
        spans = arenas(run)
        assert len(spans) == 2
        assert all(mapped(*span) for span in spans)

        def look() -> None:
            assert not any(mapped(*span) for span in spans)

        assert in_child(look) == 0
        plain(run, 1)


@pytest.mark.parametrize("fork", [os.fork, ctypes.PyDLL(None).fork], ids=["Python", "C"])
def test_a_child_that_touches_the_model_is_told(fork: Callable[[], int], tmp_path: Path) -> None:
    """Also where who forks tells Python nothing of it, as some servers do."""
    if fork is not os.fork and interrupt._native is None:
        pytest.skip("not compiled here")
    with attached(EVERYTHING, tmp_path) as run:
        plain(run, 0)
        run.engine.settle()
        if fork is not os.fork:  # Whoever waits for the interpreter then, its child waits for.
            time.sleep(0.2)
        weight = next(iter(run.model.parameters()))
        work: dict[str, Callable[[], Any]] = {
            "value": weight.sum,
            "edit": lambda: weight.data.zero_(),
            "gradient": lambda: weight.grad,
            "forward": run.loss,
            "step": run.optimizer.step,
            "state": run.optimizer.state_dict,
            "settle": run.engine.settle,
            "report": run.engine.report,
            "run": lambda: run_of(run.engine),
        }
        (tmp_path / "told").mkdir()

        def touch() -> None:
            for name, call in work.items():
                (tmp_path / "told" / name).write_text(message_of(call))
            assert weight.shape == (VOCABULARY, 32)  # what it can say it says

        assert in_child(touch, fork) == 0
        for name in work:
            told = (tmp_path / "told" / name).read_text()
            assert "forked process touched an offloaded model" in told, name
            assert "spawn" in told
        plain(run, 1)


@pytest.mark.parametrize("how", ["close", "drop", "exit"])
def test_a_child_that_ends_takes_nothing_along(how: str, tmp_path: Path) -> None:
    with attached(EVERYTHING, tmp_path) as run:
        plain(run, 0)
        expected = {name: value.clone() for name, value in run.model.state_dict().items()}

        def end() -> None:
            if how == "close":
                run.engine.close()
            elif how == "drop":
                run.engine._close()
                run.engine.executor.store.close()  # type: ignore[union-attr]
            else:
                os._exit(0)

        assert in_child(end) == 0
        for name, value in run.model.state_dict().items():
            assert same_bits(value, expected[name])
        plain(run, 1)
        assert len(arenas(run)) == 2
