"""A durable run that saves takes no more memory in its last steps than in its first ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.runtime import stats
from tests.durable_runs import told_by
from tests.test_durable import CPU, NVME, durable
from tests.test_saving import buffered
from tests.training import RESIDENT, plain

STEPS, SAVE_EVERY, SETTLED = 2000, 40, 400
GROWS_BYTES_MAX = 4 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def trained(placement: Any, path: Path) -> None:
    """Train and save, telling how much is resident and how many descriptors are open."""
    stats.SPANS_MAX = stats.CALLS_MAX = stats.STEPS_MAX = 64  # Full before memory is looked at.
    with durable(placement, path, build=buffered) as run:
        run.engine.user_state = lambda: {"losses": run.losses[-1:]}
        for number in range(1, STEPS + 1):
            plain(run, number)
            run.losses.clear()
            if number % SAVE_EVERY == 0:
                offload.save(run.model, run.optimizer, path / "save")
                print(number, resident_bytes(), len(os.listdir("/proc/self/fd")), flush=True)


def counts(told: list[list[str]]) -> Iterator[tuple[int, int, int]]:
    for line in told:
        step, resident, descriptors = map(int, line)
        yield step, resident, descriptors


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no /proc")
@pytest.mark.parametrize("placement", [CPU, NVME, RESIDENT], ids=["cpu", "nvme", "device"])
def test_memory_is_flat_over_steps_and_saves(placement: Any, tmp_path: Path) -> None:
    found = [*counts(told_by(partial(trained, placement, tmp_path)))]
    assert len(found) == STEPS // SAVE_EVERY == 50
    (first, files), *_ = [(rss, fds) for step, rss, fds in found if step == SETTLED]
    print([rss >> 10 for _, rss, _ in found], "KiB")
    assert max(rss for step, rss, _ in found if step > SETTLED) < first + GROWS_BYTES_MAX
    assert {fds for step, _, fds in found if step >= SETTLED} == {files}
