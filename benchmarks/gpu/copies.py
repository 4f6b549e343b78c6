"""Copies between CPU memory and a GPU: each way and both ways at once, by kind of CPU memory.

    PYTHONPATH=. python benchmarks/gpu/copies.py [--dry]

Registered memory (as the engine's arena is), with and without huge pages, beside memory of
cudaHostAlloc and pageable memory; what it costs to touch and to register it; how long a fork of the
process takes beside it (a worker of a DataLoader), with the memory kept from children, as the arena
is, and not; and how long the host takes to learn of an end, by a fence, for which it sleeps, and by
an event, for which it spins. A line is the median of `ROUNDS` rounds (`WAITS` of waits), in which
all kinds take turns.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.results import accelerator, save, synchronize, table
from offload.runtime.device import Device, PinError, compute_device
from offload.runtime.memory import touch

ROUNDS, WAITS = 5, 200
ENDS = ("wait", "work", "us", "cpu_us")
FORKS = ("memory", "fork_s", "touch_after_s")
COLUMNS = ("memory", "h2d_gb_s", "d2h_gb_s", "both_gb_s", "touch_s", "register_s", "note")


@dataclass
class Memory:
    """Two buffers of one kind, to copy from and to copy to."""

    kind: str
    source: torch.Tensor
    target: torch.Tensor
    costs: dict[str, Any] = field(default_factory=dict)
    unpin: Callable[[], None] = lambda: None


def mapped(size: int, huge: bool, node: int | None) -> tuple[torch.Tensor, float]:
    """Memory with or without huge pages, and the seconds that touching it took."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    since = time.perf_counter()
    touch(np.frombuffer(area, dtype=np.uint8), node)
    return torch.frombuffer(area, dtype=torch.uint8), time.perf_counter() - since


def registered(device: Device, size: int, huge: bool) -> Memory:
    driver = device.driver
    node = driver.numa_node() if driver is not None else None
    (source, first), (target, second) = (mapped(size, huge, node) for _ in range(2))
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


def of_the_runtime(size: int) -> Memory:
    """Memory of torch's pinned allocator, which asks cudaHostAlloc for it."""
    pin = accelerator().type != "cpu"
    since = time.perf_counter()
    source, target = (torch.zeros(size, dtype=torch.uint8, pin_memory=pin) for _ in range(2))
    return Memory("cudaHostAlloc", source, target, {"register_s": time.perf_counter() - since})


def forks(device: Device, size: int) -> list[dict[str, Any]]:
    """What a fork takes beside registered memory, and then to write every page of that again."""
    rows = []
    for advice in ("MADV_DONTFORK", "MADV_DOFORK"):
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.madvise(mmap.MADV_HUGEPAGE)
        area.madvise(getattr(mmap, advice))
        memory = np.frombuffer(area, dtype=np.uint8)
        touch(memory)
        address = torch.frombuffer(area, dtype=torch.uint8).data_ptr()
        pinned = device.driver is not None
        try:
            if device.driver is not None:
                device.driver.pin(address, size)
        except PinError:
            pinned = False
        times: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            since = time.perf_counter()
            child = os.fork()
            if not child:
                os._exit(0)
            forked = time.perf_counter()
            memory[:: mmap.PAGESIZE] = 1
            times.append((forked - since, time.perf_counter() - forked))
            os.waitpid(child, 0)
        if pinned and device.driver is not None:
            device.driver.unpin(address)
        fork_s, touch_s = (statistics.median(column) for column in zip(*times))
        kind = f"{'registered' if pinned else 'pageable'}, {advice}"
        rows.append({"memory": kind, "fork_s": fork_s, "touch_after_s": touch_s})
    return rows


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
    works = {"4 KiB": 4096, f"{size >> 20} MiB": size}
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(WAITS if not device.is_host else 0):
        for kind, make in kinds.items():
            for work, count in works.items():
                since, spent = time.perf_counter(), time.thread_time()
                into[:count].copy_(source[:count])
                make().synchronize()
                took = time.perf_counter() - since, time.thread_time() - spent
                times.setdefault((kind, work), []).append(took)
    rows = []
    for (kind, work), found in times.items():
        us, cpu_us = (1e6 * statistics.median(column) for column in zip(*found))
        rows.append({"wait": kind, "work": work, "us": us, "cpu_us": cpu_us})
    return rows


def seconds(work: Callable[[], object]) -> float:
    synchronize()
    since = time.perf_counter()
    work()
    return time.perf_counter() - since


def rounds(device: Device, memories: list[Memory], size: int) -> list[dict[str, Any]]:
    up, down = device.zeros(size), device.zeros(size)
    times: dict[int, dict[str, list[float]]] = {
        i: {"h2d": [], "d2h": [], "both": []} for i in range(len(memories))
    }

    def one(into: torch.Tensor, source: torch.Tensor) -> None:
        device.copy(into, source)
        device.drain()

    with ThreadPoolExecutor(2) as pool:
        # Each direction on a thread and a stream of its own, as the lanes are.
        list(pool.map(lambda _: (device.enter(), time.sleep(0.05)), range(2)))
        for turn in range(ROUNDS + 1):
            for index, memory in enumerate(memories):

                def there(memory: Memory = memory) -> None:
                    pool.submit(one, up, memory.source).result()

                def back(memory: Memory = memory) -> None:
                    pool.submit(one, memory.target, down).result()

                def both(memory: Memory = memory) -> None:
                    first = pool.submit(one, up, memory.source)
                    second = pool.submit(one, memory.target, down)
                    first.result()
                    second.result()

                for name, work in (("h2d", there), ("d2h", back), ("both", both)):
                    took = seconds(work)
                    if turn:
                        times[index][name].append(took)
    rows = []
    for index, memory in enumerate(memories):
        row: dict[str, Any] = {"memory": memory.kind}
        for name, found in times[index].items():
            moved = size * (2 if name == "both" else 1)
            row[f"{name}_gb_s"] = moved / statistics.median(found) / 1e9
        rows.append({**row, **memory.costs})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="with a few bytes, for a try")
    size = (16 << 20) if parser.parse_args().dry else (4 << 30)
    device = compute_device()
    memories = [
        registered(device, size, huge=True),
        registered(device, size, huge=False),
        of_the_runtime(size),
        Memory("pageable", *(mapped(size, False, None)[0] for _ in range(2))),
    ]
    rows = rounds(device, memories, size)
    for memory in memories:
        memory.unpin()
    node = device.driver.numa_node() if device.driver is not None else None
    print(table(rows, COLUMNS))
    forked = forks(device, size)
    print(table(forked, FORKS))
    ends = waits(device, min(size, 64 << 20))
    print(table(ends, ENDS))
    print(f"kept in {save('copies', rows, bytes=size, numa_node=node, forks=forked, waits=ends)}")


if __name__ == "__main__":
    main()
