"""Updates that begin inside backward: what must follow, and what is refused in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.training import RESIDENT, Net, Run, assert_same, attached, batch, plain, result_of, train

PLACEMENT = ("nvme", "cpu", "nvme")


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Run]:
    """A run whose last backward has begun updates, before its step."""
    with attached(PLACEMENT, tmp_path, micro_batches=1) as run:
        plain(run, 0)
        run.loss().backward()
        assert run.engine.finality.begun
        yield run


REFUSED: dict[str, Callable[[Run], Any]] = {
    "forward": lambda run: run.loss(),
    "zero_grad": lambda run: run.optimizer.zero_grad(),
    "p.grad": lambda run: run.model.embed.weight.grad,
    "p.grad =": lambda run: setattr(run.model.embed.weight, "grad", None),
    "a touch": lambda run: run.model.embed.weight.sum(),
    "state_dict": lambda run: run.model.state_dict(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_only_the_step_may_follow(name: str, begun: Run) -> None:
    with pytest.raises(RuntimeError, match=r"before step\(\)"):
        REFUSED[name](begun)
    begun.step()
    plain(begun, 1)


def test_the_step_must_be_the_one_that_was_begun(begun: Run) -> None:
    begun.optimizer.param_groups[0]["lr"] *= 2
    with pytest.raises(RuntimeError, match="changed between the last backward"):
        begun.optimizer.step()


def reentrant(run: Run, order: list[int]) -> None:
    """Reentrant checkpoints give a gradient each time that they run."""
    model: Any = run.model
    x = model.embed(batch(run.generator))
    for index in order:
        x = checkpoint(model.blocks[index], x, use_reentrant=True)
    model.head(x).float().sum().backward()


def test_a_unit_used_more_often_in_a_row_is_not_begun(tmp_path: Path) -> None:
    def feature(run: Run, number: int) -> None:
        reentrant(run, [0, 1, 1] if number == 2 else [0, 1])
        run.step()

    resident = train(RESIDENT, tmp_path, feature)
    assert_same(train(PLACEMENT, tmp_path, feature, micro_batches=1), resident)


def test_a_gradient_that_comes_after_its_update_has_begun(tmp_path: Path) -> None:
    with attached(PLACEMENT, tmp_path, micro_batches=1) as run:
        for _ in range(2):
            reentrant(run, [0, 1])
            run.step()
        with pytest.raises(RuntimeError, match="more often"):
            reentrant(run, [0, 1, 0])


class Twice(nn.Module):
    """Uses its weight as a constant too, after the gradient of its weight is there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(nn.functional.linear(x, self.linear.weight.detach()))


def twice() -> Net:
    net = Net(layers=4)
    net.blocks = nn.ModuleList(Twice() for _ in range(4))
    return net


@pytest.mark.parametrize("placement", [PLACEMENT, RESIDENT, ("nvme", "nvme", "cpu")])
def test_an_update_begins_when_the_backward_of_its_unit_is_over(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    resident = train(RESIDENT, tmp_path, build=twice)
    assert_same(train(placement, tmp_path, build=twice, micro_batches=1), resident)


def test_held_copies_see_whole_steps_only(tmp_path: Path) -> None:
    def holding(run: Run, number: int) -> None:
        model: Any = run.model
        if number == 0:
            run.extra.append(model.norm.weight.data)
        plain(run, number)
        held, *sums = run.extra
        assert torch.equal(held, model.norm.weight)
        run.extra = [held, *sums, held.float().sum().item()]

    results = []
    for placement, options in ((PLACEMENT, {"micro_batches": 1}), (RESIDENT, {})):
        with attached(placement, tmp_path, **options) as run:
            for number in range(4):
                holding(run, number)
            run.extra = run.extra[1:]
            results.append(result_of(run))
    assert_same(*results)


def test_with_clipping_nothing_begins_early(tmp_path: Path) -> None:
    with attached(PLACEMENT, tmp_path, micro_batches=1, max_grad_norm=1.0) as run:
        plain(run, 0)
        run.loss().backward()
        assert not run.engine.finality.begun
        run.step()


def test_updates_do_begin_inside_backward(tmp_path: Path) -> None:
    begun: list[int] = []

    def watched(run: Run, number: int) -> None:
        loss = run.loss()
        first = next(run.model.blocks[0].parameters())  # type: ignore[union-attr, operator]
        hook = first.register_hook(lambda _: begun.append(len(run.engine.finality.begun)))
        loss.backward()
        hook.remove()
        run.step()

    result = train(PLACEMENT, tmp_path, watched, micro_batches=1, build=Net)
    assert begun[0] == 0
    assert min(begun[1:]) >= 5  # The head, the norm and the blocks after the first.
    assert_same(result, train(RESIDENT, tmp_path))
