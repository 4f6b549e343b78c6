"""Copies between CPU memory and a GPU: each way and both ways at once, by kind of CPU memory.

    PYTHONPATH=. python benchmarks/gpu/copies.py [--dry]

Registered memory (as the engine's arena is), with and without huge pages, beside memory of
cudaHostAlloc and pageable memory; what it costs to touch and to register it; and how long the host
takes to learn of an end, by a fence, for which it sleeps, and by an event, for which it spins. A
line is the median of `ROUNDS` rounds (`WAITS` of waits), in which all kinds take turns.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu.results import keep, synchronize, table, used_columns
from offload.runtime.device import Device, PinError, compute_device

ROUNDS, WAITS, BYTES = 5, 200, 1 << 30


@dataclass
class Memory:
    """Two buffers of one kind, to copy from and to copy to."""

    kind: str
    source: torch.Tensor
    target: torch.Tensor
    costs: dict[str, Any] = field(default_factory=dict)
    unpin: Callable[[], None] = lambda: None


def mapped(size: int, huge: bool) -> tuple[torch.Tensor, float]:
    """Memory with or without huge pages, and the seconds that touching it took."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    since = time.perf_counter()
    memory = torch.frombuffer(area, dtype=torch.uint8)
    memory[:: mmap.PAGESIZE].zero_()
    return memory, time.perf_counter() - since


def registered(device: Device, size: int, huge: bool) -> Memory:
    driver = device.driver
    (source, first), (target, second) = (mapped(size, huge) for _ in range(2))
    kind = f"registered, {'huge' if huge else '4 KiB'} pages"
    made = Memory(kind, source, target, {"touch_s": first + second})
    if driver is None:
        return made
    since = time.perf_counter()
    try:
        for tensor in (source, target):
            driver.pin(tensor.data_ptr(), size)
    except PinError as error:
        made.costs["note"] = str(error)
    made.costs["register_s"] = time.perf_counter() - since
    made.unpin = lambda: [driver.unpin(t.data_ptr()) for t in (source, target)] and None
    return made


def waits(device: Device, size: int) -> list[dict[str, Any]]:
    """What it takes to queue some work on the device and to wait for its end."""
    into, source = device.zeros(size), device.zeros(size)

    def event() -> Any:
        made = torch.Event(device.torch_device)
        made.record(torch.accelerator.current_stream(device.torch_device))
        return made

    kinds: dict[str, Callable[[], Any]] = {
        "fence": lambda: device.fence(device.stream()),
        "event": event,
    }
    times: dict[str, list[tuple[float, float]]] = {}
    for _ in range(WAITS if not device.is_host else 0):
        for kind, make in kinds.items():
            for count in (4096, size):
                since, spent = time.perf_counter(), time.thread_time()
                into[:count].copy_(source[:count])
                make().synchronize()
                took = time.perf_counter() - since, time.thread_time() - spent
                times.setdefault(f"{kind} after {count >> 10} KiB", []).append(took)
    medians = {row: map(statistics.median, zip(*found)) for row, found in times.items()}
    return [{"row": row, "us": 1e6 * us, "cpu_us": 1e6 * cpu} for row, (us, cpu) in medians.items()]


def rounds(device: Device, memories: list[Memory], size: int) -> list[dict[str, Any]]:
    up, down = device.zeros(size), device.zeros(size)
    times: dict[tuple[str, str], list[float]] = {}

    def one(into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source, non_blocking=True)
        device.drain()

    def with_own_stream() -> None:
        if not device.is_host:
            torch.accelerator.set_device_index(device.torch_device.index or 0)
            torch.accelerator.set_stream(torch.Stream(device.torch_device))

    with ThreadPoolExecutor(2, initializer=with_own_stream) as pool:
        # Each direction on a thread and a stream of its own, as the lanes are.
        for turn, memory in itertools.product(range(ROUNDS + 1), memories):
            there, back = (up, memory.source), (memory.target, down)
            for name, ways in (("h2d", [there]), ("d2h", [back]), ("both", [there, back])):
                synchronize()
                since = time.perf_counter()
                for done in [pool.submit(one, *way) for way in ways]:
                    done.result()
                if turn:
                    took = (time.perf_counter() - since) / len(ways)
                    times.setdefault((memory.kind, name), []).append(took)
    rows: dict[str, dict[str, Any]] = {m.kind: {"row": m.kind, **m.costs} for m in memories}
    for (kind, name), found in times.items():
        rows[kind][f"{name}_gb_s"] = size / statistics.median(found) / 1e9
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="with a few bytes, for a try")
    size = (16 << 20) if parser.parse_args().dry else BYTES
    device = compute_device()
    pinned = [torch.zeros(size, dtype=torch.uint8, pin_memory=not device.is_host) for _ in range(2)]
    memories = [
        registered(device, size, huge=True),
        registered(device, size, huge=False),
        Memory("cudaHostAlloc", *pinned),
        Memory("pageable", *(mapped(size, False)[0] for _ in range(2))),
    ]
    found = {"copies": rounds(device, memories, size)}
    for memory in memories:
        memory.unpin()
    found["waits"] = waits(device, min(size, 64 << 20))
    for stage, rows in found.items():
        for row in rows:
            keep(stage, row)
        print(table(rows, used_columns(rows)))


if __name__ == "__main__":
    main()
