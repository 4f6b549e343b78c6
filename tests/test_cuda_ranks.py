"""Two ranks on one GPU, through the host's memory; and a rank alone, over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import ranks
from tests.ranks import KINDS, WAYS, How, World, assert_as_one, digest, joined, way_of, world_of
from tests.test_cuda import needs_cuda

pytestmark = needs_cuda


two, one, apart = world_of(2), world_of(1), world_of(2, "nccl")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(params=["two", pytest.param("apart", marks=needs_two)])
def pair(request: pytest.FixtureRequest) -> World:
    """Two ranks on one device over gloo, and each on its own over NCCL."""
    found: World = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one_process(pair: World, kind: str) -> None:
    how = How(kind, micro=2, config={"max_grad_norm": 0.5})
    assert_as_one(pair.run("train", how), how)


@pytest.mark.parametrize("shard", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_in_every_placement(
    pair: World, way: tuple[str, str, str], shard: int, tmp_path: Path
) -> None:
    how = way_of(way, shard, tmp_path)
    assert_as_one(pair.run("train", how), how)


def test_streams_that_are_late_change_no_bit(two: World) -> None:
    for found in two.run("late", How("tied", config={"params": "cpu"}), 20):
        assert len(set(found)) == 1


@pytest.mark.parametrize("job", ["diverge", "clip", "touch"])
def test_what_ranks_do_beside_training(pair: World, job: str) -> None:
    how = How("unused" if job == "diverge" else "plain")
    assert ranks.same(pair.run(job, how), pair.run(job, how))


def test_saved_by_two_ranks_and_continued(two: World, tmp_path: Path) -> None:
    how = How("tied", dtype=torch.float32, micro=1)
    wanted = joined(two.run("save", how, str(tmp_path / "saved"), ours=True))
    found = joined(two.run("load", how, str(tmp_path / "saved"), 1, ours=True))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("kind", KINDS)
def test_over_nccl_as_without(one: World, kind: str) -> None:
    how = How(kind, micro=2, config={"params": "cpu", "max_grad_norm": 0.5})
    assert_as_one(one.run("alone", "nccl", "train", how), how)


@pytest.mark.parametrize("shard", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_over_nccl_in_every_placement(
    one: World, way: tuple[str, str, str], shard: int, tmp_path: Path
) -> None:
    how = way_of(way, shard, tmp_path)
    assert_as_one(one.run("alone", "nccl", "train", how), how)


def test_over_nccl_with_streams_that_are_late(one: World) -> None:
    how = How("tied", config={"params": "cpu"})
    (found,) = one.run("alone", "nccl", "late", how, 40)
    assert set(found) == {digest(ranks.one_process(how, 1).values)}
