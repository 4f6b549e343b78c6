"""How many threads the update uses: one per core that the process may use, shared by its ranks.

Read from what Linux shows as files; on a system without them, from what Python knows.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

THREADS_VARIABLE = "CPU_ADAM_THREADS"
"""Environment variable: number of threads of the update, the caller's included."""

THREADS_PER_PROCESSOR, THREADS_LEAST = 4, 64


def threads_most() -> int:
    """As many threads may be asked for: far more than are of use, and no more than start soon."""
    return max(THREADS_PER_PROCESSOR * (os.cpu_count() or 1), THREADS_LEAST)


LAUNCHING_MOST = 3
"""Cores that the update leaves, at most, to the threads that launch work on a device."""


def default_threads(root: Path = Path("/"), *, launching: bool = False) -> int:
    """What `CPU_ADAM_THREADS` asks for, else one thread per core of this rank's share.

    Cores are counted within the process's affinity mask, two hardware threads of a core as one, and
    no more than the CPU quota of its cgroup; the ranks of a host (`LOCAL_WORLD_SIZE`; one, where
    that is no count) divide them. Where threads are `launching` work on a device beside it, a
    quarter of them is left to these, three at most. Raises ValueError where `CPU_ADAM_THREADS` is
    no number.
    """
    text = os.environ.get(THREADS_VARIABLE)
    if not text:
        cores = len({_core(root, processor) for processor in _affinity()})
        quota = processor_quota(root)
        cores = cores if quota is None else min(cores, math.ceil(quota))
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
        share = max(1, cores // max(1, int(ranks) if ranks.isdecimal() else 1))
        return share - min(LAUNCHING_MOST, share // 4) * launching
    most = threads_most()
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
        raise ValueError(
            f"asked for the number of threads in {THREADS_VARIABLE}, from 1 to {most} on this "
            f"machine; found {text!r}; likely cause: a typing error where it is set; try: "
            f"{THREADS_VARIABLE}=4, or leave it unset"
        )
    return int(text)


def _affinity() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _core(root: Path, processor: int) -> str:
    """What tells the core of a processor from others: two hardware threads of one share it."""
    topology = root / f"sys/devices/system/cpu/cpu{processor}/topology"
    return _read(topology / "thread_siblings_list") or str(processor)


def processor_quota(root: Path) -> float | None:
    """Processors' worth of time that the cgroups of this process allow, or None without a limit.

    The tightest of its cgroup (v2) and the parents. (In a container its own is the mount.)
    """
    found = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, path = line.partition("0::")
        parts = [part for part in path.split("/") if part and part != ".."]
        for count in range(len(parts) + 1):
            folder = root.joinpath("sys/fs/cgroup", *parts[:count])
            words = (_read(folder / "cpu.max") or "max").split()
            if words[0] != "max":
                found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
