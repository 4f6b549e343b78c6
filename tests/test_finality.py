"""Updates that begin inside backward: what must follow, and what is refused in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.declared import OTHER_STEPS
from offload.finality import Finality
from tests.training import (
    RESIDENT,
    Net,
    Regions,
    Run,
    assert_same,
    attached,
    batch,
    first_fast,
    plain,
    result_of,
    some_fast,
    train,
)

PLACEMENT = ("nvme", "cpu", "nvme")


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Run]:
    """A run whose last backward has begun updates, before its step."""
    with attached(PLACEMENT, tmp_path, micro_batches=1) as run:
        plain(run, 0)
        run.extra.append(run.model.embed(batch(run.generator)))  # type: ignore[operator]
        run.loss().backward()
        assert run.engine.finality.begun
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
        assert len(run.engine.finality.begun) > 2
        assert asked == [len(optimizer.param_groups)]


REFUSED: dict[str, Callable[[Run], Any]] = {
    "forward of a part": lambda run: run.model.embed(batch(run.generator)),  # type: ignore
    "another backward": lambda run: run.extra[0].sum().backward(),
    "detach": lambda run: offload.detach(run.model),
    "optimizer.state_dict": lambda run: run.optimizer.state_dict(),
    "forward": lambda run: run.loss(),
    "zero_grad": lambda run: run.optimizer.zero_grad(),
    "p.grad": lambda run: run.model.embed.weight.grad,
    "p.grad =": lambda run: setattr(run.model.embed.weight, "grad", None),
    "a touch": lambda run: run.model.embed.weight.sum(),
    "state_dict": lambda run: run.model.state_dict(),
}


@pytest.mark.parametrize("first", some_fast(range(len(REFUSED))))
def test_only_the_step_may_follow(first: int, begun: Run) -> None:
    """All are refused, whichever is asked first, and change nothing."""
    for name in [*list(REFUSED)[first:], *list(REFUSED)[:first]]:
        with pytest.raises(RuntimeError, match=r"before step\(\)"):
            REFUSED[name](begun)
        assert begun.engine.finality.begun, name
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


def reentrant(run: Run, order: list[int]) -> None:
    """Reentrant checkpoints give a gradient each time that they run."""
    model: Any = run.model
    x = model.embed(batch(run.generator))
    for index in order:
        x = checkpoint(model.blocks[index], x, use_reentrant=True)
    model.head(x).float().sum().backward()


@pytest.mark.parametrize("order", [[0, 1, 1], [0, 1, 0], [1], [0, 1]])
def test_a_unit_called_more_or_less_often_is_not_begun(order: list[int], tmp_path: Path) -> None:
    def feature(run: Run, number: int) -> None:
        reentrant(run, order if number == 2 else [0, 1])
        run.step()

    resident = train(RESIDENT, tmp_path, feature, steps=4)
    assert_same(train(PLACEMENT, tmp_path, feature, steps=4, micro_batches=1), resident)


class Twice(nn.Module):
    """Uses its weight as a constant too, after the gradient of its weight is there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(nn.functional.linear(x, self.linear.weight.detach()))


class Peer(Twice):
    """Uses its weight as a constant, then a module that is not its child, then its weight."""

    def __init__(self, peer: nn.Module) -> None:
        super().__init__()
        self.peer = [peer]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        constant = nn.functional.linear(x, self.linear.weight.detach())
        return x + self.linear(self.peer[0](constant))


class Recomputed(Twice):
    """Its weight as a constant, of which nothing is saved, in a checkpoint that others end."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def shift(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.linear.weight.detach().sum(0)).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(checkpoint(self.shift, x, use_reentrant=self.reentrant))


class Shift(nn.Module):
    """Its weight as a constant when told so, else as a weight; nothing is saved of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32))

    def forward(self, x: torch.Tensor, constant: bool) -> torch.Tensor:
        return x + (self.weight.detach() if constant else self.weight)


class Shifted(Net):
    """A unit whose gradient is there before a checkpoint with other units recomputes it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first, shift, *others = self.blocks
        x = checkpoint(
            lambda x: first(shift(x, True).tanh()), self.embed(tokens), use_reentrant=self.reentrant
        )
        for block in others:
            x = block(x)
        return self.head(self.norm(shift(x, False)))


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


def peers() -> Net:
    net = of_blocks(lambda _: nn.Linear(32, 32))()
    for number in (1, 3):
        net.blocks[number] = Peer(net.blocks[number - 1])
    return net


def shifted(reentrant: bool) -> Net:
    net = Shifted(reentrant=reentrant)
    net.blocks[1] = Shift()
    return net


SHAPES: dict[str, tuple[Callable[[], Net], int]] = {
    "constants": (of_blocks(lambda _: Twice()), 5),
    "peers": (peers, 3),
    "recomputed": (of_blocks(lambda _: Recomputed(False)), 5),
    "recomputed, reentrant": (of_blocks(lambda _: Recomputed(True)), 5),
    "shifted": (partial(shifted, False), 5),
    "shifted, reentrant": (partial(shifted, True), 5),
    "own function": (of_blocks(lambda _: Scaled()), 5),
    "tied": (partial(Net, tied=True), 6),
    "checkpoints": (partial(Net, checkpointed=True), 6),
    "reentrant checkpoints": (partial(Net, checkpointed=True, reentrant=True), 6),
    "checkpoints over several": (Regions, 6),
    "checkpoints over several, reentrant": (partial(Regions, reentrant=True), 6),
}
"""Models, and how many updates must have begun when the embedding's gradient comes."""


def counted(run: Run, number: int) -> None:
    """A step that notes how many updates have begun when the embedding's gradient comes."""
    loss = run.loss()
    first: Any = run.model.embed.weight  # type: ignore[union-attr]
    begun: list[int] = []
    hook = first.register_hook(lambda _: begun.append(len(run.engine.finality.begun)))
    loss.backward()
    hook.remove()
    if run.engine.finality.declared.number and number:
        run.extra += begun
    run.step()


@pytest.mark.parametrize(
    "placement", first_fast([PLACEMENT, ("device", "device", "cpu"), ("nvme", "nvme", "cpu")])
)
@pytest.mark.parametrize("shape", some_fast(SHAPES, fast=3))
def test_an_update_begins_when_the_backward_of_its_unit_is_over(
    shape: str, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    build, least = SHAPES[shape]
    early = train(placement, tmp_path, counted, build=build, micro_batches=1, steps=4)
    assert min(early.extra) >= least
    early.extra = []
    assert_same(early, train(RESIDENT, tmp_path, build=build, steps=4))


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


def test_too_few_backward_calls_are_told_once(tmp_path: Path) -> None:
    """Else updates never begin early, in silence; a single step may be the end of an epoch."""
    with attached(PLACEMENT, tmp_path, micro_batches=3) as run:

        def steps(*counts: int) -> None:
            for count in counts:
                for _ in range(count):
                    run.loss().backward()
                run.optimizer.step()
                run.optimizer.zero_grad()

        steps(3, 2, 3, 1, 3)
        assert not run.engine.finality.notices
        with pytest.warns(RuntimeWarning, match="came after fewer, the last after 2: no update"):
            steps(2, 2)
        steps(2, 2)  # Warnings are errors here.
        assert run.engine.notices[-1].endswith(
            "try micro_batches=2, or leave it out where the number varies"
        )


@pytest.mark.parametrize(
    ("count", "told"),
    [(1, "fewer, the last after 1; likely step"), (3, "more, the last after 3; likely the loop")],
)
def test_with_clipping_another_number_of_backward_calls_is_told(
    count: int, told: str, tmp_path: Path
) -> None:
    """Nothing begins early then, and nothing is refused; but another batch is trained on."""
    with attached(PLACEMENT, tmp_path, micro_batches=2, max_grad_norm=1.0) as run:

        def step(count: int) -> None:
            for _ in range(count):
                run.loss().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

        for right in (2, count, 2, 2, count):
            step(right)
        with pytest.warns(RuntimeWarning, match=told):
            step(count)
        step(count)  # Warnings are errors here.
        assert told in run.engine.notices[-1]


@pytest.mark.filterwarnings("ignore:Config.micro_batches=2 declares so many:RuntimeWarning")
def test_one_thing_that_is_told_does_not_keep_another_from_being_told() -> None:
    """Whichever comes first: code that nothing tells of, or another number of backwards."""

    def refused(finality: Finality) -> None:
        finality.begun = {0: {}}
        with pytest.raises(RuntimeError, match="after its update had begun"):
            finality.gradient_came(0, 0, outermost=True)
        finality.stepped({0: {}})

    def another_number(finality: Finality) -> None:
        for _ in range(OTHER_STEPS):
            finality.backward_began()
            finality.gradient_came(0, 0, outermost=True)
            finality.backward_ended()
            finality.stepped({})

    for first, second in ((refused, another_number), (another_number, refused)):
        finality = Finality(2, ["unit"])
        first(finality)
        second(finality)
        number, no_more = finality.notices
        assert "steps in a row came after fewer" in number
        assert "no update begins inside a backward any more" in no_more


def test_without_micro_batches_nothing_is_counted() -> None:
    finality = Finality(None, ["unit"])
    empty = deepcopy(finality._now)
    for _ in range(2):
        finality.called(0)
        finality.backward_began()
        finality.recomputed(0)
        finality.gradient_came(0, 0, outermost=True)
        assert not finality.final
        assert finality._now == empty
        finality.backward_ended()
