"""`Config(shard=1)`: each rank sums its own micro-batches before the ranks sum theirs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

import offload
from tests.ranks import How, World, assert_as_one, digest, values_of, world_of
from tests.ranks_jobs import _attached, _steps
from tests.training import some_rows_fast

two = world_of(2)
HOW = How(micro=3, config={"shard": 1})


def looks(rank: int, ranks: int, how: How) -> set[str]:
    """What a look at a gradient says before a step; after it there is one."""
    model, optimizer = _attached(how)
    weight, said = model.head.weight, set[str]()
    touches: Any = (
        lambda: weight.grad,
        lambda: setattr(weight, "grad", torch.zeros_like(weight)),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: optimizer.zero_grad(set_to_none=False),
    )
    how.loss(model, rank).backward()
    for touch in touches:
        with pytest.raises(RuntimeError) as error:
            touch()
        said.add(str(error.value))
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    for kind in (how.kind, "unused"):  # Which leaves a block out, whose gradient is zeros.
        replace(how, kind=kind).loss(model, rank).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    offload.engine_of(model).close()
    return said


def drops(rank: int, ranks: int, how: How) -> dict[str, tuple[int, torch.Tensor]]:
    """What is left of a run in which some backwards are given up."""
    model, optimizer = _attached(how)
    for step in range(how.steps):
        for number in range(step):
            how.loss(model, number).backward()
        with torch.no_grad():
            for number in range(rank * step):  # Forwards that not all ranks call.
                how.loss(model, number)
        optimizer.zero_grad()
        _steps(model, optimizer, how, rank, ranks, [step])
    found = values_of(model, optimizer)
    offload.engine_of(model).close()
    return found


def test_a_gradient_is_there_after_the_step(two: World) -> None:
    for text in chain(*two.run(f"{__name__}.looks", HOW)):
        assert "between backward and step(): with Config(shard=1)" in text


@pytest.mark.slow
@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("kind", ["experts", "tied", "unused", "braided", "generates"])
def test_what_comes_in_some_backwards_only(two: World, kind: str, said: bool) -> None:
    config = {**HOW.config, "max_grad_norm": 0.5, **({"micro_batches": 3} if said else {})}
    how = replace(HOW, kind=kind, steps=6, config=config)
    assert_as_one(two.run("train", how), how)


@pytest.mark.parametrize(("shard", "steps"), some_rows_fast([(2, 4), (2, 6), (1, 6), (3, 6)]))
def test_what_was_given_up_is_in_no_sum(two: World, shard: int, steps: int) -> None:
    how = replace(HOW, kind="experts", micro=1, steps=steps, config={"shard": shard})
    plain = [digest(one.values) for one in two.run("train", how)]
    assert [*map(digest, two.run(f"{__name__}.drops", how))] == plain


def raises(rank: int, ranks: int, how: How, at: int) -> dict[str, tuple[int, torch.Tensor]]:
    """What is left of a run in which a backward of rank 1 raises in its middle."""
    model, optimizer = _attached(how)
    for step in range(how.steps):
        for micro in range(how.micro):
            fails = rank == 1 and micro == at
            handle = model.blocks[1].register_full_backward_hook(partial(_raise, fails))
            loss = how.loss(model, (step * how.micro + micro) * ranks + rank)
            with pytest.raises(ZeroDivisionError) if fails else nullcontext():
                loss.backward()
            handle.remove()
        optimizer.step()
        optimizer.zero_grad()
    found = values_of(model, optimizer)
    offload.engine_of(model).close()
    return found


def _raise(fails: bool, *_: Any) -> None:
    if fails:
        raise ZeroDivisionError


@pytest.mark.slow
@pytest.mark.parametrize("at", range(3))
def test_a_backward_that_raises_on_one_rank_is_one_of_the_step(two: World, at: int) -> None:
    """As where each backward sums over ranks, but for the order."""
    said = replace(HOW, dtype=torch.float32, config={**HOW.config, "micro_batches": 3})
    every = replace(HOW, dtype=torch.float32, config={"shard": 2})
    for mine, other in zip(*(two.run(f"{__name__}.raises", how, at) for how in (said, every))):
        for name, (start, value) in mine.items():
            assert other[name][0] == start
            torch.testing.assert_close(other[name][1], value, rtol=1e-3, atol=1e-4)
