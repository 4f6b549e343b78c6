"""Training over several directories: the same bits, the budget over all, the drive that failed."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aio
import offload
from offload import attachment
from offload.planning.layout import FileLayout
from offload.planning.machine import DriveSpeed, Machine
from offload.planning.profile import BLOCK_BYTES
from offload.program.ops import Value
from offload.runtime.store import Store
from tests.drives import DriveIO
from tests.faults import aligned_tensor, nothing_leaks
from tests.simulated import MemoryIO, SimulatedIO
from tests.small import adamw, config, small
from tests.training import assert_same, attached, train, trained

EVERYTHING = ("nvme", "nvme", "nvme")

LAYOUT: FileLayout = {("weight", 0): [40 << 10, 12 << 10], ("state", 0): [72 << 10, 8 << 10]}


def folders(directory: Path, names: str = "abc") -> tuple[str, ...]:
    made = tuple(str(directory / name) for name in names)
    for one in made:
        os.mkdir(one)
    return made


@pytest.mark.parametrize("placement", [EVERYTHING, ("nvme", "cpu", "nvme")], ids="-".join)
def test_the_same_bits_over_several_drives(
    placement: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = train(placement, tmp_path)
    monkeypatch.setattr(attachment, "Store", partial(Store, unit_bytes=3 * BLOCK_BYTES))
    paths = folders(tmp_path)
    with attached(placement, paths) as run:
        assert_same(alone, trained(run))
        store = run.engine.runner.store
        assert store is not None
        sizes = [os.fstat(file.fd).st_size for file in store.volume.files]
        assert len(sizes) == 3
        assert max(sizes) - min(sizes) <= 3 * BLOCK_BYTES
        assert sum(sizes) == run.engine.plan.taken_bytes("nvme")  # what the budget was held to
        assert all(path in store.volume.path for path in paths)
    assert [os.listdir(path) for path in paths] == [[], [], []]


def test_the_budget_is_over_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What just fits on one drive just fits on three; a block less is refused for both."""
    monkeypatch.setattr(attachment, "Store", partial(Store, unit_bytes=BLOCK_BYTES))
    paths, free = folders(tmp_path), 1 << 30
    machine = Machine(device_bytes=free, cpu_bytes=free, nvme_bytes=free)
    with attached(EVERYTHING, tmp_path) as run:
        need = run.engine.plan.taken_bytes("nvme")
    with attached(EVERYTHING, paths, nvme_space=need) as run:
        store = run.engine.runner.store
        assert store is not None
        assert sum(file.bytes for file in store.volume.files) == need
    model = small()
    asked = config(EVERYTHING, tmp_path, nvme_space="4KiB")
    with pytest.raises(offload.BudgetError, match=r"Config\.nvme_space"):
        offload.attach(model, adamw(model), asked, machine=machine)


def test_values_lie_where_the_speeds_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment, "Store", partial(Store, unit_bytes=BLOCK_BYTES))
    free, shares = 1 << 30, (0.125, 0.625, 0.25)
    machine = Machine(device_bytes=free, cpu_bytes=free, nvme_bytes=free)
    monkeypatch.setattr(attachment, "measured_speeds", lambda _: measured(shares))
    model = small()
    asked = config(EVERYTHING, folders(tmp_path))
    _, optimizer = offload.attach(model, adamw(model), asked, machine=machine)
    store = optimizer.engine.runner.store
    size = sum(file.bytes for file in store.volume.files)
    found = [file.bytes / size for file in store.volume.files]
    assert found == pytest.approx(shares, abs=8 * BLOCK_BYTES / size)
    offload.detach(model)


@pytest.mark.parametrize("speeds", [(3e6, 1e6), (1e6, 6e6, 2e6)])
def test_drives_are_through_at_one_time(speeds: tuple[float, ...]) -> None:
    """On drives of known speeds, whose busy seconds are counted and not slept."""
    layout: FileLayout = {("state", 0): [16 << 20]}
    for weights in (speeds, ()):
        busy = [0.0] * len(speeds)

        def sleep(seconds: float, drive: int, busy: list[float] = busy) -> None:
            busy[drive] += seconds

        turns = iter(
            DriveIO(s, s, sleep=partial(sleep, drive=drive)) for drive, s in enumerate(speeds)
        )
        names = [f"/drive{n}" for n in range(len(speeds))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                aio, "open_backend", lambda *_, turns=turns, **__: aio.ThreadBackend(1, next(turns))
            )
            seen = measured(weights)
            with closing(Store(names, layout, "u", unit_bytes=64 << 10, speeds=seen)) as store:
                store.write(Value("state", 0), aligned_tensor(16 << 20, 1), 1)
        ideal = (16 << 20) / sum(speeds)
        if weights:
            assert max(busy) < 1.05 * ideal
        else:
            assert max(busy) > 1.3 * ideal  # what it is good for


def measured(rates: Sequence[float]) -> list[DriveSpeed]:
    return [
        DriveSpeed(
            read_bytes_per_s=rate, write_bytes_per_s=rate, both_bytes_per_s=rate, measured="now"
        )
        for rate in rates
    ]  # fmt: skip


class OneFull(MemoryIO):
    """Drives without limit, but for a directory that has a block left."""

    def __init__(self, full: str) -> None:
        super().__init__()
        self.full = full

    def free_bytes(self, target: int | str) -> int | None:
        """See IO.free_bytes."""
        return BLOCK_BYTES if target == self.full else None


@pytest.mark.parametrize("full", range(3))
def test_a_full_drive_among_others_is_named_and_leaves_nothing(
    full: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = folders(tmp_path)
    io = SimulatedIO(0, OneFull(paths[full]))
    monkeypatch.setattr(attachment, "Store", partial(Store, io=io, unit_bytes=BLOCK_BYTES))
    with nothing_leaks():
        model = small()
        with pytest.raises(OSError, match=re.escape(paths[full])) as caught:
            offload.attach(model, adamw(model), config(EVERYTHING, paths))
        assert caught.value.errno == errno.ENOSPC
    assert io.inner.files == {}  # type: ignore[attr-defined]
    assert io.calls == []


# -- the store ----------------------------------------------------------------------------------


def over(drives: int, layout: FileLayout, io: Any, unit_bytes: int = BLOCK_BYTES) -> Store:
    names = [f"/drive{n}" for n in range(drives)]
    return Store(names, layout, "a", io, unit_bytes=unit_bytes)


def test_a_flipped_bit_names_the_drives_of_its_chunk() -> None:
    io = MemoryIO()
    with closing(over(3, LAYOUT, io)) as store:
        sizes = LAYOUT["weight", 0]
        data = aligned_tensor(sum(sizes), 1)
        store.write(Value("weight", 0), data, 1)
        at = sizes[0]
        assert sizes[1] == 3 * BLOCK_BYTES
        file = store.volume.files[at // BLOCK_BYTES % 3]
        io.files[file.fd][at // BLOCK_BYTES // 3 * BLOCK_BYTES] ^= 1
        with pytest.raises(OSError, match=r"chunk 1 of weight of 'a'.*mismatch") as caught:
            store.read(Value("weight", 0), data)
        assert caught.value.filename == store.volume.path
    with closing(over(3, LAYOUT, io, unit_bytes=1 << 20)) as store:
        assert len(store.volume.files) == 1
        assert np.all([file.path.startswith("/drive0") for file in store.volume.files])
