"""The squares of gradients, which are summed as these arrive, so that the norm is no pass."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.model.engine import Engine
from tests import training
from tests.training import Net, Run, accumulation, assert_same, attached, batch, plain, result_of

PLACEMENTS = [("device", "nvme", "nvme"), ("cpu", "cpu", "cpu"), ("nvme", "nvme", "cpu")]
RUNNERS = ("native", "python")
CLIP = 0.05
"""So small that each step is clipped."""


def edited(run: Run, number: int) -> None:
    run.loss().backward()
    for parameter in list(run.model.parameters())[:3]:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)
    run.step()


def edited_through_another_name(run: Run, number: int) -> None:
    """The gradient was asked for before the last backward, and is edited after."""
    run.loss().backward()
    first = next(run.model.parameters())
    held = first.grad
    run.loss().backward()
    if run.engine.plan.home("gradient", 0).tier != "nvme":  # There it is a snapshot of before.
        assert held is not None
        held.mul_(3)
    else:
        assert first.grad is not None
        first.grad.mul_(3)
    run.step()


def assigned(run: Run, number: int) -> None:
    run.loss().backward()
    first, *_, last = run.model.parameters()
    first.grad, last.grad = torch.ones_like(first), None
    run.step()


def dropped(run: Run, number: int) -> None:
    """A batch is given up, and the next backward uses the model in part."""
    run.loss().backward()
    if number % 2:
        run.optimizer.zero_grad()
        run.model.embed(batch(run.generator)).float().sum().backward()  # type: ignore[operator]
    run.step()


def zeroed(run: Run, number: int) -> None:
    run.loss().backward()
    if number == 2:
        run.optimizer.zero_grad(set_to_none=False)
    run.step()


def kept(run: Run, number: int) -> None:
    """Gradients stay from step to step, and only some are added to."""
    run.loss().backward()
    run.optimizer.step()
    run.model.embed(batch(run.generator)).float().sum().backward()  # type: ignore[operator]
    run.optimizer.step()


def slept(run: Run, number: int) -> None:
    import offload

    plain(run, number)
    offload.sleep(run.model)
    offload.wake(run.model)


LOOPS: list[Callable[[Run, int], None]] = [
    plain,
    training.two_micro_batches,
    accumulation,  # A guess of the last backward is wrong every time.
    edited,
    edited_through_another_name,
    assigned,
    dropped,
    zeroed,
    kept,
    slept,
]


def trained(loop: Callable[[Run, int], None], placement: Any, path: Path, **options: Any) -> Any:
    """Norms, weights and states after some steps, and how many sums were queued early."""
    early, norms = 0, []
    with attached(placement, path, max_grad_norm=CLIP, **options) as run:
        updates: Any = run.engine.updates
        sum_squares = updates.sum_squares

        def counted(*args: Any) -> None:
            nonlocal early
            early += 1
            sum_squares(*args)

        updates.sum_squares = counted
        for number in range(4):
            loop(run, number)
            norms.append(run.optimizer.grad_norm())  # type: ignore[attr-defined]
        return norms, result_of(run), early


def in_some() -> list[Any]:
    """Each loop in one placement and by one runner in the fast tier, in turn."""
    return [
        training.tiered((at, by) == (number % 2, number // 2 % 2), loop, placement, runner)
        for number, loop in enumerate(LOOPS)
        for (at, placement), (by, runner) in product(enumerate(PLACEMENTS), enumerate(RUNNERS))
    ]


@pytest.mark.parametrize(("loop", "placement", "runner"), in_some(), indirect=["runner"])
def test_the_norm_is_that_of_squares_summed_at_step(
    loop: Callable[[Run, int], None],
    placement: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runner: None,
) -> None:
    norms, found, early = trained(loop, placement, tmp_path)
    assert early > 0
    monkeypatch.setattr(Engine, "_sum_squares", lambda self, unit, at=None: _leave(self, unit))
    expected = trained(loop, placement, tmp_path)
    assert expected[2] == 0
    assert norms == expected[0]
    assert_same(found, expected[1])


def _leave(engine: Engine, unit: int) -> None:
    engine.early.final.discard(unit)


def test_clipping_reads_no_byte_of_gradients_again(tmp_path: Path, runner: None) -> None:
    """From the second step on, when it is known which gradients a unit has."""

    def moved(**config: Any) -> list[int]:
        found = []
        with attached(("nvme", "nvme", "nvme"), tmp_path, build=Net, **config) as run:
            for number in range(4):
                before = run.engine.report().lanes["disk"].bytes
                plain(run, number)
                run.engine.settle()
                found.append(run.engine.report().lanes["disk"].bytes - before)
        return found

    clipped, free = moved(max_grad_norm=CLIP), moved()
    assert clipped[0] > free[0]
    assert clipped[1:] == free[1:]
