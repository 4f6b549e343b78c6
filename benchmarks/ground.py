"""The ground that the engine stands on: the reference update and the store, as ratios.

    PYTHONPATH=. python benchmarks/ground.py [DIRECTORY]

The update on one thread against a copy of the bytes that it must move; reads and writes of the
store against four threads of preadv and pwritev on the same file system, in turns.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from cpu_adam import FORMATS, AdamHyper, update, views
from offload.arena import host_tensor
from offload.records import ChunkSpec, ValueSpec, lay_out_file
from offload.store import Store

ELEMENTS = 1 << 22
FILE_BYTES = 128 << 20
PIECE_BYTES = 4 << 20
ROUNDS = 6


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def of_the_update(name: str) -> tuple[float, float]:
    """(parameters per second, speed as a share of copying the same bytes) in format `name`."""
    fmt = FORMATS[name]
    dtype = getattr(torch, fmt.weight_dtype)
    weight, gradient = torch.randn(2, ELEMENTS).to(dtype)
    record = host_tensor(fmt.record_bytes(ELEMENTS))
    slots = views(record, fmt, ELEMENTS)
    hyper = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)
    moved = gradient.nbytes + 2 * (weight.nbytes + record.numel())
    source, target = host_tensor(moved // 2), host_tensor(moved // 2)
    times = []
    for step in range(1, ROUNDS + 2):
        step_once = partial(update, weight, gradient, slots, hyper, step=step, format=fmt)
        times.append((seconds(step_once), seconds(lambda: target.copy_(source))))
    ours, copy = (statistics.median(column) for column in zip(*times[1:]))
    return ELEMENTS / ours, copy / ours


def of_the_store(directory: str) -> dict[str, tuple[float, float]]:
    """(bytes per second, share of the plain threads' speed) for reads and writes."""
    layout = lay_out_file([ValueSpec("weight", "unit", (ChunkSpec(FILE_BYTES, ()),))])
    buffer = host_tensor(FILE_BYTES)
    view = memoryview(buffer.numpy())
    offsets = range(0, FILE_BYTES, PIECE_BYTES)
    path = os.path.join(directory, "plain")
    found: dict[str, list[tuple[float, float]]] = {"read": [], "write": []}
    with Store(directory, layout) as store, ThreadPoolExecutor(4) as pool:
        plain = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.unlink(path)

        def each(call: Callable[[int, list[memoryview], int], int]) -> None:
            def one(offset: int) -> None:
                assert call(plain, [view[offset : offset + PIECE_BYTES]], offset) == PIECE_BYTES

            list(pool.map(one, offsets))

        for _ in range(ROUNDS + 1):
            mine = seconds(lambda: store.write("weight", "unit", buffer, step=0))
            found["write"].append((mine, seconds(lambda: each(os.pwritev))))
            mine = seconds(lambda: store.read("weight", "unit", buffer))
            found["read"].append((mine, seconds(lambda: each(os.preadv))))
        os.close(plain)
    medians = {
        name: [statistics.median(column) for column in zip(*pairs[1:])]
        for name, pairs in found.items()
    }
    return {name: (FILE_BYTES / mine, other / mine) for name, (mine, other) in medians.items()}


def main() -> None:
    torch.set_num_threads(1)
    table = Table(title=f"median of {ROUNDS} rounds, in turns")
    for column in ("what", "speed", "share of the plain way"):
        table.add_column(column, justify="right")
    for name in FORMATS:
        speed, share = of_the_update(name)
        table.add_row(f"update, {name}", f"{speed / 1e6:.0f} M parameters/s", f"{share:.2f}")
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else ".") as directory:
        for name, (speed, share) in of_the_store(directory).items():
            table.add_row(f"store, {name}", f"{speed / 1e9:.2f} GB/s", f"{share:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
