"""What finds no memory, or a drive that fails once, is told; asked again it is right."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.executor import Executor
from offload.gradients import Gradients
from offload.program import Value
from offload.store import Store
from tests.small import adamw, config, small, tokens
from tests.training import (
    Run,
    assert_same,
    attached,
    loss_of,
    plain,
    same_bits,
    train,
    train_alone,
    without_idle_states,
)

ON_CPU = ("device", "device", "cpu")


@contextmanager
def no_memory(method: str, after: int = 0) -> Iterator[list[int]]:
    """One call of a method of tensors finds no memory, after so many that do; how many came."""
    calls: list[int] = []
    torchs: Callable[..., Any] = getattr(torch.Tensor, method)

    def refused(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        if calls[-1] == after:
            raise MemoryError("there is none just now")
        return torchs(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, method, refused)
        yield calls


def test_a_gradient_whose_copy_found_no_memory_is_still_owed(tmp_path: Path) -> None:
    """It is the lanes' until they have updated its resident."""
    with attached(ON_CPU, tmp_path) as run:
        run.loss().backward()
        weight: Any = run.model.head.weight  # type: ignore[union-attr]
        want = weight.grad.clone()
        run.optimizer.step()
        with no_memory("clone"), pytest.raises(MemoryError):
            weight.grad  # noqa: B018
        assert same_bits(weight.grad, want)


@pytest.mark.parametrize("after", [0, 3])
def test_a_model_whose_gradients_found_no_memory_stays_attached(after: int, tmp_path: Path) -> None:
    """They are of another dtype in the engine, or come from another memory."""
    model = small(torch.bfloat16)
    settings = config(("cpu", "cpu", "cpu"), tmp_path, gradient_dtype="fp32")
    offload.attach(model, adamw(model), settings)
    classes = {type(p) for p in model.parameters()}
    loss_of(model, tokens()).backward()
    want = [p.grad.to(p.dtype) for p in model.parameters()]  # type: ignore[union-attr]
    with no_memory("to", after) as calls, pytest.raises(MemoryError):
        offload.detach(model)
    assert len(calls) == after + 1
    assert {type(p) for p in model.parameters()} == classes
    loss_of(model, tokens())
    offload.detach(model)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert all(same_bits(p.grad, one) for p, one in zip(model.parameters(), want))  # type: ignore


# -- a drive that fails once ---------------------------------------------------------------------

NVME = ("nvme", "nvme", "nvme")


@contextmanager
def no_transfer(told: list[OSError], *, write: bool = True) -> Iterator[None]:
    """The next write, or read, of this thread fails after it has begun."""
    errors, transfers = [OSError(errno.EIO, "the drive failed once", "/drive")], Store._transfers

    def failing(store: Store, *args: Any, writing: bool) -> Any:
        mine = threading.current_thread() is threading.main_thread()
        if mine and errors and writing == write:
            told.append(errors.pop())
            raise told[-1]
        return transfers(store, *args, writing=writing)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "_transfers", failing)
        yield


def again(told: list[OSError], work: Callable[[], Any]) -> Any:
    """Ask for something whose first write fails, and once more where it was told so."""
    with no_transfer(told), suppress(OSError):
        return work()
    return work()  # Else it has returned.


def step_of_an_edit(run: Run, work: Callable[[], Any], told: list[OSError]) -> None:
    """A weight that lies in one chunk with others is edited after the backward."""
    norm: Any = run.model.norm
    run.loss().backward()
    with torch.no_grad():
        norm.weight.mul_(0.5)
    run.extra.append(again(told, work))
    run.extra.append(norm.bias.detach().sum().item())
    run.step()


EDITS: dict[str, Callable[[Run, list[OSError]], None]] = {
    "forward": lambda run, told: step_of_an_edit(run, lambda: run.model(tokens()).sum(), told),
    "step": lambda run, told: step_of_an_edit(run, run.optimizer.step, told),
    "data": lambda run, told: step_of_an_edit(
        run, lambda: setattr(run.model.norm.bias, "data", torch.full((32,), 0.25)), told
    ),
    "edited again": lambda run, told: step_of_an_edit(
        run, lambda: [run.model(tokens()).sum(), run.model.norm.bias.data.add_(1)][0], told
    ),
}


@pytest.mark.parametrize("how", EDITS)
def test_an_edit_that_could_not_be_written_is_not_lost(how: str, tmp_path: Path) -> None:
    """Nor is what lies in its chunk of the drive."""
    told: list[OSError] = []
    short: Any = {"steps": 2, "dtype": torch.float32}
    ours = train(NVME, tmp_path, lambda run, _: EDITS[how](run, told), **short)
    assert len(told) == 2
    alone = train_alone(lambda run, _: EDITS[how](run, []), **short)
    assert_same(without_idle_states(ours), without_idle_states(alone))


def test_states_that_could_not_be_written_are_not_lost(tmp_path: Path) -> None:
    """Nor are those of other parameters in the same chunk."""
    with attached(NVME, tmp_path) as run:
        plain(run, 0)
        before = run.optimizer.state_dict()["state"]
        told: list[OSError] = []
        norm: Any = run.model.norm
        for how in ("look", "again"):
            with no_transfer(told), pytest.raises(OSError, match="once"):
                del run.optimizer.state[norm.weight]
            if how == "look":
                after = run.optimizer.state_dict()["state"]
                assert len(after) == len(before)
        del run.optimizer.state[norm.weight]
        after = run.optimizer.state_dict()["state"]
        assert len(after) == len(before) - 1
        for number, state in after.items():
            assert all(same_bits(state[name], before[number][name]) for name in state)
        plain(run, 1)


def test_gradients_that_could_not_be_made_zeros_become_so_when_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all that lies there is to be zeros, nothing is read."""
    with attached(NVME, tmp_path) as run:
        loss_of(run.model, tokens()).backward()
        parameters: list[Any] = list(run.model.parameters())
        want = [p.grad.clone() for p in parameters]
        run.loss().backward()
        peek, asked, told = Executor.peek, list[str](), list[OSError]()

        def noted(executor: Executor, value: Value) -> torch.Tensor:
            asked.append(value.kind)
            return peek(executor, value)

        monkeypatch.setattr(Executor, "peek", noted)
        again(told, lambda: run.optimizer.zero_grad(set_to_none=False))
        assert told
        assert "gradient" not in asked
        assert not any(p.grad.any() for p in parameters)
        loss_of(run.model, tokens()).backward()
        assert all(same_bits(p.grad, one) for p, one in zip(parameters, want))
        run.step()


def test_a_gradient_lost_beside_others_made_zeros_ends_the_engine(tmp_path: Path) -> None:
    def some(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([model.norm.weight])

    with attached(NVME, tmp_path, optimizer=some) as run:
        run.loss().backward()
        with no_transfer([]), pytest.raises(OSError, match="once"):
            run.optimizer.zero_grad(set_to_none=False)
        for use in (run.loss, run.step, lambda: run.model.norm.bias.grad):  # type: ignore
            with pytest.raises(offload.EngineError, match="once"):
                use()


AFTER: dict[str, Callable[[Run, Any], Any]] = {
    "step": lambda run, up: None,
    "shown": lambda run, up: (up.weight.grad.sum(), up.bias.grad.sum()),
    "another given up": lambda run, up: setattr(up.bias, "grad", None),
    "another replaced": lambda run, up: setattr(up.bias, "grad", torch.ones(128)),
}


@pytest.mark.parametrize("how", AFTER)
def test_what_a_backward_brought_is_not_lost_where_it_cannot_be_shown(
    how: str, tmp_path: Path
) -> None:
    """All has come home; a held gradient is read from there, and that fails once."""
    told: list[OSError] = []

    def held(run: Run, number: int) -> None:
        up: Any = run.model.blocks[0].up  # type: ignore[index,union-attr]
        run.loss().backward()
        kept, loss = up.weight.grad, run.loss()
        with no_transfer(told, write=False), suppress(OSError):
            loss.backward()
        run.extra.append(AFTER[how](run, up))
        run.optimizer.step()
        run.extra.append(kept.sum())
        run.optimizer.zero_grad()

    short: Any = {"steps": 2, "dtype": torch.float32}
    ours = train(("cpu", "nvme", "cpu"), tmp_path, held, **short)
    assert len(told) == 2
    alone = train_alone(held, **short)
    assert_same(without_idle_states(ours), without_idle_states(alone))


def test_a_backward_that_could_not_show_what_it_brought_counts(tmp_path: Path) -> None:
    """Two make a step, and each of them came home."""

    def twice(run: Run, number: int) -> None:
        first, second = run.loss(), run.loss()
        with no_showing(), suppress(MemoryError):
            first.backward()
        second.backward()
        if number and hasattr(run.optimizer, "engine"):
            assert run.engine.finality.begun
        run.step()

    where = ("cpu", "cpu", "cpu")
    ours = train(where, tmp_path, twice, micro_batches=2, dtype=torch.float32)
    alone = train_alone(twice, dtype=torch.float32)
    assert_same(without_idle_states(ours), without_idle_states(alone))


@contextmanager
def no_showing() -> Iterator[None]:
    """What is shown of gradients finds no memory as a backward ends."""

    def refused(_: Gradients) -> None:
        raise MemoryError("there is none just now")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gradients, "renew_shown", refused)
        yield


# -- what somebody has views of ------------------------------------------------------------------


def test_values_that_find_no_memory_leave_a_held_view_the_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise MemoryError("there is none just now")

    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        norm: Any = run.model.norm
        held = norm.weight.detach()
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(type(run.engine.executor.device), "empty", refused)
            norm.weight.data = torch.zeros_like(held)
        held.fill_(3)
        assert norm.weight.eq(3).all()
        norm.weight.data = torch.zeros_like(held)
        assert held.eq(3).all()
        assert not norm.weight.any()


def test_a_gradient_that_finds_no_room_leaves_what_is_shown(tmp_path: Path) -> None:
    """The copy that is shown is its viewer's once there is another."""
    with attached(("cpu", "nvme", "cpu"), tmp_path, exposed_memory="4KiB") as run:
        weight: Any = run.model.norm.weight
        run.loss().backward()
        shown = weight.grad
        view, other = shown.view(-1), torch.zeros_like(shown)
        with pytest.raises(MemoryError, match="exposed_memory"):
            weight.grad = other
        view.fill_(3)
        assert weight.grad is shown
        assert shown.eq(3).all()
        del view
        weight.grad = other
        assert weight.grad is other
        assert shown.eq(3).all()
        run.step()
