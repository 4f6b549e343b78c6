"""Ranks on an accelerator with streams: by the paced one of the tests, where a lost wait shows.

All of it slow; `test_ranks.py` has one of the fast tier, with ranks that are there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.parallel.group import require_different
from tests.ranks import KINDS, WAYS, How, World, assert_as_one, same, way_of, world_of

pytest.importorskip("offload.runtime._runner", reason="not compiled here")
pytestmark = pytest.mark.slow


two = world_of(2)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(two: World, kind: str) -> None:
    how = How(kind, micro=2, config={"params": "cpu", "max_grad_norm": 0.5})
    assert_as_one(two.run("paced", 3, "train", how), how)


@pytest.mark.parametrize("shard", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_every_placement(two: World, way: tuple[str, str, str], shard: int, tmp_path: Path) -> None:
    how = way_of(way, shard, tmp_path)
    assert_as_one(two.run("paced", shard, "train", how), how)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("job", ["diverge", "clip", "touch"])
def test_what_ranks_do_beside_training(two: World, job: str, seed: int) -> None:
    how = How("unused" if job == "diverge" else "plain")
    assert same(two.run("paced", seed, job, how), two.run(job, how))


def test_ranks_of_nccl_on_one_device_are_refused() -> None:
    """Those of gloo may share one, as ranks do in this file."""
    require_different([("a", "GPU-0"), ("a", "GPU-1"), ("b", "GPU-0")])
    with pytest.raises(ValueError, match=r"found \[\('a', 'GPU-0'\).* of the number in LOCAL_RANK"):
        require_different([("a", "GPU-0"), ("b", "GPU-0"), ("a", "GPU-0")])


def test_collectives_that_are_late(two: World) -> None:
    for found in two.run("paced", 4, "late", How("tied", config={"params": "cpu"}), 10):
        assert len(set(found)) == 1
