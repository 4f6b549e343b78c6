"""Ours beside FSDP2, in bits: what several ranks train, and what one process trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import How, World, assert_as_one, joined, one_process

pytestmark = pytest.mark.slow

PLACES = {"params": "cpu", "gradients": "cpu", "optimizer": "cpu"}


def trained(ranks: int, how: How, directory: Path) -> tuple[dict[str, torch.Tensor], ...]:
    """The weights that ours and FSDP2 have trained; ours are those of one process."""
    world = World(ranks, directory)
    try:
        ours, peer = world.run("train", how), world.run("train_by_fsdp", how)
    finally:
        world.close()
    assert_as_one(ours, how)
    return joined(ours), peer[0]


@pytest.mark.parametrize("kind", ["plain", "tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shard", [2, 3])
def test_two_ranks_have_the_bits_of_fsdp2(
    kind: str, dtype: torch.dtype, shard: int, tmp_path: Path
) -> None:
    ours, peer = trained(2, How(kind, dtype, config={**PLACES, "shard": shard}), tmp_path)
    for name, value in peer.items():
        assert torch.equal(ours[name], value.view(-1)), name


def test_three_ranks_have_the_bits_of_one_process_and_fsdp2_has_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = How(dtype=torch.float32, config={**PLACES, "reduce": "sum"})
    ours, peer = trained(3, how, tmp_path)
    alone = one_process(how, 3).values
    differ, every = dict.fromkeys(("ours", "FSDP2"), 0), 0
    for name, value in peer.items():
        every += value.numel()
        for who, found in ("ours", ours[name]), ("FSDP2", value.view(-1)):
            differ[who] += int((found != alone[name][1]).sum())
    with capsys.disabled():
        print(f"\nof {every} weights of one process differ after 3 steps of 3 ranks: {differ}")
    assert differ["ours"] == 0


def test_the_benchmark_has_a_row_for_each_and_counts_what_is_sent() -> None:
    names = ["ours shard=3", "ours paced", "ours alone", "FSDP2", "DeepSpeed"]
    command = [sys.executable, "-m", "benchmarks.ranks", "--tiny", "--rounds", "1", "--only"]
    root = Path(__file__).parents[1]
    done = subprocess.run([*command, *names], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    for name in names:
        assert f"\n{name:15} " in f"\n{done.stdout}"
    assert "not installed: give --deepspeed PYTHON" in done.stdout
    assert "of FSDP2" in done.stdout
    assert "of the longest" in done.stdout
