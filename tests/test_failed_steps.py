"""Steps that find no memory: taken again where nothing had begun, else the last."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.awaited import Away
from offload.exposure import Exposures
from offload.lanes import Lanes
from offload.updates import Updates
from tests.small import adamw
from tests.training import attached, plain, same_bits

ON_CPU = ("device", "device", "cpu")


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_step_that_could_not_begin_is_taken_again(
    clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of a gradient that is not contiguous finds no memory: nothing is updated yet."""

    def trained(*, fails: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
        both = {"params": "device", "gradients": "device", "optimizer": "auto"}
        memory = {"device_memory": "6MiB", "cpu_memory": "64MiB"}
        settings = offload.Config(**both, **memory, max_grad_norm=clip)  # type: ignore[arg-type]
        _, optimizer = offload.attach(model, adamw(model), settings)
        states = {placement.state for placement in optimizer.engine.plan.placements}
        assert states == {"device", "cpu"}
        model(torch.ones(4, 256)).square().sum().backward()
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(Away, "__init__", no_memory)
                with pytest.raises(torch.OutOfMemoryError):
                    optimizer.step()
        optimizer.step()
        offload.detach(model)
        return list(model.parameters())

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("of a gradient")

    pairs = zip(trained(fails=True), trained(fails=False))
    assert all(same_bits(one, other) for one, other in pairs)


def test_a_step_that_fails_midway_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attached(ON_CPU, tmp_path) as run:
        run.loss().backward()

        def no_memory(*_: object) -> None:
            raise torch.OutOfMemoryError("of what the step needs")

        monkeypatch.setattr(Updates, "_updater", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            run.optimizer.step()
        with pytest.raises(offload.EngineError, match="what the step needs"):
            run.optimizer.step()


HELD: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda weight: None,
    "the weight": lambda weight: weight.detach().mul_(0.5),
    "its gradient": lambda weight: weight.grad.mul_(2),
    "a view of its gradient": lambda weight: weight.grad.view(-1),
}


@pytest.mark.parametrize("name", ["wait", "drain"])
@pytest.mark.parametrize("held", HELD)
def test_a_step_in_which_a_wait_fails_is_taken_once(
    held: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked again it is the same step, or the engine says that it failed."""
    waits: list[int] = []

    def stepped(fails_at: int | None) -> list[torch.Tensor] | None:
        with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
            plain(run, 0)
            run.loss().backward()
            kept = HELD[held](run.model.norm.weight)  # type: ignore[union-attr]
            waits.clear()
            with monkeypatch.context() as patch:
                patch.setattr(Lanes, name, waiting(fails_at))
                if fails_at is None:
                    run.optimizer.step()
                else:
                    with pytest.raises(MemoryError, match="while it waited"):
                        run.optimizer.step()
            try:
                if fails_at is not None:
                    run.optimizer.step()
                del kept
                return [p.detach().clone() for p in run.model.parameters()]
            except offload.EngineError:
                return None

    def waiting(fails_at: int | None) -> Callable[..., Any]:
        own = getattr(Lanes, name)

        def wait(lanes: Lanes, *args: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                waits.append(len(waits))
                if waits[-1] == fails_at:
                    raise MemoryError("while it waited")
            return own(lanes, *args)

        return wait

    want = stepped(None)
    assert want is not None
    for at in range(len(waits)):
        found = stepped(at)
        assert found is None or all(map(same_bits, found, want))


@pytest.mark.parametrize("micro_batches", [None, 1])
def test_a_step_whose_updates_are_queued_is_not_taken_again(
    micro_batches: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held cannot be shown anew; or a unit finds no memory inside backward."""
    placement = ("cpu", "cpu", "cpu") if micro_batches is None else ON_CPU
    with attached(placement, tmp_path, micro_batches=micro_batches) as run:
        plain(run, 0)
        held = run.model.head.weight.detach()  # type: ignore[union-attr,operator]

        def no_memory(*_: object) -> None:
            raise torch.OutOfMemoryError("once it had begun")

        monkeypatch.setattr(Exposures, "renew", no_memory)
        monkeypatch.setattr(Away, "__init__", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            run.loss().backward()
            run.optimizer.step()
        monkeypatch.undo()
        with pytest.raises(offload.EngineError, match="once it had begun"):
            run.optimizer.step()
        assert held.isfinite().all()
