"""Tensor parallelism: models of DTensors, alone and over rows of ranks, beside plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.ranks import How, Model, World, worlds_of
from tests.ranks_tensor import VOCABULARY, WIDTH, Found

pytestmark = pytest.mark.slow

KINDS = (("sequence", torch.float32), ("checkpointed", torch.bfloat16))
PLACEMENTS = {
    "cpu cpu cpu": KINDS,
    "device device device": KINDS,
    "device device cpu": KINDS[:1],
    "cpu device device": KINDS[1:],
    "nvme cpu cpu": KINDS[1:],
    "nvme nvme nvme": KINDS[:1],
}
"""Homes of weights, gradients and states, and what is trained there."""


worlds = worlds_of(2, 4, jobs="tests.ranks_tensor")


def config_of(placement: str, shard: int, directory: Path, **options: Any) -> dict[str, Any]:
    homes = dict(zip(("params", "gradients", "optimizer"), placement.split()))
    drive = {"nvme_path": str(directory)} if "nvme" in placement else {}
    return {**homes, **drive, "shard": shard, **options}


def assert_as_by_torch(ours: list[Found], plain: list[Found]) -> None:
    """Each rank has the losses, norms, weights and moments of its part, to the bit; but for the
    norm, which is added up in another order."""
    rows = len(ours) // 2
    for rank, (losses, norms, values) in enumerate(ours):
        wanted = plain[rank % 2]
        assert losses == wanted[0][rank // 2 :: rows]
        assert norms == ours[0][1]
        for norm, other in zip(norms, wanted[1], strict=True):
            assert norm == (other if other is None else pytest.approx(other, rel=1e-12))
        assert values.keys() == wanted[2].keys()
        for name, value in values.items():
            assert torch.equal(value, wanted[2][name].view_as(value)), name


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("placement", "kind", "dtype"),
    [(placement, *how) for placement, kinds in PLACEMENTS.items() for how in kinds],
)
def test_parts_of_a_model_train_as_by_torch(
    worlds: dict[int, World],
    placement: str,
    ranks: int,
    kind: str,
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    shard = 2 if "device" in placement else 3
    sleeps = "cpu" if placement == "device device device" else "never"
    config = config_of(placement, shard, tmp_path)
    how = How(kind, dtype, micro=2, steps=5, config=config, sleeps=sleeps)
    plain = worlds[2].run("train_by_torch", how, ranks // 2)
    assert_as_by_torch(worlds[ranks].run("train", how), plain)


@pytest.mark.parametrize("kind", ["plain", "sequence"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shard", [2, 3])
def test_the_norm_is_that_of_all_parts(
    worlds: dict[int, World], kind: str, ranks: int, shard: int, tmp_path: Path
) -> None:
    """What all ranks have counts once, a DTensor or not."""
    config = config_of("cpu cpu cpu", shard, tmp_path, max_grad_norm=0.5)
    how = How(kind, torch.float32, steps=5, config=config)
    plain = worlds[2].run("train_by_torch", how, ranks // 2)
    assert_as_by_torch(worlds[ranks].run("train", how), plain)


@pytest.mark.parametrize(
    ("kind", "norm"), [("sequence", None), ("sequence", 0.5), ("tied", None), ("compiled", None)]
)
def test_updates_inside_backward_have_the_same_bits(
    worlds: dict[int, World], kind: str, norm: float | None
) -> None:
    config = {"micro_batches": 2, "params": "cpu", "max_grad_norm": norm}
    how = How(kind, torch.float32, micro=2, steps=5, config=config)
    plain = worlds[2].run("train_by_torch", how, 1)
    assert_as_by_torch(worlds[2].run("train", how), plain)


def test_what_autograd_saves_of_a_dtensor_is_never_stale(worlds: dict[int, World]) -> None:
    for plain, ours in worlds[2].run("unseen", How(config={"params": "cpu"})):
        assert all(map(torch.equal, ours, plain))


@pytest.mark.parametrize("placement", ["cpu cpu cpu", "nvme nvme nvme"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_torch_clips_dtensors(
    worlds: dict[int, World], placement: str, ranks: int, tmp_path: Path
) -> None:
    how = How("sequence", torch.float32, config=config_of(placement, 3, tmp_path))
    ours = worlds[ranks].run("clip", how)
    assert all(norms == ours[0] for norms in ours)
    clipped = How("sequence", torch.float32, config={"max_grad_norm": 0.3}, steps=1)
    _, (norm,), _ = worlds[2].run("train_by_torch", clipped, ranks // 2)[0]
    assert ours[0][0] == pytest.approx(norm, rel=1e-6)
    assert ours[0][1::2] == pytest.approx([0.3] * 3, rel=1e-5)


@pytest.mark.parametrize("placement", ["cpu cpu cpu", "nvme nvme nvme"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_dtensor_at_rest_is_one_to_torch(
    worlds: dict[int, World], placement: str, ranks: int, tmp_path: Path
) -> None:
    how = How("sequence", config=config_of(placement, 3, tmp_path))
    for said in worlds[ranks].run("touch", how):
        for one in said:
            assert one.startswith("ShardError: ")
            assert "offload.gathered(model)" in one


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_distributed_checkpoints_go_on_with_another_number_of_rows(
    worlds: dict[int, World], dtype: torch.dtype, ranks: int, tmp_path: Path
) -> None:
    folder, micro = str(tmp_path), {2: 2, 4: 1}
    by = {n: How("sequence", dtype, n, config={"reduce": "sum"}) for n in (1, 2)}
    wanted = worlds[ranks].run("save", by[micro[ranks]], folder)
    for other, world in worlds.items():
        for rank, found in enumerate(world.run("load", by[micro[other]], folder)):
            for name, value in wanted[rank % 2].items():
                assert torch.equal(found[name], value), name
    plain = worlds[2].run("load_by_torch", by[1], folder)
    alone = {"model": Model("plain", WIDTH, VOCABULARY).to(dtype).state_dict()}
    dcp.load(alone, checkpoint_id=folder)
    parts = [one["head.weight"] for one in plain]
    assert torch.equal(alone["model"]["head.weight"], torch.cat(parts))
    saved = worlds[2].run("loaded_weights", by[1], folder)
    for one, other_one in zip(plain, saved, strict=True):
        assert all(torch.equal(one[name], other_one[name]) for name in one)


def test_what_does_not_go_together_is_refused_on_all_ranks(worlds: dict[int, World]) -> None:
    said = worlds[4].run("refused", How("sequence"))
    for one in said:
        assert "embed.weight is a DTensor; found no mesh" in one["no mesh"]
        assert 'in mesh["tp"] and mesh["dp"]' in one["its own mesh"]
        assert "the mesh has ranks [" in one["the world"]
        assert "blocks.0.up.weight is a DTensor placed (Partial(sum),)" in one["a sum"]
        assert "of 1 rows in dimension 0: too few for each of 2 ranks" in one["nothing"]
        assert "the same mesh of one dimension" in one["two dimensions"]
