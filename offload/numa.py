"""Where CPU memory comes to lie: with the processor that touches it first."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

THREADS_MAX = 16
"""Threads that touch at once; the kernel clears pages no faster with more."""

PART_BYTES_LEAST = 64 << 20
"""Fewest bytes that are worth a thread."""

_NODES = Path("/sys/devices/system/node")


def processors(node: int | None) -> frozenset[int]:
    """Those of a NUMA node that this process may use; all that it may use for no node.

    Where the system does not tell, or none of the node's may be used: all, too.
    """
    allowed = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    if allowed is None:
        return frozenset(range(os.cpu_count() or 1))
    if node is None:
        return allowed
    try:
        listed = (_NODES / f"node{node}" / "cpulist").read_text()
        found = allowed & _numbers(listed)
    except (OSError, ValueError):
        return allowed
    return found or allowed


def _numbers(listed: str) -> frozenset[int]:
    """The numbers of a list such as `0-3,8,10-11`."""
    found: set[int] = set()
    for part in listed.split(","):
        if part.strip():
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def touch(memory: npt.NDArray[np.uint8], node: int | None = None) -> None:
    """Write a zero to every page of `memory`, by threads on the processors of `node`.

    Zero pages and pages never touched read as zero: nothing changes but that the memory is ours
    now, and lies there.
    """
    count = min(THREADS_MAX, len(processors(node)), memory.size // PART_BYTES_LEAST)
    if node is None and count <= 1:
        memory[:: mmap.PAGESIZE] = 0
        return
    pages = -(-memory.size // mmap.PAGESIZE)
    step = max(1, -(-pages // max(1, count))) * mmap.PAGESIZE
    parts = [memory[start : start + step] for start in range(0, memory.size, step)]
    threads = [
        threading.Thread(target=_touch_part, args=(part, node), name="offload-touch", daemon=True)
        for part in parts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _touch_part(part: npt.NDArray[np.uint8], node: int | None) -> None:
    if node is not None and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # Else it lies where it can.
            os.sched_setaffinity(0, processors(node))  # Of this thread alone.
    part[:: mmap.PAGESIZE] = 0
