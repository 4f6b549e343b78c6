"""A step that all ranks skip, as one of them has met an exception."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offload
from tests.ranks import How, World, digest, values_of, world_of
from tests.ranks_jobs import _attached
from tests.training import some_fast, some_rows_fast

two = world_of(2)

LEAVES_OUT = "-oo-oo-o"
"""What each micro-batch uses, in turn by rank: all, but one of the blocks (o), or that twice (2).
The last but one finds what an order that all ranks had followed left in the slots."""

PLACES = ("data", "forward", "between", "loss", "backward")
"""Where rank 1 fails, in every second step."""


def skips(rank: int, ranks: int, how: How, fails: bool) -> int:
    """What is left of a run that skips steps in which rank 1 `fails`; else they are left out."""
    model, optimizer = _attached(how)
    for step in range(2 * len(PLACES)):
        place, bad = PLACES[step // 2] if step % 2 else "", torch.zeros(1)
        if place and not fails:
            continue
        try:
            _try(model, how, step * ranks + rank, place if rank else "")
        except ZeroDivisionError:
            bad += 1
            optimizer.engine.skip_backward()
        dist.all_reduce(bad)
        assert bool(bad) == bool(place)
        if not bad:
            optimizer.step()
        optimizer.zero_grad()
    found = digest(values_of(model, optimizer))
    offload.engine_of(model).close()
    return found


def _try(model: Any, how: How, number: int, place: str) -> None:
    """A forward and a backward, one of which may raise."""
    block = model.blocks[1]
    _raise(place == "data")
    handles = [block.register_forward_hook(lambda *_: _raise(place == "forward"))]
    handles += [block.register_full_backward_hook(lambda *_: _raise(place == "backward"))]
    try:
        loss = how.loss(model, number)
        _raise(place == "between")
        loss.register_hook(lambda _: _raise(place == "loss"))
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()


def _raise(fails: bool) -> None:
    if fails:
        raise ZeroDivisionError


@pytest.mark.parametrize("shard", some_fast([3, 1, 2]))
@pytest.mark.parametrize("kind", some_fast(["plain", "experts", "checkpointed"]))
def test_a_step_in_which_one_rank_has_failed_is_skipped(two: World, kind: str, shard: int) -> None:
    how = How(kind, micro=1, config={"shard": shard, "comm_timeout": 20.0})
    assert two.run(f"{__name__}.skips", how, True) == two.run(f"{__name__}.skips", how, False)


def leaves_out(rank: int, ranks: int, how: How, patterns: list[str]) -> list[torch.Tensor]:
    """The weights after a step for each pattern."""
    model, optimizer = _attached(how)
    for number, pattern in enumerate(patterns):
        for at in range(rank, len(pattern), ranks):
            x = torch.randn(4, 47, generator=torch.Generator().manual_seed(100 * number + at))
            for block, times in zip(model.blocks[:3], (1, "o-2".index(pattern[at]), 1)):
                for _ in range(times):
                    x = block(x)
            (model.head(x).square().mean() / len(pattern)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with offload.gathered(model):
        found = [one.detach().clone() for one in model.parameters()]
    offload.engine_of(model).close()
    return found


@pytest.mark.parametrize(
    ("gradients", "more"), some_rows_fast([("device", 2), ("device", 9), ("cpu", 9)])
)
def test_blocks_that_some_micro_batches_leave_out(two: World, gradients: str, more: int) -> None:
    chance = random.Random(0)
    patterns = [LEAVES_OUT, *("".join(chance.choices("-o2", k=8)) for _ in range(more))]
    how = How("plain", torch.float32, config={"gradients": gradients, "shard": 3, "reduce": "sum"})
    for found in two.run(f"{__name__}.leaves_out", how, patterns):
        assert all(map(torch.equal, found, leaves_out(0, 1, how, patterns)))


def test_one_process_has_no_part_to_take() -> None:
    how, found = How("plain", micro=1, config={}), []
    for skips in (False, True):
        model, optimizer = _attached(how)
        with optimizer.engine as engine:
            if skips:
                engine.skip_backward()
            how.loss(model, 0).backward()
            optimizer.step()
            found.append(digest(values_of(model, optimizer)))
    assert found[0] == found[1]
