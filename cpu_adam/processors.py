"""Where the update's threads run: how many, and on which processors.

Read from what Linux shows as files; on a system without them, from what Python knows. Pure but for
that reading: a test lays out files of its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

Place = tuple[int, tuple[int, ...]]
"""Of one thread: its NUMA node, and the processors that it is bound to (none: wherever)."""

THREADS_VARIABLE = "CPU_ADAM_THREADS"
"""Environment variable: number of threads of the update, the caller's included."""


THREADS_PER_PROCESSOR, THREADS_LEAST = 4, 64


def threads_most() -> int:
    """As many threads may be asked for: far more than are of use, and no more than start soon."""
    return max(THREADS_PER_PROCESSOR * (os.cpu_count() or 1), THREADS_LEAST)


def places(threads: int | None = None, root: Path = Path("/")) -> list[Place]:
    """A place for each of `threads` threads; by default one thread per core that we may use.

    Cores are counted within the process's affinity mask, two hardware threads of a core as one, and
    no more than the CPU quota of its cgroup. Threads are dealt to the NUMA nodes in turn and bound
    to them where there is more than one.
    """
    allowed = _affinity()
    if threads is None:
        threads = asked_threads() or _default_threads(allowed, root)
    nodes = [node for node in _nodes(root, allowed) if node]
    if len(nodes) < 2:
        return [(0, ())] * threads
    return [(k % len(nodes), nodes[k % len(nodes)]) for k in range(threads)]


def asked_threads() -> int | None:
    """What `CPU_ADAM_THREADS` asks for, or None. Raises ValueError where it is none."""
    text = os.environ.get(THREADS_VARIABLE)
    if text is None or text == "":
        return None
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


def _default_threads(allowed: tuple[int, ...], root: Path) -> int:
    cores = len({_core(root, processor) for processor in allowed})
    limit = processor_quota(root)
    return max(1, cores if limit is None else min(cores, math.ceil(limit)))


def _core(root: Path, processor: int) -> tuple[str, ...]:
    """What tells the core of a processor from others: two hardware threads of one share it."""
    topology = root / f"sys/devices/system/cpu/cpu{processor}/topology"
    package, core = (_read(topology / name) for name in ("physical_package_id", "core_id"))
    if package is None or core is None:
        return (str(processor),)
    die = _read(topology / "die_id") or ""
    return (package, die, core)


def _nodes(root: Path, allowed: Iterable[int]) -> list[tuple[int, ...]]:
    """The allowed processors of each NUMA node."""
    folder = root / "sys/devices/system/node"
    numbers = _ranges(_read(folder / "has_cpu") or "")
    lists = (_ranges(_read(folder / f"node{number}/cpulist") or "") for number in numbers)
    return [tuple(sorted(set(node) & set(allowed))) for node in lists]


def processor_quota(root: Path) -> float | None:
    """Processors' worth of time that the cgroups of this process allow, or None without a limit."""
    found = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            found.append(_least(root / "sys/fs/cgroup", path, _quota_v2))
        elif "cpu" in controllers.split(","):
            for mount in ("cpu", "cpu,cpuacct"):
                found.append(_least(root / "sys/fs/cgroup" / mount, path, _quota_v1))
    return min((quota for quota in found if quota is not None), default=None)


def _least(mount: Path, path: str, quota_of: Callable[[Path], float | None]) -> float | None:
    """The tightest quota of a cgroup and its parents. (In a container its own is the mount.)"""
    parts = [part for part in path.split("/") if part and part != ".."]
    folders = [mount.joinpath(*parts[:count]) for count in range(len(parts) + 1)]
    quotas = (quota_of(folder) for folder in folders)
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_v2(folder: Path) -> float | None:
    words = (_read(folder / "cpu.max") or "max").split()
    return None if words[0] == "max" else int(words[0]) / int(words[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if quota is None or period is None or int(quota) < 0:
        return None
    return int(quota) / int(period)


def _ranges(text: str) -> list[int]:
    """The numbers of a list as Linux writes it: `0-3,8`."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first:
            found.extend(range(int(first), int(last or first) + 1))
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
