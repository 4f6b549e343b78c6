"""What may come between the backwards of a step, and inside one, where updates begin early."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.reruns import Reruns, _forwards
from tests.micro_programs import WAYS, Net, again, differs
from tests.training import (
    RESIDENT,
    Run,
    assert_same,
    attached,
    fp32,
    plain,
    same_bits,
    some_fast,
    train,
    train_alone,
)
from tests.training import Net as Plain

PLACEMENT = ("cpu", "cpu", "cpu")
Change = Callable[[Any], object]


# -- random programs -------------------------------------------------------------------------------


def run_programs(seeds: Sequence[int], directory: Path) -> Counter[str]:
    """Run them all; what was refused."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    told: Counter[str] = Counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of steps after another number of backward calls.
            for seed in seeds:
                refused, where = differs(seed, directory)
                assert not where, f"program {seed}: {where}"
                told += refused
    finally:
        torch.set_num_threads(threads)
    return told


def test_a_sample_of_programs(tmp_path: Path) -> None:
    """Whose backwards are the declared ones, and some that are not, end bit for bit as in torch."""
    assert run_programs([113, 123, 601, 10031, *range(16)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 4000, 500))
def test_thousands_of_programs(start: int, tmp_path: Path) -> None:
    run_programs(range(start, start + 500), tmp_path)


# -- single ones -----------------------------------------------------------------------------------


def order(*blocks: int) -> Change:
    return lambda model: setattr(model, "order", blocks)


def way(how: str) -> Change:
    return lambda model: setattr(model, "how", how)


def inside(how: str) -> Change:
    return lambda model: [setattr(one, "how", how) for one in model.blocks]


def region(size: int) -> Change:
    return lambda model: setattr(model, "size", size)


def raw(kind: int) -> Change:
    return lambda model: setattr(model, "raw", kind)


def branch(block: int) -> Change:
    return lambda model: setattr(model.blocks[block], "branch", True)


def evaluated(block: int, mode: Callable[[], Any]) -> Change:
    """A call that stands for the one more that a reentrant checkpoint makes in the next step."""

    def change(model: Any) -> None:
        with mode():
            model.blocks[block](torch.ones(1, 3, 8))

    return change


THRICE = ["plain", "plain", "plain"]
INNER = ["inner", "inner", "inner"]
SHIFTS = ["shift", "plain", "shift"]

CHANGES: dict[str, tuple[list[str], list[Sequence[Change]]]] = {
    **{
        f"evaluated by {mode.__name__}, {how}": (
            THRICE,
            [
                (way(how), order(0, 1, 2), evaluated(0, mode)),
                (evaluated(0, mode),),
                (order(0, 1, 2, 0),),
            ],
        )
        for how in ("reentrant", "by hand", "apart")
        for mode in (torch.no_grad, torch.inference_mode, nullcontext)
    },
    **{
        f"once more, {how} inside": (INNER, [(inside(how), order(0, 1, 2)), (), (order(0, 1, 0),)])
        for how in WAYS
    },
    **{f"now {how}": (SHIFTS, [(), (), (way(how),), (way(""),)]) for how in WAYS},
    **{f"raw, {how}": (SHIFTS, [(way(how),), (), (raw(2),), (raw(1),)]) for how in WAYS},
    "recomputed to the end": (
        ["plain", "shift"],
        [(region(2),), (), (way("to the end"),), (way(""),)],
    ),
    "a call beside another use": (SHIFTS, [(raw(3), order(1, 2)), (), (order(0, 1, 2),)]),
    **{
        f"thrown away, {how} inside": (
            INNER,
            [
                (inside(how), order(0, 1, 2), evaluated(0, nullcontext)),
                (evaluated(0, nullcontext),),
                (order(0, 1, 2, 0),),
            ],
        )
        for how in WAYS
    },
    **{
        f"another branch, {how}": (SHIFTS, [(way(how),), (), (branch(0),), (branch(2),)])
        for how in WAYS
    },
}
"""Models, and what changes before each step: so that more comes of a unit than did before."""


@pytest.mark.parametrize("name", some_fast(CHANGES, fast=4))
def test_what_comes_is_known_before_it_comes(name: str, tmp_path: Path) -> None:
    kinds, changes = CHANGES[name]

    def changed(run: Run, number: int) -> None:
        for change in (*changes, ())[number]:
            change(run.model)
        tokens = torch.arange(6).view(2, 3)
        logits = run.model(tokens).view(-1, 11)
        loss = nn.functional.cross_entropy(logits, tokens.view(-1))
        run.losses.append(loss.item())
        loss.backward()
        run.step()

    options = fp32(build=partial(Net, kinds, False), steps=len(changes) + 1)
    early = train(PLACEMENT, tmp_path, changed, micro_batches=1, **options)
    assert_same(early, train(RESIDENT, tmp_path, changed, **options))


@pytest.mark.parametrize("how", some_fast(["reentrant", *WAYS]))
def test_two_engines_in_one_backward(how: str, tmp_path: Path) -> None:
    """A function runs modules of both again, once more in the last step than before."""

    def result(micro_batches: int | None) -> list[torch.Tensor]:
        with ExitStack() as stack:
            one, other = (
                stack.enter_context(
                    attached(
                        PLACEMENT,
                        tmp_path,
                        build=partial(Net, THRICE, False),
                        dtype=torch.float32,
                        micro_batches=micro_batches,
                    )
                )
                for _ in range(2)
            )
            mine, its = one.model, other.model

            def both(x: torch.Tensor) -> torch.Tensor:
                return its.blocks[0](mine.blocks[0](x))  # type: ignore

            for times in (1, 1, 2, 1):
                x = mine.embed(torch.arange(6).view(2, 3))  # type: ignore[operator]
                with torch.no_grad():
                    both(x)
                for _ in range(times):
                    x = again(how, both, x)
                its.head(mine.blocks[1](x)).pow(2).sum().backward()  # type: ignore
                one.step()
                other.step()
            return [*mine.state_dict().values(), *its.state_dict().values()]

    for one, other in zip(result(1), result(None), strict=True):
        assert same_bits(one, other)


def begun_in(run: Run, backward: Callable[[], object]) -> int:
    """Updates begun when the embedding's gradient comes, the last of a backward."""
    begun: list[int] = []
    first: Any = run.model.embed.weight  # type: ignore[union-attr]
    handle = first.register_hook(lambda _: begun.append(len(run.engine.finality.begun)))
    backward()
    handle.remove()
    return begun[-1]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [False, True])
def test_evaluations_and_losses_thrown_away_delay_nothing(reentrant: bool, tmp_path: Path) -> None:
    build = partial(Plain, checkpointed=reentrant, reentrant=reentrant)
    with attached(PLACEMENT, tmp_path, build=build, micro_batches=1) as run:
        plain(run, 0)
        for mode in (torch.no_grad, torch.inference_mode, *[nullcontext] * (not reentrant)):
            with mode():
                run.loss()
            loss = run.loss()
            with mode():
                run.loss()
            assert begun_in(run, loss.backward) >= 6
            run.step()


def test_two_forwards_before_two_backwards_delay_nothing(tmp_path: Path) -> None:
    with attached(PLACEMENT, tmp_path, micro_batches=2) as run:
        for number in range(3):
            one, other = run.loss(), run.loss()
            one.backward()
            assert begun_in(run, other.backward) >= 6 * (number > 0)
            run.step()


def test_a_backward_inside_one_that_has_shown_nothing_yet(tmp_path: Path) -> None:
    """It ends before the one around it begins, for all that the engine sees."""

    def nested(run: Run, number: int) -> None:
        loss, other = run.loss(), run.loss()

        def inside(gradient: torch.Tensor) -> None:
            other.backward()

        loss.register_hook(inside)
        loss.backward()
        run.step()

    early = train(PLACEMENT, tmp_path, nested, micro_batches=1, **fp32(steps=4))
    assert_same(early, train_alone(nested, **fp32(steps=4)))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [False, True])
def test_to_look_for_functions_keeps_nothing_alive(reentrant: bool, tmp_path: Path) -> None:
    """Before Python 3.13 what is looked at of a frame stays to its end."""
    build = partial(Plain, checkpointed=reentrant, reentrant=reentrant)
    with attached(PLACEMENT, tmp_path, build=build, micro_batches=1) as run:
        mine = torch.ones(1)
        known = weakref.ref(mine)
        run.loss()
        with torch.inference_mode():
            run.model(torch.zeros(1, 4, dtype=torch.long))
        del mine
        assert known() is None


def calls_inside(reruns: Reruns, how: str) -> type[torch.autograd.Function]:
    """A kind of function, made now, in whose forward a unit is called."""

    def called(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        reruns.called(0)
        return x * 2

    forwards: dict[str, Any] = {
        "plain": called,
        "a partial": partial(lambda factor, ctx, x: called(ctx, x) * factor, 2),
        "by name": partial(called),
        "any number": lambda *given: called(*given),
    }
    members = {
        "forward": staticmethod(forwards[how]),
        "backward": staticmethod(lambda ctx, gradient: gradient),
    }
    return type("Kind", (torch.autograd.Function,), members)


@pytest.mark.parametrize("how", ["plain", "a partial", "by name", "any number"])
def test_kinds_of_functions_are_known_once_they_are_defined(how: str) -> None:
    """And they are looked at once, and not kept."""
    reruns, x = Reruns(), torch.ones(1, requires_grad=True)
    codes = _forwards.codes()
    assert _forwards.codes() is codes
    kind = calls_inside(reruns, how)
    made = kind.apply(x)
    assert list(reruns._by_unit[0]) == [made.grad_fn]
    assert _forwards.codes() is not codes
    known = weakref.ref(kind)
    del kind, made
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("assigned", [False, True])
def test_a_gradient_that_is_held_may_change_until_the_step(assigned: bool, tmp_path: Path) -> None:
    """No call of the engine's tells of it, so an update that had begun would miss it in silence."""
    held: list[torch.Tensor] = []

    def scaled(run: Run, number: int) -> None:
        run.loss().backward()
        if number == 0:
            parameters: Any = list(run.model.parameters())
            for one in parameters if assigned else ():
                one.grad = one.grad.clone()
            held[:] = [one.grad for one in parameters]
        for one in held:
            one.mul_(0.5)
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)

    early = train(PLACEMENT, tmp_path, scaled, micro_batches=1, **fp32(steps=4))
    assert_same(early, train_alone(scaled, **fp32(steps=4)))


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("micro_batches", [None, 1])
def test_a_hook_goes_backward_while_a_unit_runs_again_inside_itself(
    how: str, micro_batches: int | None, tmp_path: Path
) -> None:
    """The unit has weights that its own recompute has saved, so it is not put at rest."""

    def hooked(run: Run, number: int) -> None:
        model: Any = run.model
        inside(how)(model)

        def hook(_: object) -> None:
            with torch.enable_grad():
                model.blocks[1](torch.ones(1, 3, 8)).sum().backward()

        handle = model.blocks[0].up.weight.register_hook(hook)
        model(torch.arange(6).view(2, 3)).pow(2).sum().backward()
        handle.remove()
        run.step()

    options = fp32(build=partial(Net, ["inner", "plain"], False), steps=2)
    early = train(PLACEMENT, tmp_path, hooked, micro_batches=micro_batches, **options)
    assert_same(early, train_alone(hooked, **options))


class InInference(torch.autograd.Function):
    """A block without a graph in inference mode, and again in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.block = block
        with torch.inference_mode():
            out = block(x.detach())
        return out.clone()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block(x)
        torch.autograd.backward(out, gradients)
        return x.grad, None


def test_a_function_that_enters_inference_mode_itself(tmp_path: Path) -> None:
    """From the third step on it uses the last block once more, ahead of the first."""

    def more(run: Run, number: int) -> None:
        blocks: Any = run.model.blocks

        def ahead(block: Any, args: Any) -> Any:
            return InInference.apply(args[0], blocks[4]) if number >= 2 else args

        hook = blocks[0].register_forward_pre_hook(ahead)
        run.loss().backward()
        hook.remove()
        run.step()

    early = train(PLACEMENT, tmp_path, more, micro_batches=1, **fp32(steps=4))
    assert_same(early, train_alone(more, **fp32(steps=4)))


LATE: dict[str, Callable[[Any], object]] = {
    "an evaluation": lambda model: model.blocks[4](torch.ones(1, 32)),
    "a look": lambda model: model.blocks[4].up.weight.sum(),
    "a backward": lambda model: model.blocks[4](torch.ones(1, 32)).sum().backward(),
}
"""What a hook does with a unit whose update has begun."""


@pytest.mark.parametrize("what", LATE)
def test_what_nothing_tells_of_is_refused_once_and_harms_nothing(what: str, tmp_path: Path) -> None:
    """The plain run's hook raises where the other one's is refused."""
    refused, told = list[int](), list[str]()

    def step(run: Run, number: int) -> None:
        loss, mine = run.loss(), hasattr(run.optimizer, "engine")

        def hook(_: object) -> None:
            if not mine and number in refused:
                raise RuntimeError("as if it was refused")
            with torch.enable_grad():
                LATE[what](run.model)

        first: Any = run.model.embed.weight  # type: ignore[union-attr]
        handle = first.register_hook(hook) if number > 1 else None
        try:
            loss.backward()
        except RuntimeError as error:
            refused.extend([number] * mine)
            told.append(str(error))
        run.step()
        if handle is not None:
            handle.remove()
        if mine and number == 4:
            assert "no update begins inside a backward any more" in run.engine.notices[-1]

    early = train(PLACEMENT, tmp_path, step, micro_batches=1, **fp32(steps=5))
    assert refused == [2]
    assert "The weights are whole: step() completes this step" in told[0]
    assert_same(early, train_alone(step, **fp32(steps=5)))
