"""Each placement really is where it says: bytes per lane, bytes on disk, and bytes that bite."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import torch

import offload
from offload.program.ops import Lane
from tests.training import ALL_PLACEMENTS, SAMPLED, TIERS, Run, attached

LAYERS, WIDTH, VOCABULARY = 5, 32, 50
BLOCK_BYTES = 4096
WEIGHT_SLOTS = 3

Placement = tuple[str, str, str]


def up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def unit_elements(*sizes: int) -> int:
    """Elements of a bf16 unit: each parameter padded to 1024, the unit to blocks."""
    return up(sum(up(size, 1024) for size in sizes), BLOCK_BYTES // 2)


BLOCK = unit_elements(WIDTH, WIDTH, 4 * WIDTH * WIDTH, 4 * WIDTH, 4 * WIDTH * WIDTH, WIDTH)
NORM = unit_elements(WIDTH, WIDTH)
EMBED = HEAD = unit_elements(VOCABULARY * WIDTH)

UNITS = [EMBED, *[BLOCK] * LAYERS, NORM, HEAD]
"""Elements per unit of `training.Net`; each is one chunk."""

WEIGHT = {"weight": 2, "gradient": 2, "state": 10}
"""Bytes per element: bf16, bf16, and a record of residue (2) and two fp32 moments."""


def total(kind: str) -> int:
    return sum(up(count * WEIGHT[kind], BLOCK_BYTES) for count in UNITS)


def hop(a: str, b: str) -> str:
    """The lane between neighbouring tiers."""
    if "nvme" in (a, b):
        return "disk"
    return "h2d" if b == "device" else "d2h"


def carry(lanes: Counter[str], disk: Counter[str], size: int, start: str, stop: str) -> None:
    """Book `size` bytes on every lane from one tier to another."""
    line = ["nvme", "cpu", "device"]
    at, end = line.index(start), line.index(stop)
    while at != end:
        after = at + (1 if end > at else -1)
        lane = hop(line[at], line[after])
        lanes[lane] += size
        if lane == "disk":
            disk["read" if line[at] == "nvme" else "written"] += size
        at = after


def expected(
    placement: Placement, micro_batches: int, clips: bool
) -> tuple[Counter[str], Counter[str]]:
    """Bytes per lane, and read from and written to disk, of one step."""
    weight, gradient, state = placement
    lanes: Counter[str] = Counter()
    disk: Counter[str] = Counter()
    if weight == "nvme":  # In CPU memory they are used at home.
        # The first forward fetches all. Blocks share three slots: the last three stay for the
        # backward, which fetches the others; the first three stay for the next forward. The
        # embedding, the norm and the head are of another size class, with a slot each.
        turns = 2 * micro_batches - 1
        fetched = total("weight") + turns * (LAYERS - WEIGHT_SLOTS) * 2 * BLOCK
        carry(lanes, disk, fetched, weight, "device")
    if gradient == "nvme":  # In CPU memory it is collected at home.
        size = total("gradient")
        carry(lanes, disk, size, "device", gradient)
        for _ in range(micro_batches - 1):
            carry(lanes, disk, size, "device", "cpu")
            lanes["cpu"] += 3 * size  # two operands read, one written
            carry(lanes, disk, size, gradient, "cpu")
            carry(lanes, disk, size, "cpu", gradient)
    if clips:
        if gradient == "nvme":
            carry(lanes, disk, total("gradient"), "nvme", "cpu")
        lanes["compute" if gradient == "device" else "cpu"] += total("gradient")
    site = "device" if state == "device" else "cpu"
    for kind, home, ways in (("gradient", gradient, 1), ("weight", weight, 2), ("state", state, 2)):
        if home == "nvme":  # On the host an update reaches what lies in memory.
            carry(lanes, disk, total(kind), "nvme", "cpu")
            carry(lanes, disk, total(kind) * (ways - 1), "cpu", "nvme")
    operands = total("gradient") + 2 * (total("weight") + total("state"))
    lanes["compute" if site == "device" else "cpu"] += operands
    return lanes, disk


def bytes_so_far(run: Run) -> tuple[Counter[str], Counter[str]]:
    lanes = Counter({lane.value: use.bytes for lane, use in run.engine.runner.stats.use.items()})
    store = run.engine.runner.store
    disk: Counter[str] = Counter()
    if store is not None:
        disk.update(read=store.chunks.bytes_read, written=store.chunks.bytes_written)
    return lanes, disk


def one_step(run: Run, micro_batches: int = 1) -> None:
    for _ in range(micro_batches):
        run.loss().backward()
    run.step()
    run.engine.settle()


def check_homes(run: Run, placement: Placement) -> None:
    """The plan's rows, the file and the arenas are of the size that the placement needs."""
    kinds = ("weight", "gradient", "state")
    on_disk = [kind for kind, tier in zip(kinds, placement) if tier == "nvme"]
    plan, store = run.engine.plan, run.engine.runner.store
    rows = {(row.kind, row.tier): (row.units, row.bytes) for row in plan.rows()}
    wanted = {(kind, tier): (len(UNITS), total(kind)) for kind, tier in zip(kinds, placement)}
    assert rows == wanted
    size = sum(map(total, on_disk))
    assert plan.taken_bytes("nvme") == size
    if store is None:
        assert not on_disk
    else:
        (file,) = store.volume.files
        found = os.fstat(file.fd)
        assert found.st_size == size
        # All of it is really there; the file system may count its own maps of the file too.
        assert size <= found.st_blocks * 512 <= size + 8 * BLOCK_BYTES
        # Gradients are not there yet.
        written = sum(total(kind) for kind in on_disk if kind != "gradient")
        assert (store.chunks.bytes_read, store.chunks.bytes_written) == (0, written)
    for tier in ("device", "cpu"):
        homes = {kind for kind, home in zip(kinds, placement) if home == tier}
        if plan.residents:
            homes -= {"weight", "gradient"}  # which lie where torch puts them
        least = sum(map(total, homes))
        assert run.engine.runner.memory.arenas[tier].tensor.nbytes >= least


SAME = [(tier, other, tier) for tier in TIERS for other in TIERS]


@pytest.mark.parametrize(
    ("placement", "clips"),
    [
        *((placement, False) for placement in SAMPLED),
        *((placement, True) for placement in SAME[::4]),
        *(pytest.param(one, False, marks=pytest.mark.slow) for one in ALL_PLACEMENTS),
        *(pytest.param(one, True, marks=pytest.mark.slow) for one in SAME),
    ],
)
def test_bytes_per_lane(placement: Placement, clips: bool, tmp_path: Path) -> None:
    with attached(placement, tmp_path, max_grad_norm=1.0 if clips else None) as run:
        check_homes(run, placement)
        for micro_batches in (2,) if clips else (1, 3):
            lanes, disk = bytes_so_far(run)
            one_step(run, micro_batches)
            lanes_after, disk_after = bytes_so_far(run)
            wanted = expected(placement, micro_batches, clips)
            assert (lanes_after - lanes, disk_after - disk) == wanted, micro_batches
        assert run.engine.report().misses == 0
        idle = {lane for lane in Lane if not lanes_after[lane.value]}
        if clips:
            idle.discard(Lane.CPU)  # where the norm is put together
        for lane in idle:
            assert run.engine.runner.stats.use[lane].operations == 0, lane


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_evaluation_moves_weights_and_nothing_else(micro_batches: int, tmp_path: Path) -> None:
    with attached(("nvme", "nvme", "nvme"), tmp_path) as run:
        one_step(run)
        lanes, disk = bytes_so_far(run)
        with torch.no_grad():
            for _ in range(micro_batches):
                run.loss()
        run.engine.settle()
        lanes_after, disk_after = bytes_so_far(run)
        # A second forward finds the embedding, the norm, the head and the third block at hand.
        fetched = total("weight") + (micro_batches - 1) * (LAYERS - 1) * 2 * BLOCK
        assert lanes_after - lanes == {"disk": fetched, "h2d": fetched}
        assert disk_after - disk == {"read": fetched}


def corrupt(run: Run, kind: str) -> None:
    """Flip a byte of every value of a kind, in the file."""
    store = run.engine.runner.store
    assert store is not None
    fd = os.open(f"/proc/self/fd/{store.volume.files[0].fd}", os.O_RDWR)
    try:
        at = 100
        for (of, _), sizes in run.engine.plan.file.items():
            if of == kind:
                (old,) = os.pread(fd, 1, at)
                os.pwrite(fd, bytes([old ^ 1]), at)
            at += sum(sizes)
        os.fsync(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("kind", ["weight", "gradient", "state"])
def test_what_is_on_disk_is_what_is_used(kind: str, tmp_path: Path) -> None:
    with attached(("nvme", "nvme", "nvme"), tmp_path) as run:
        one_step(run)
        if kind == "gradient":
            run.loss().backward()
            for unit in range(len(UNITS)):
                run.engine.runner.quiesce("gradient", unit)
        corrupt(run, kind)
        with pytest.raises(offload.EngineError, match="checksum mismatch") as caught:
            if kind != "gradient":
                run.loss().backward()
            run.step()
            run.engine.settle()
        assert isinstance(caught.value.__cause__, OSError)


def poison(run: Run, kind: str, tier: str, unit: int) -> None:
    """Write ones over a value, in the arena."""
    buffer = run.engine.plan.homes[kind, unit]  # type: ignore[index]
    assert buffer.tier == tier
    run.engine.runner.memory.arenas[tier].view(buffer).fill_(1)


@pytest.mark.parametrize("tier", ["device", "cpu"])
def test_what_is_in_the_arena_is_what_is_used(tier: str, tmp_path: Path) -> None:
    # No residents, whose memory is torch's: none has gradients in another dtype.
    states, dtype = ("cpu", "fp32") if tier == "device" else (tier, "param")
    with attached((tier, tier, states), tmp_path, gradient_dtype=dtype) as run:
        one_step(run)
        poison(run, "weight", tier, 1)
        poison(run, "state", states, 2)
        run.loss().backward()
        poison(run, "gradient", tier, 3)
        ones = torch.tensor([1] * 4, dtype=torch.uint8)
        gradient = run.model.blocks[2].up.weight.grad  # type: ignore[index,union-attr]
        assert gradient.unique().equal(ones[: 2 if tier == "cpu" else 4].view(gradient.dtype))
        weights = run.model.state_dict()
        assert weights["blocks.0.up.weight"].unique().equal(ones[:2].view(torch.bfloat16))
        assert weights["blocks.1.up.weight"].unique().numel() > 1
        slots = run.optimizer.state[run.model.blocks[1].up.weight]  # type: ignore
        assert slots["exp_avg"].unique().equal(ones.view(torch.float32))
