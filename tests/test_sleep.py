"""Engines that sleep and wake, and engines that share a budget."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import offload
from offload.checkpoint.commit_reader import read_commit
from offload.program.ops import Lane, Op
from offload.runtime.memory import host_tensor
from tests import training
from tests.optimizers import of_any_dtype
from tests.small import adamw, config, small, tokens, torch_step
from tests.training import RESIDENT, Net, Run, alone, assert_same, attached, batch, plain, result_of

EVERYWHERE = [RESIDENT, ("cpu", "cpu", "device"), ("device", "nvme", "cpu"), ("nvme",) * 3]


def nap(run: Run, tier: Any) -> None:
    offload.sleep(run.model, tier)
    offload.wake(run.model)


def slept(tier: str, run: Run, number: int) -> None:
    """Asleep wherever a loop may stop: before, between micro-batches, before and after a step."""
    here = partial(nap, run, tier) if hasattr(run.optimizer, "engine") else lambda: None
    here()
    run.loss().backward()
    here()
    run.loss().backward()
    here()
    run.optimizer.step()
    here()
    run.optimizer.zero_grad()
    plain(run, number)
    run.model.blocks[1].up.bias.data.add_(0.01)  # type: ignore
    here()


@pytest.mark.parametrize(
    ("placement", "tier"),
    [
        (EVERYWHERE[2], "cpu"),
        *(
            pytest.param(placement, tier, marks=pytest.mark.slow)
            for placement in [*EVERYWHERE, *training.SAMPLED]
            for tier in ("cpu", "nvme")
        ),
    ],
)
@pytest.mark.parametrize(
    "build", [Net, pytest.param(partial(Net, tied=True), marks=pytest.mark.slow)]
)
def test_sleeping_changes_no_bit(
    placement: tuple[str, str, str], tier: str, build: Any, tmp_path: Path
) -> None:
    training.as_in_plain_torch(
        partial(slept, tier), placement, tmp_path, **training.fp32(build=build, steps=2)
    )


@pytest.mark.parametrize(
    ("tier", "placement"), [("cpu", RESIDENT), ("nvme", ("cpu", "cpu", "cpu"))]
)
def test_the_memory_is_given_back(tier: Any, placement: Any, tmp_path: Path) -> None:
    with attached(placement, tmp_path) as run:
        plain(run, 0)
        memory = run.engine.runner.memory
        before = {one: arena.tensor.data_ptr() for one, arena in memory.arenas.items()}
        assert set(before) == {"device", "cpu"}
        offload.sleep(run.model, tier)
        assert set(memory.arenas) == ({"cpu"} if tier == "cpu" else set())
        assert not [
            unit for unit in run.engine.units if unit.weights is not None or unit.kept is not None
        ]
        offload.wake(run.model)
        assert set(memory.arenas) == {"device", "cpu"}
        plain(run, 1)


ASLEEP: dict[str, Callable[[Run], Any]] = {
    "forward": lambda run: run.model(batch(run.generator)),
    "step": lambda run: run.optimizer.step(),
    "zero_grad": lambda run: run.optimizer.zero_grad(),
    "values": lambda run: next(run.model.parameters()).sum(),
    "an edit": lambda run: next(run.model.parameters()).data.zero_(),
    "a gradient": lambda run: next(run.model.parameters()).grad,
    "state_dict": lambda run: run.model.state_dict(),
    "the optimizer's state_dict": lambda run: run.optimizer.state_dict(),
    "load_state_dict": lambda run: run.optimizer.load_state_dict({"state": {}, "param_groups": []}),
    "a stream": lambda run: list(run.engine.stream_weights()),
    "copies": lambda run: copy.deepcopy(run.model),
    "pickles": lambda run: pickle.dumps(run.model),
    "detach": lambda run: offload.detach(run.model),
    "sleep": lambda run: offload.sleep(run.model),
}


def test_asleep_values_are_refused(tmp_path: Path) -> None:
    with attached(("device", "cpu", "nvme"), tmp_path) as run:
        plain(run, 0)
        loss = run.loss()
        offload.sleep(run.model, "nvme")
        for how, call in {**ASLEEP, "backward": lambda run: loss.backward()}.items():
            with pytest.raises((RuntimeError, ValueError), match=r"asleep|param"):
                call(run)
                raise AssertionError(how)
        assert run.model.head.weight.shape == (50, 32)  # type: ignore[union-attr]
        assert run.engine.report().steps == 1
        offload.wake(run.model)
        run.optimizer.zero_grad()
        plain(run, 1)
        with pytest.raises(RuntimeError, match="not asleep"):
            offload.wake(run.model)


def test_what_cannot_sleep_is_refused(tmp_path: Path) -> None:
    model = small()
    with pytest.raises(ValueError, match="model is not attached"):
        offload.sleep(model)
    _, optimizer = offload.attach(model, adamw(model), offload.Config(device_memory="64MiB"))
    with optimizer.engine:
        with pytest.raises(ValueError, match="'device', expected"):
            offload.sleep(model, "device")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="without nvme_path"):
            offload.sleep(model, "nvme")
        torch_step(model, optimizer)
    narrow = small()
    _, optimizer = offload.attach(
        narrow, adamw(narrow), config(RESIDENT, tmp_path, cpu_memory=0, nvme_space="4KiB")
    )
    with optimizer.engine:
        for tier, field in (("cpu", "cpu_memory"), ("nvme", "nvme_space")):
            with pytest.raises(offload.BudgetError, match=rf"{field} is .*attach with {field} of"):
                offload.sleep(narrow, tier)  # type: ignore[arg-type]
        torch_step(narrow, optimizer)


def test_a_drive_that_fails_leaves_it_awake_and_memory_that_is_gone_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attached(RESIDENT, tmp_path) as run:
        plain(run, 0)
        before = result_of(run)

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr("offload.runtime.store.Store.write", full)
            with pytest.raises(OSError, match="No space"):
                offload.sleep(run.model, "nvme")
        assert_same(result_of(run), before)
        offload.sleep(run.model, "nvme")
        taken = iter([host_tensor, None])

        def refused(size: int) -> torch.Tensor:
            made = next(taken)
            if made is None:
                raise MemoryError("others have it")
            return made(size)

        with monkeypatch.context() as patch:
            patch.setattr("offload.runtime.memory.host_tensor", refused)
            with pytest.raises(MemoryError, match="others have it"):
                offload.wake(run.model)
        with pytest.raises(RuntimeError, match="asleep"):
            run.loss()
        offload.wake(run.model)
        assert_same(result_of(run), before)
        plain(run, 1)


@of_any_dtype
def test_a_gradient_that_has_no_place_is_refused_and_the_model_stays_awake(tmp_path: Path) -> None:
    with attached(RESIDENT, tmp_path) as run:
        plain(run, 0)
        weight: Any = run.model.head.weight  # type: ignore[union-attr]
        weight.grad_dtype = None
        weight.grad = torch.zeros(weight.shape, dtype=torch.float64)
        with pytest.raises(RuntimeError, match=r"sleep: the gradient of head\.weight is of"):
            offload.sleep(run.model)
        run.optimizer.zero_grad()
        offload.sleep(run.model)
        offload.wake(run.model)
        plain(run, 1)


def test_closed_in_its_sleep(tmp_path: Path) -> None:
    with attached(RESIDENT, tmp_path) as run:
        offload.sleep(run.model, "nvme")
    with pytest.raises((RuntimeError, offload.EngineError)):
        run.loss()


def test_policy_and_reference_in_one_graph(tmp_path: Path) -> None:
    """The bits of the same without an engine."""

    def losses(*, attached: bool) -> list[float]:
        policy, reference = small(torch.bfloat16), small(torch.bfloat16)
        optimizer: Any = adamw(policy)
        if attached:
            placed = config(("cpu", "device", "nvme"), tmp_path)
            _, optimizer = offload.attach(policy, optimizer, placed)
            offload.attach(reference, None, replace(placed, params="nvme"))
        else:
            optimizer = alone(optimizer)
        found = []
        for seed in range(3):
            logits = policy(tokens(seed)).float().log_softmax(-1)
            with torch.no_grad():
                wanted = reference(tokens(seed)).float().log_softmax(-1)
            loss = (wanted.exp() * (wanted - logits)).sum() - logits.mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        if attached:
            optimizer.engine.close()
            offload.detach(reference)
        return found

    assert losses(attached=True) == losses(attached=False)


def test_one_sleeps_where_the_other_works(tmp_path: Path) -> None:
    asked, pairs = config(RESIDENT, tmp_path), [(one := small(), adamw(one)) for _ in range(2)]
    attached = []
    for model, optimizer in pairs:
        attached.append((model, offload.attach(model, optimizer, asked)[1]))
        torch_step(*attached[-1])
        offload.sleep(model)
    found = []
    for model, optimizer in 2 * attached:
        offload.wake(model)
        found.append(torch_step(model, optimizer, 8))
        offload.sleep(model)
    assert found[:2] == [found[0]] * 2 != found[2:] == [found[2]] * 2
    for _, optimizer in attached:
        optimizer.engine.close()


def test_memory_is_given_back_whatever_fails_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    _, optimizer = offload.attach(model, adamw(model), config(("cpu", "cpu", "nvme"), tmp_path))
    runner = optimizer.engine.runner
    monkeypatch.setattr(runner.store, "close", Mock(side_effect=OSError("on purpose")))
    with pytest.raises(OSError, match="on purpose"):
        optimizer.engine.close()
    monkeypatch.undo()
    runner.store.close()
    assert [arena.tensor.numel() for arena in runner.memory.arenas.values()] == [0, 0]


def test_sleep_waits_for_a_copy_into_a_slot(tmp_path: Path) -> None:
    """Of a unit whose turn never came: nothing at home waits for it, and its slot goes."""
    go_on, held, copied = threading.Event(), threading.Event(), threading.Event()

    def slowly(op: Op, since: float) -> float:
        if op.lane is Lane.H2D and op.value.unit == 0:
            copied.set()  # What the embedding waits for: reads before it may end in any order.
        elif op.lane is Lane.H2D and copied.is_set():
            held.set()
            go_on.wait(timeout=30)
        return since

    options: Any = {"pace": slowly}
    with (
        attached(("nvme", "cpu", "cpu"), tmp_path, **options) as run,
        ThreadPoolExecutor(1) as other,
    ):
        model: Any = run.model
        model.embed(batch(torch.Generator().manual_seed(1)))
        assert held.wait(timeout=30)
        asleep = other.submit(offload.sleep, run.model, "cpu")
        assert not wait([asleep], timeout=0.3).done
        go_on.set()
        asleep.result()
        offload.wake(run.model)


def test_a_graph_of_before_is_refused(tmp_path: Path) -> None:
    with attached(RESIDENT, tmp_path) as run:
        loss = run.loss()
        offload.sleep(run.model, "nvme")
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"asleep|modified by an inplace operation"):
                loss.backward(retain_graph=True)
        offload.wake(run.model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        run.optimizer.zero_grad()
        plain(run, 0)


def test_no_step_is_committed_whose_successor_has_begun(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    durable = {"durable": str(directory), "commit_every": 100}
    with attached(("cpu", "cpu", "cpu"), (), **durable) as run:
        for _ in range(2):
            run.loss().backward()
            offload.sleep(run.model)
            offload.wake(run.model)
            assert not (directory / "commit.json").exists()
            run.step()
        offload.sleep(run.model)
        assert read_commit(str(directory))[0]["run"]["step"] == 2
        offload.wake(run.model)
