"""CRC32C by every kernel against google_crc32c, on one thread: GB/s.

    PYTHONPATH=. python benchmarks/checksum.py

The median of rounds in which all take their turns, over buffers that lie in a core's cache, in the
shared one, and in memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import google_crc32c
import numpy as np
from rich.console import Console
from rich.table import Table

from cpu_adam import choice, crc32c

SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "256 MiB": 256 << 20}
ROUND_BYTES = 128 << 20
ROUNDS = 7


Way = tuple[str, Callable[[np.ndarray], int]]
"""The kernel that is in use, and the function."""


def seconds(way: Way, data: np.ndarray) -> float:
    kernel, run = way
    calls = max(1, min(2000, ROUND_BYTES // data.size))
    with choice.forced(kernel):
        start = time.perf_counter()
        for _ in range(calls):
            run(data)
        return (time.perf_counter() - start) / calls


def main() -> None:
    best = choice.kernel().name
    ways: dict[str, Way] = {name: (name, crc32c) for name in choice.available()}
    ways["google_crc32c"] = (best, google_crc32c.value)
    table = Table("GB/s", *SIZES)
    speeds: dict[str, list[str]] = {name: [] for name in ways}
    for size in SIZES.values():
        data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        rounds = [{name: seconds(way, data) for name, way in ways.items()} for _ in range(ROUNDS)]
        for name, found in speeds.items():
            found.append(f"{size / statistics.median(r[name] for r in rounds) / 1e9:.1f}")
    for name, found in speeds.items():
        table.add_row(name, *found)
    Console().print(table)


if __name__ == "__main__":
    main()
