"""Updates inside backward, where a step is given up or a backward ends with an exception."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import interrupt
from tests.training import (
    Net,
    Run,
    assert_same,
    attached,
    batch,
    first_fast,
    plain,
    some_fast,
    train,
)

AT_STEP = ("device", "cpu", "device")
"""Placement of the runs that know of no micro-batches."""
PLACEMENTS = [("nvme", "cpu", "nvme"), AT_STEP, ("cpu", "nvme", "device")]
PLACEMENT = PLACEMENTS[0]
BLOCK = "blocks.1.up.weight"
"""Its gradient comes in the middle of a backward, after updates of later units have begun."""


@contextmanager
def hooked(run: Run, hook: Callable[[Any], Any]) -> Iterator[None]:
    """`hook` runs before the gradient of the block's weight is there."""
    handle = run.model.get_parameter(BLOCK).register_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def pressed_in_collect(run: Run) -> Iterator[None]:
    """Ctrl-C while the engine takes over the gradient of the block's weight."""
    collect = run.engine.collector.collect
    unit, index = place_of(run)

    def pressed(*args: Any) -> None:
        if args[:2] == (unit, index):
            signal.raise_signal(signal.SIGINT)
        collect(*args)

    run.engine.collector.collect = pressed  # type: ignore[method-assign]
    now, waits = run.engine.collector.units[unit], run.engine.collector.units[unit].waits
    now.waits = 0
    try:
        yield
    finally:
        now.waits = waits
        del run.engine.collector.collect


def place_of(run: Run) -> tuple[int, int]:
    for unit, spec in enumerate(run.engine.plan.profile.units):
        for index, one in enumerate(spec.parameters):
            if one.name == BLOCK:
                return unit, index
    raise AssertionError(BLOCK)


def boom(*_: Any) -> None:
    raise ZeroDivisionError("on purpose")


CUTS: dict[str, Callable[[Run], Any]] = {
    "exception": lambda run: hooked(run, boom),
    "Ctrl-C between two calls": lambda run: hooked(run, lambda _: signal.raise_signal(2)),
    "Ctrl-C in a call": pressed_in_collect,
}
"""Ways to end a backward in its middle."""


def cut(run: Run, how: str = "exception") -> None:
    loss = run.loss()
    with CUTS[how](run), pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
        loss.backward()


def declared(run: Run) -> int | None:
    """The micro-batches that the engine was told of; the resident run was told of none."""
    return run.engine.finality.declared.number


# -- a backward that ends with an exception -------------------------------------------------------


@pytest.mark.parametrize("placement", first_fast(PLACEMENTS))
@pytest.mark.parametrize("micro_batches", some_fast([2, 1]))
@pytest.mark.parametrize("how", CUTS)
def test_step_completes_a_backward_that_was_cut(
    how: str, micro_batches: int, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    def feature(run: Run, number: int) -> None:
        for _ in range(micro_batches - 1):
            run.loss().backward()
        if number in (2, 3):
            cut(run, how)
            assert not declared(run) or len(run.engine.finality.begun) >= 3
        else:
            run.loss().backward()
        run.step()

    early = train(placement, tmp_path, feature, steps=6, micro_batches=micro_batches)
    assert_same(early, train(AT_STEP, tmp_path, feature, steps=6))


REFUSED: dict[str, Callable[[Run], Any]] = {
    "forward": lambda run: run.loss(),
    "forward of a part": lambda run: run.model.embed(batch(run.generator)),  # type: ignore
    "another backward": lambda run: run.extra[0].sum().backward(),
    "zero_grad": lambda run: run.optimizer.zero_grad(),
    "model.zero_grad": lambda run: run.model.zero_grad(),
    "p.grad": lambda run: run.model.get_parameter(BLOCK).grad,
    "p.grad =": lambda run: setattr(run.model.get_parameter(BLOCK), "grad", None),
    "a touch": lambda run: run.model.get_parameter(BLOCK).sum(),
    "state_dict": lambda run: run.model.state_dict(),
    "optimizer.state_dict": lambda run: run.optimizer.state_dict(),
    "load_state_dict": lambda run: run.model.load_state_dict(
        {name: torch.zeros(p.shape) for name, p in run.model.named_parameters()}
    ),
    "stream_weights": lambda run: list(run.engine.stream_weights()),
    "detach": lambda run: offload.detach(run.model),
}


@pytest.mark.parametrize("how", CUTS)
def test_all_else_is_refused_and_told_why(how: str, tmp_path: Path) -> None:
    with attached(PLACEMENT, tmp_path, micro_batches=1) as run:
        plain(run, 0)
        early: Any = run.model.embed(batch(run.generator))
        run.extra.append(early)
        cut(run, how)
        count = len(run.engine.finality.begun)
        said = rf"before step\(\): .* ended with an exception after updates of {count} of 8 units"
        for ask in REFUSED.values():
            with pytest.raises(RuntimeError, match=said):
                ask(run)
        run.step()
        plain(run, 1)
        assert len(run.model.state_dict()) == len(list(run.model.parameters()))


@pytest.mark.parametrize("how", some_fast(CUTS))
def test_before_an_update_has_begun_all_is_as_without_micro_batches(
    how: str, tmp_path: Path
) -> None:
    def feature(run: Run, number: int) -> None:
        for skipped in (True, False):
            cut(run, how)  # The first of two.
            if skipped:
                run.optimizer.zero_grad()
        run.model.state_dict()
        for _ in range(2):
            run.loss().backward()
        run.step()

    early = train(PLACEMENT, tmp_path, feature, micro_batches=2)
    assert_same(early, train(AT_STEP, tmp_path, feature))


def test_another_backward_right_after_one_that_was_cut(tmp_path: Path) -> None:
    def feature(run: Run, number: int) -> None:
        loss = run.loss()
        with CUTS["exception"](run), pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        loss.backward()
        run.loss().backward()
        assert not run.engine.finality.begun
        run.loss().backward()
        assert not declared(run) or number == 0 or run.engine.finality.begun
        run.step()

    early = train(PLACEMENT, tmp_path, feature, micro_batches=3)
    assert_same(early, train(AT_STEP, tmp_path, feature))


def test_what_an_aborted_backward_counted_is_forgotten(tmp_path: Path) -> None:
    """It would be the measure of the next, which then began updates on half a gradient."""

    def feature(run: Run, number: int) -> None:
        if number == 2:
            cut(run)
        else:
            run.loss().backward()
        run.step()
        if declared(run) and number != 2:
            assert run.engine.finality._before[2].gradients.total() == 6

    early = train(PLACEMENT, tmp_path, feature, steps=5, micro_batches=1)
    assert_same(early, train(AT_STEP, tmp_path, feature, steps=5))


def test_pressed_twice_after_updates_have_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt, "_torn", [])
    with attached(PLACEMENT, tmp_path, micro_batches=1) as run:
        plain(run, 0)
        loss = run.loss()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            collect = run.engine.collector.collect

            def torn(*args: Any) -> None:
                collect(*args)
                if run.engine.finality.begun:
                    signal.raise_signal(signal.SIGINT)
                    signal.raise_signal(signal.SIGINT)

            patch.setattr(run.engine.collector, "collect", torn)
            loss.backward()
        assert run.engine.finality.begun
        asked = {**REFUSED, "step": lambda run: run.optimizer.step()}
        del asked["another backward"], asked["load_state_dict"]  # Torch has its own errors for it.
        for ask in asked.values():
            with pytest.raises(offload.EngineError, match="pressed twice"):
                ask(run)


# -- a step that is given up ----------------------------------------------------------------------


def zero_by_optimizer(run: Run) -> None:
    run.optimizer.zero_grad()


def zero_by_model(run: Run) -> None:
    run.model.zero_grad()


def fill_with_zeros(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=False)


def fill_by_model(run: Run) -> None:
    run.model.zero_grad(set_to_none=False)


def assign_none(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.grad = None


def failed_forward(run: Run) -> None:
    handle = run.model.blocks[3].register_forward_pre_hook(boom)  # type: ignore[index,union-attr]
    with pytest.raises(ZeroDivisionError):
        run.loss()
    handle.remove()
    run.optimizer.zero_grad()


def pressed_in_forward(run: Run) -> None:
    block: Any = run.model.blocks[3]  # type: ignore[index,union-attr]
    handle = block.register_forward_pre_hook(lambda *_: signal.raise_signal(2))
    with pytest.raises(KeyboardInterrupt):
        run.loss()
    handle.remove()
    run.optimizer.zero_grad()


def cut_and_zeroed(run: Run) -> None:
    run.optimizer.zero_grad()
    for how in CUTS:
        cut(run, how)
        run.optimizer.zero_grad()


GIVEN_UP = [zero_by_optimizer, zero_by_model, fill_with_zeros, fill_by_model, assign_none]
GIVEN_UP += [failed_forward, pressed_in_forward, cut_and_zeroed]


@pytest.mark.parametrize("micro_batches", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("give_up", some_fast(GIVEN_UP, fast=2))
def test_a_step_that_is_given_up_starts_the_count_again(
    give_up: Callable[[Run], None], micro_batches: int, tmp_path: Path
) -> None:
    def feature(run: Run, number: int) -> None:
        if number >= 2:
            for _ in range(micro_batches - 1):
                run.loss().backward()
            give_up(run)
        for _ in range(micro_batches):
            assert not run.engine.finality.begun
            run.loss().backward()
        assert not declared(run) or number == 0 or run.engine.finality.begun
        run.step()

    early = train(PLACEMENT, tmp_path, feature, steps=4, micro_batches=micro_batches)
    assert_same(early, train(AT_STEP, tmp_path, feature, steps=4))


def test_gradients_read_between_micro_batches_are_right(tmp_path: Path) -> None:
    def feature(run: Run, number: int) -> None:
        run.loss().backward()
        gradient = run.model.get_parameter(BLOCK).grad
        assert gradient is not None
        run.extra.append(gradient.float().sum().item())
        run.loss().backward()
        run.step()

    early = train(PLACEMENT, tmp_path, feature, micro_batches=2)
    assert_same(early, train(AT_STEP, tmp_path, feature))


# -- what is left for step() ----------------------------------------------------------------------


def retained(run: Run, number: int) -> None:
    loss = run.loss()
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    run.step()


def kept_output(run: Run, number: int) -> None:
    """An output that no loss uses keeps its graph."""
    kept = run.model(batch(run.generator))
    run.loss().backward()
    run.step()
    del kept


def uncalled(run: Run, number: int) -> None:
    """Each second step is a backward of nothing."""
    torch.autograd.grad(run.loss(), [run.model.get_parameter(BLOCK)])
    run.loss().backward()
    run.step()


def read_in_backward(run: Run, number: int) -> None:
    """A hook that reads the weights of a unit whose turn is still to come."""
    early: Any = run.model.get_parameter("blocks.0.up.weight")
    with hooked(run, lambda _: run.extra.append(early.float().sum().item())):
        run.loss().backward()
    run.step()


@pytest.mark.filterwarnings("ignore:Config.micro_batches=1 declares so many")  # Of `retained`.
@pytest.mark.parametrize("feature", some_fast([uncalled, retained, kept_output, read_in_backward]))
def test_loops_that_begin_late(feature: Callable[[Run, int], None], tmp_path: Path) -> None:
    early = train(PLACEMENT, tmp_path, feature, micro_batches=1, build=Net)
    assert_same(early, train(AT_STEP, tmp_path, feature))


def test_a_hook_that_reads_half_updated_weights_is_refused(tmp_path: Path) -> None:
    with attached(PLACEMENT, tmp_path, micro_batches=1) as run:
        plain(run, 0)
        loss = run.loss()
        late: Any = run.model.get_parameter("head.weight")
        with hooked(run, lambda _: late.sum()), pytest.raises(RuntimeError, match="touch of head"):
            loss.backward()


def test_units_outside_the_optimizer_do_not_begin(tmp_path: Path) -> None:
    def embedding_only(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.embed.parameters(), lr=1e-2)

    with attached(PLACEMENT, tmp_path, micro_batches=1, optimizer=embedding_only) as run:
        plain(run, 0)
        run.loss().backward()
        assert len(run.engine.finality.begun) == 1
        run.step()
