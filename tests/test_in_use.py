"""Parameters in use, and in use still after an exception or Ctrl-C: as in plain PyTorch."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cpu_adam import update_parts
from offload.executor import Executor
from offload.program import Value
from offload.resting import RestingParameter
from offload.store import Store
from tests import training
from tests.paced_loops import Least, Loop, use_one_block_inside_another
from tests.training import Run

PLACEMENTS = training.first_fast(
    [("nvme", "nvme", "nvme"), ("cpu", "cpu", "nvme"), training.RESIDENT]
)


def build() -> nn.Module:
    return training.Net(layers=3)


def up(run: Run) -> Any:
    return run.model.blocks[2].up.weight  # type: ignore[index,union-attr]


def multiply(weight: Any) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def multiply_data(weight: Any) -> None:
    weight.data.mul_(0.5)


def multiply_detached(weight: Any) -> None:
    weight.detach().mul_(0.5)


def assign(weight: Any) -> None:
    weight.data = weight.data * 0.5


EDITS = [multiply_data, multiply, multiply_detached, assign]


# -- edits by the module itself ---------------------------------------------------------------


def in_forward(edit: Callable[[Any], None]) -> Callable[[Run, int], None]:
    def feature(run: Run, number: int) -> None:
        blocks: Any = run.model.blocks
        hook = blocks[2].register_forward_pre_hook(lambda module, args: edit(module.up.weight))
        training.plain(run, number)
        hook.remove()
        training.plain(run, number)

    return feature


def in_backward(edit: Callable[[Any], None]) -> Callable[[Run, int], None]:
    def feature(run: Run, number: int) -> None:
        weight = up(run)
        hook = weight.register_hook(lambda gradient: edit(weight))
        run.loss().backward()
        training.plain(run, number)
        hook.remove()
        training.plain(run, number)

    return feature


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("when", [in_forward, in_backward])
@pytest.mark.parametrize("edit", training.some_fast(EDITS))
def test_a_change_in_its_own_pass_counts(
    edit: Any, when: Any, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    feature = when(edit)
    found = training.train(placement, tmp_path, feature, build=build)
    training.assert_same(found, training.train_alone(feature, build=build))


# -- after Ctrl-C in a forward ----------------------------------------------------------------


def cut_forward(run: Run) -> None:
    """A forward that Ctrl-C ends in the midst of a block."""
    blocks: Any = run.model.blocks
    hook = blocks[2].down.register_forward_pre_hook(_press)
    with pytest.raises(KeyboardInterrupt):
        run.model(training.batch(run.generator))
    hook.remove()


def after_ctrl_c(edit: Callable[[Any], None]) -> Callable[[Run, int], None]:
    def feature(run: Run, number: int) -> None:
        training.plain(run, number)
        cut_forward(run)
        edit(up(run))
        run.extra.append(up(run).sum().item())
        training.plain(run, number)

    return feature


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("edit", EDITS)
def test_a_change_after_ctrl_c_counts(
    edit: Any, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    feature = after_ctrl_c(edit)
    options: dict[str, Any] = {"build": build, "dtype": torch.float32}
    found = training.train(placement, tmp_path, feature, **options)
    training.assert_same(found, training.train_alone(feature, **options))


def edited_while_handled(run: Run, number: int) -> None:
    """The traceback, with all frames of the forward, is alive still."""
    blocks: Any = run.model.blocks
    hook = blocks[2].down.register_forward_pre_hook(_press)
    try:
        run.model(training.batch(run.generator))
    except KeyboardInterrupt:
        held = up(run).data
        multiply_data(up(run))
    hook.remove()
    training.plain(run, number)
    training.plain(run, number)
    run.extra.append(held.double().sum().item() - up(run).double().sum().item())


def _press(*_: object) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_is_held_from_after_ctrl_c_stays_right(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"build": build, "dtype": torch.float32}
    found = training.train(placement, tmp_path, edited_while_handled, **options)
    assert found.extra == [0.0] * 3
    training.assert_same(found, training.train_alone(edited_while_handled, **options))


def edited_between_parts(run: Run, number: int) -> None:
    """A part of the model is called by itself, and its weights are shared with another."""
    run.model.embed(training.batch(run.generator))  # type: ignore[operator]
    run.model.embed.weight.data.mul_(0.5)  # type: ignore[union-attr,operator]
    run.extra.append(run.model.embed.weight.grad is None)  # type: ignore[union-attr]
    run.loss().backward()
    run.model.embed(training.batch(run.generator))  # type: ignore[operator]
    run.extra.append(run.model.embed.weight.grad.sum().item())  # type: ignore[union-attr,operator]
    run.step()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_weights_that_stay_in_use_between_parts(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "build": lambda: training.Net(layers=2, tied=True),
        "dtype": torch.float32,
    }
    found = training.train(placement, tmp_path, edited_between_parts, **options)
    training.assert_same(found, training.train_alone(edited_between_parts, **options))


# -- after a backward that raised -------------------------------------------------------------


class _Stop(Exception):
    pass


def cut_backward(run: Run, number: int) -> None:
    """A second backward raises in the midst of a block: gradients are those that came."""

    def stop(gradient: torch.Tensor) -> None:
        raise _Stop

    run.loss().backward()
    blocks: Any = run.model.blocks
    hook = blocks[1].up.weight.register_hook(stop)
    with pytest.raises(_Stop):
        run.loss().backward()
    hook.remove()
    for parameter in (*blocks[1].parameters(), *run.model.parameters()):
        assert parameter.grad is not None
        run.extra.append(parameter.grad.double().sum().item())
    if number == 1:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
    run.step()


def views_held(run: Run, number: int) -> None:
    """Views of gradients, kept and edited over several backwards."""
    run.loss().backward()
    views = [p.grad[:1].detach() for p in run.model.parameters()]  # type: ignore[index]
    for _ in range(2):
        run.loss().backward()
        run.extra += [view.double().sum().item() for view in views]
        views[0].mul_(2)
    run.extra.append(up(run).grad.sum().item())
    del views
    run.step()


@pytest.mark.parametrize("loop", [cut_backward, views_held])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients_read_between_backwards(
    loop: Callable[[Run, int], None], placement: tuple[str, str, str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"build": build, "dtype": torch.float32}
    found = training.train(placement, tmp_path, loop, **options)
    training.assert_same(found, training.train_alone(loop, **options))


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[Run]:
    """A run after a backward that raised in block 2."""
    with training.attached(("nvme", "cpu", "cpu"), tmp_path, build=build) as run:
        weight = up(run)
        hook = weight.register_hook(_press)
        with pytest.raises(KeyboardInterrupt):
            run.loss().backward()
        hook.remove()
        assert not isinstance(weight, RestingParameter)
        yield run


@pytest.mark.parametrize("touch", ["data", "detach", "grad", "set_grad", "del_grad", "copy"])
def test_a_touch_puts_at_rest_what_was_broken_off(touch: str, cut: Run) -> None:
    weight = up(cut)
    wanted = dict(cut.model.named_parameters())["blocks.2.up.weight"].clone()
    if touch == "grad":
        assert weight.grad is None
    elif touch == "set_grad":
        weight.grad = torch.ones_like(wanted)
        assert weight.grad.sum().item() == wanted.numel()
    elif touch == "del_grad":
        del weight.grad
    else:
        read = {"data": lambda: weight.data, "detach": weight.detach}
        found = read.get(touch, lambda: copy.deepcopy(weight))()
        assert training.same_bits(found, wanted)
        assert type(found) is (nn.Parameter if touch == "copy" else torch.Tensor)
    assert isinstance(weight, RestingParameter)
    cut.optimizer.zero_grad()
    training.plain(cut, 1)


def test_other_storage_in_its_own_forward_is_refused(tmp_path: Path) -> None:
    with training.attached(("cpu", "cpu", "cpu"), tmp_path, build=build) as run:

        def give(module: Any, args: Any) -> None:
            module.up.weight.set_(torch.zeros(128, 32))

        blocks: Any = run.model.blocks
        hook = blocks[2].register_forward_pre_hook(give)
        with pytest.raises(RuntimeError, match="cannot be given other storage"):
            run.loss()
        hook.remove()
        training.plain(run, 1)


@pytest.mark.parametrize("placement", [("cpu", "cpu", "cpu"), ("nvme", "cpu", "cpu")])
def test_a_change_by_a_view_from_before_is_refused_in_its_own_forward(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """The module would not see it. Around the forward it counts."""
    with training.attached(placement, tmp_path) as run:
        block: Any = run.model.blocks[2]  # type: ignore[index,union-attr]
        held = block.up.weight.data
        training.plain(run, 0)
        held.mul_(0.5)
        training.plain(run, 1)
        hook = block.register_forward_pre_hook(lambda *_: held.mul_(0.5))
        with pytest.raises(RuntimeError, match=r"blocks\.2\.up\.weight was changed, while its own"):
            run.loss()
        hook.remove()
        training.plain(run, 2)


class Halving(nn.Linear):
    """Halves its weight in its own forward, once `wait` returns."""

    wait: Callable[[], object] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wait is not None:
            self.wait()
            multiply_data(self.weight)
        return super().forward(x)


class Thrice(nn.Module):
    """Its first block is used before and after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Halving(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks
        return first(second(first(x)))  # type: ignore[no-any-return]


def test_a_change_is_put_home_after_it_was_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read from the drive while it is written there has a wrong checksum."""
    placement = ("nvme", "nvme", "nvme")
    budgets = training.smallest_budgets(placement, tmp_path, build=Thrice)
    reading, reads, begun, overlaps = set[str](), list[str](), threading.Event(), list[str]()
    read, write = Store.read, Store.write

    def slow_read(store: Store, kind: Any, unit: str, *rest: Any) -> None:
        ahead = threading.current_thread() is not threading.main_thread()
        if ahead:
            reads.append(unit)
            reading.add(unit)
            if reads == ["blocks.0", "blocks.1", "blocks.0"]:
                begun.set()
                time.sleep(0.2)
        read(store, kind, unit, *rest)
        if ahead:
            reading.discard(unit)

    def watched_write(store: Store, kind: Any, unit: str, *rest: Any) -> None:
        overlaps.extend(reading & {unit})
        write(store, kind, unit, *rest)

    with training.attached(placement, tmp_path, build=Thrice, **budgets) as run, torch.no_grad():
        x = torch.ones(2, 8, dtype=torch.bfloat16)
        run.model(x)  # The order is learned.
        before = run.model.blocks[0].weight.clone()  # type: ignore[index,operator,union-attr]
        monkeypatch.setattr(Store, "read", slow_read)
        monkeypatch.setattr(Store, "write", watched_write)
        halving: Any = run.model.blocks[0]  # type: ignore[index]
        halving.wait = lambda: begun.wait(10)
        run.model(x)
        monkeypatch.undo()
        assert begun.is_set()
        assert not overlaps
        assert torch.equal(halving.weight, before * 0.25)


def seen_beside_the_slot(run: Run) -> list[torch.Tensor]:
    """After a step, the last block called within the first, whose slot is its own, too."""
    loop = Loop(run, None)
    loop.backward()
    run.step()
    use_one_block_inside_another(loop)
    return loop.seen


def test_beside_the_slot_a_unit_waits_for_its_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = ("cpu", "cpu", "cpu")

    def build() -> nn.Module:
        return Least(tied=False, checkpointed=False)

    with training.attached(training.RESIDENT, tmp_path, build=build) as run:
        expected = seen_beside_the_slot(run)
    budgets = training.smallest_budgets(placement, tmp_path, build=build)
    with training.attached(placement, tmp_path, build=build, **budgets) as run:
        units = [one.name for one in run.engine.plan.profile.units]
        last, looked = Value("weight", units.index("blocks.2")), threading.Event()
        home = run.engine.executor.peek(last).data_ptr()
        peek = Executor.peek

        def late(weight: torch.Tensor, *rest: Any, **more: Any) -> None:
            if weight.data_ptr() == home:
                looked.wait(0.2)
            update_parts(weight, *rest, **more)

        def watched(executor: Executor, value: Value) -> torch.Tensor:
            found = peek(executor, value).clone()
            if value.unit == last.unit:
                looked.set()
            return found

        monkeypatch.setattr("offload.updates.update_parts", late)
        monkeypatch.setattr(Executor, "peek", watched)
        found = seen_beside_the_slot(run)
        monkeypatch.undo()
    assert looked.is_set()
    assert all(training.same_bits(one, other) for one, other in zip(found, expected, strict=True))


def test_beside_the_slot_nothing_stays_reserved_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = ("cpu", "cpu", "cpu")
    build = partial(Least, tied=False, checkpointed=False)
    budgets = training.smallest_budgets(placement, tmp_path, build=build)
    with training.attached(placement, tmp_path, build=build, **budgets) as run:

        def fail(*_: object) -> Any:
            raise MemoryError("none left")

        monkeypatch.setattr("offload.in_use.zeros_on", fail)
        with pytest.raises(MemoryError, match="none left"):
            seen_beside_the_slot(run)
        assert run.engine.exposures.bytes == 0


class Rounding(nn.Linear):
    """Computes with rounded weights, and puts the others back."""

    take: Callable[[Any], torch.Tensor] = staticmethod(lambda p: p.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.take(self.weight)
        self.weight.data = (self.weight.data * 4).round() / 4
        y = super().forward(x)
        self.weight.data = kept.view_as(self.weight)
        return y


TAKEN: dict[str, Callable[[Any], torch.Tensor]] = {
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "a view": lambda p: p.data.view(-1),
}


@pytest.mark.parametrize("placement", [("cpu", "cpu", "cpu"), ("device", "cpu", "cpu")])
@pytest.mark.parametrize("how", TAKEN)
def test_weights_put_aside_in_the_forward_and_back(
    how: str, placement: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put aside by reference, they are the old ones still; by a view of a view that is refused."""

    def feature(run: Run, number: int) -> None:
        x = torch.randn(4, 16, generator=run.generator)
        with torch.no_grad():
            run.extra.append(run.model(x).sum().item())
        run.extra += [p.sum().item() for p in run.model.parameters()]

    monkeypatch.setattr(Rounding, "take", staticmethod(TAKEN[how]))
    options: Any = {
        "build": lambda: nn.Sequential(*(Rounding(16, 16) for _ in range(3))),
        "dtype": torch.float32,
    }
    if how == "a view":
        with pytest.raises(RuntimeError, match=r"0\.weight\.data was set.*a view of what it was"):
            training.train(placement, tmp_path, feature, **options)
        return
    ours = training.train(placement, tmp_path, feature, **options)
    training.assert_same(ours, training.train_alone(feature, **options))
