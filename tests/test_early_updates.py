"""Updates that begin inside backward: when they do, what must follow, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.model.early_updates import EarlyUpdates, ParameterStep
from tests import training
from tests.training import Net, Regions, Run, as_in_plain_torch, attached, batch, plain, some_fast

PLACEMENT = ("nvme", "cpu", "nvme")


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Run]:
    """A run whose last backward has begun updates, before its step."""
    with attached(PLACEMENT, tmp_path, micro_batches=1) as run:
        plain(run, 0)
        run.extra.append(run.model.embed(batch(run.generator)))  # type: ignore[operator]
        run.loss().backward()
        assert run.engine.early.begun
        yield run


def test_what_groups_are_frozen_to_is_found_once_a_backward(tmp_path: Path) -> None:
    """And not for each unit anew, of which there may be thousands."""
    with attached(PLACEMENT, tmp_path, micro_batches=1) as run:
        plain(run, 0)
        optimizer: Any = run.optimizer
        asked, hyper_of = [0], optimizer._hyper_of

        def counted(group: Any) -> Any:
            asked[0] += 1
            return hyper_of(group)

        optimizer._hyper_of = counted
        run.loss().backward()
        assert len(run.engine.early.begun) > 2
        assert asked == [len(optimizer.param_groups)]


REFUSED: dict[str, Callable[[Run], Any]] = {
    "forward of a part": lambda run: run.model.embed(batch(run.generator)),  # type: ignore
    "another backward": lambda run: run.extra[0].sum().backward(),
    "detach": lambda run: offload.detach(run.model),
    "optimizer.state_dict": lambda run: run.optimizer.state_dict(),
    "a state =": lambda run: run.optimizer.state.__setitem__(run.model.embed.weight, {}),
    "forward": lambda run: run.loss(),
    "zero_grad": lambda run: run.optimizer.zero_grad(),
    "p.grad": lambda run: run.model.embed.weight.grad,
    "p.grad =": lambda run: setattr(run.model.embed.weight, "grad", None),
    "a touch": lambda run: run.model.embed.weight.sum(),
    "state_dict": lambda run: run.model.state_dict(),
}


def test_only_the_step_may_follow(begun: Run) -> None:
    """All else is refused, and changes nothing."""
    for name, call in REFUSED.items():
        with pytest.raises(RuntimeError, match=r"before step\(\)"):
            call(begun)
        assert begun.engine.early.begun, name
    begun.step()
    plain(begun, 1)


def test_the_step_must_be_the_one_that_was_begun(begun: Run) -> None:
    begun.optimizer.param_groups[0]["lr"] *= 2
    with pytest.raises(RuntimeError, match="changed between the last backward"):
        begun.optimizer.step()


def test_an_update_is_issued_before_the_next_weights_are_waited_for(tmp_path: Path) -> None:
    with attached(PLACEMENT, tmp_path, micro_batches=1) as run:
        plain(run, 0)
        engine: Any = run.engine
        use, begin, seen = engine._use, engine._begin_updates, list[tuple[str, int]]()
        loss = run.loss()
        engine._use = lambda bound: (seen.append(("use", bound.index)), use(bound))
        engine._begin_updates = lambda turns: (seen.append(("begin", *turns)), begin(turns))
        loss.backward()
        del engine._use, engine._begin_updates
        run.step()
    last = len(engine.units) - 1
    order = [(what, unit) for unit in (last, last - 1) for what in ("use", "begin")]
    assert seen[:4] == order


class Twice(nn.Module):
    """Uses its weight as a constant too, after the gradient of its weight is there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(nn.functional.linear(x, self.linear.weight.detach()))


class Recomputed(Twice):
    """Its weight as a constant, of which nothing is saved, in a checkpoint that others end."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def shift(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.linear.weight.detach().sum(0)).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(checkpoint(self.shift, x, use_reentrant=self.reentrant))


class Scale(torch.autograd.Function):
    """Keeps a weight for backward, and gives no gradient of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x * weight.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0].mean(), None


class Scaled(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(Scale.apply(x, self.linear.weight))  # type: ignore[no-untyped-call]


def of_blocks(make: Callable[[int], nn.Module]) -> Callable[[], Net]:
    def build() -> Net:
        net = Net(layers=4)
        net.blocks = nn.ModuleList(make(number) for number in range(4))
        return net

    return build


SHAPES: dict[str, tuple[Callable[[], Net], int]] = {
    "constants": (of_blocks(lambda _: Twice()), 5),
    "recomputed": (of_blocks(lambda _: Recomputed(False)), 5),
    "recomputed, reentrant": (of_blocks(lambda _: Recomputed(True)), 5),
    "own function": (of_blocks(lambda _: Scaled()), 5),
    "tied": (partial(Net, tied=True), 6),
    "checkpoints": (partial(Net, checkpointed=True), 6),
    "reentrant checkpoints": (partial(Net, checkpointed=True, reentrant=True), 6),
    "checkpoints over several": (Regions, 4),
    "checkpoints over several, reentrant": (partial(Regions, reentrant=True), 6),
    "fused": (partial(Net, layers=16, width=8), 5),
    "fused, checkpoints": (partial(Net, layers=16, width=8, checkpointed=True), 5),
    "fused, reentrant": (partial(Net, layers=16, width=8, checkpointed=True, reentrant=True), 5),
}
"""Models, and how many updates must have begun when the embedding's gradient comes."""


def counted(run: Run, number: int) -> None:
    """A step that notes how many updates have begun when the embedding's gradient comes."""
    loss = run.loss()
    first: Any = run.model.embed.weight  # type: ignore[union-attr]
    begun: list[int] = []
    hook = first.register_hook(lambda _: begun.append(len(run.engine.early.begun)))
    loss.backward()
    hook.remove()
    if hasattr(run.optimizer, "engine") and run.engine.early.begins_early and number:
        run.extra += begun
    run.step()


@pytest.mark.parametrize(
    "placement", some_fast([PLACEMENT, ("device", "device", "cpu")]), ids="-".join
)
@pytest.mark.parametrize("shape", some_fast(SHAPES, fast=3))
def test_an_update_begins_when_the_backward_of_its_unit_is_over(
    shape: str, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    build, least = SHAPES[shape]
    early = training.train(placement, tmp_path, counted, build=build, micro_batches=1, steps=4)
    assert min(early.extra) >= least
    early.extra = []
    training.assert_same(early, training.train(training.RESIDENT, tmp_path, build=build, steps=4))


def test_with_clipping_nothing_begins_early(tmp_path: Path) -> None:
    with attached(PLACEMENT, tmp_path, micro_batches=1, max_grad_norm=1.0) as run:
        plain(run, 0)
        run.loss().backward()
        assert not run.engine.early.begun
        run.step()


def last_of_two(run: Run, number: int) -> None:
    """A second micro-batch that is said to be the last: its gradients are with the updates."""
    run.loss().backward()
    if hasattr(run.optimizer, "engine"):
        run.engine.last_micro_batch()
    run.loss().backward()
    if hasattr(run.optimizer, "engine"):
        with pytest.raises(RuntimeError, match=r"before step\(\)"):
            print(run.model.head.weight.grad)  # type: ignore[union-attr]
    run.step()


def test_updates_begin_in_the_backward_that_is_said_to_be_the_last(tmp_path: Path) -> None:
    as_in_plain_torch(last_of_two, ("nvme", "nvme", "nvme"), tmp_path)


def test_another_gradient_of_what_is_updated_is_refused_and_the_step_completes(
    tmp_path: Path,
) -> None:
    with attached(("cpu", "cpu", "cpu"), tmp_path, micro_batches=1) as run:
        model: Any = run.model

        def backward(*order: int) -> None:
            x = model.embed(batch(run.generator))
            for index in order:
                x = checkpoint(model.blocks[index], x, use_reentrant=True)
            model.head(x).sum().backward()

        backward(0, 1)
        run.step()
        with pytest.raises(RuntimeError, match=r"blocks\.0 came in a backward after its update"):
            backward(0, 1, 0)
        run.step()
        assert run.optimizer.state[model.blocks[0].up.weight]["step"] == 2
        backward(0, 1)
        run.step()


class Both(nn.Module):
    """A block of which one weight may be used alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2))

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        x = x @ self.first
        return x @ self.second if whole else x


class UsedInPart(nn.Module):
    """Blocks that are checkpointed twice, the first time in part."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Both() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            for whole in (False, True):
                x = checkpoint(block, x, whole, use_reentrant=True)
        return x


def test_a_block_that_recomputes_in_parts_is_final_after_all_of_them(tmp_path: Path) -> None:
    def loop(run: Run, number: int) -> None:
        x = torch.randn(4, 8, generator=run.generator).requires_grad_()
        loss = run.model(x).pow(2).mean()
        loss.backward()
        run.losses.append(loss.item())
        run.step()

    options = training.fp32(build=UsedInPart, steps=4, micro_batches=1)
    as_in_plain_torch(loop, ("cpu", "cpu", "cpu"), tmp_path, **options)


# -- by itself --------------------------------------------------------------------------------


def backward(early: EarlyUpdates, *units: int) -> list[int]:
    """A backward that brings one gradient of each; the units that are final at its end."""
    early.backward_began()
    for unit in units:
        early.gradient_came(unit, 0)
    final = sorted(early.final)
    early.backward_ended(finished=True)
    return final


def test_a_unit_is_final_when_its_gradients_came_as_often_as_before() -> None:
    early = EarlyUpdates(2, ["one", "other"], clips=False)
    assert [backward(early, 0, 1), backward(early, 0, 1)] == [[], [0, 1]]
    early.stepped({})
    assert [backward(early, 0, 0, 1), backward(early, 0, 1)] == [[], [1]]
    early.gave_up()  # The batch is dropped: the next backward is the first of a step.
    assert [backward(early, 0, 1), backward(early, 0, 1)] == [[], [0, 1]]
    early.stepped({})
    assert early.notice is None
    assert backward(early, 0, 1) == []
    early.stepped({})
    assert "fewer than Config.micro_batches=2 backwards: 1;" in str(early.notice)


@pytest.mark.parametrize("clips", [True, False])
def test_the_next_backward_may_be_said_to_be_the_last(clips: bool) -> None:
    early = EarlyUpdates(None, ["unit"], clips=clips)
    assert backward(early, 0) == []
    early.last_micro_batch()
    assert backward(early, 0) == [0]
    early.stepped({})
    early.last_micro_batch()
    early.gave_up()  # That batch is dropped.
    assert backward(early, 0) == []


def test_what_was_begun_is_frozen() -> None:
    early, steps = EarlyUpdates(1, ["unit"], clips=False), {0: cast(ParameterStep, object())}
    early.freeze = lambda unit: steps
    backward(early, 0)
    early.stepped({})
    early.backward_began()
    early.gradient_came(0, 0)
    assert early.begin(0) is steps
    with pytest.raises(RuntimeError, match="another gradient of unit came in a backward after"):
        early.gradient_came(0, 0)
    with pytest.raises(RuntimeError, match="changed between the last backward"):
        early.stepped({0: {}})
    assert early.stepped({0: steps}) == {}
    assert not early.begun
