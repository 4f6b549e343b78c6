"""What `offload doctor` has to say of the machine: memory, limits, processors.

Linux shows it as files. `root` is where they begin: a test lays out files of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from offload.cli.findings import Finding, read
from offload.config import format_bytes
from offload.machine import cgroup_free_bytes

MEMORY_LEAST_BYTES = 512 << 20
"""With less free memory not even the smallest model trains: torch alone takes half of it."""

MEMLOCK_LEAST_BYTES = 256 << 20
"""As much as all transfers of files under way may take at once."""

AIO_REQUESTS_LEAST = 256
"""Requests of Linux AIO that one engine may take."""

_CAP_IPC_LOCK = 14


def memory(root: Path, ranks: int = 1) -> Finding:
    """Free memory of the host against what its cgroup leaves."""
    sizes = dict(re.findall(r"(\w+):\s+(\d+) kB", read(root / "proc/meminfo") or ""))
    if "MemAvailable" not in sizes or "MemTotal" not in sizes:
        return Finding(
            "memory",
            "note",
            "this system does not say how much is free",
            "give --cpu-memory (and --device-memory without a GPU)",
        )
    total, free = (int(sizes[name]) << 10 for name in ("MemTotal", "MemAvailable"))
    told = f"{format_bytes(free)} free of {format_bytes(total)}"
    limit = cgroup_free_bytes(root / "sys/fs/cgroup", root / "proc/self/cgroup")
    if limit is not None and limit < free:
        told += f", of which the cgroup leaves {format_bytes(limit)}: budgets go by that"
    usable = (free if limit is None else min(free, limit)) // ranks
    if ranks > 1:
        told += f", shared by {ranks} ranks"
    if usable < MEMORY_LEAST_BYTES:
        tight = limit is not None and limit < free
        fix = "raise the container's memory limit" if tight else "end other programs"
        return Finding("memory", "stop", f"{told}: too little to train anything", fix)
    return Finding("memory", "ok", told)


def memlock(limit_bytes: int | None, root: Path, *, registers: bool) -> Finding:
    """Memory that this user may lock, None for no limit."""
    if limit_bytes is None:
        return Finding("memlock", "ok", "no limit")
    told = f"at most {format_bytes(limit_bytes)} may be locked"
    status = re.search(r"^CapEff:\s*([0-9a-f]+)", read(root / "proc/self/status") or "", re.M)
    if status and int(status[1], 16) >> _CAP_IPC_LOCK & 1:
        others = format_bytes(limit_bytes)
        return Finding("memlock", "ok", f"no limit for this user (CAP_IPC_LOCK; others: {others})")
    if limit_bytes >= MEMLOCK_LEAST_BYTES:
        return Finding("memlock", "ok", told)
    what = "io_uring cannot register buffers"
    if registers:
        what += ", nor can memory for the GPU be, where its driver goes by that"
    return Finding(
        "memlock",
        "note",
        f"{told}: {what}, and transfers cost more",
        "ulimit -l unlimited, where ulimit -Hl allows it; else root does it: memlock in "
        "/etc/security/limits.conf (docker --ulimit memlock=-1; LimitMEMLOCK=infinity of systemd)",
    )


def aio_requests(root: Path) -> Finding:
    """Requests of Linux AIO that are left of what the kernel allows all processes together."""
    most, used = (read(root / "proc/sys/fs" / name) for name in ("aio-max-nr", "aio-nr"))
    if most is None or used is None or not (most + used).isdigit():
        return Finding("aio-max-nr", "ok", "not shown here; only Linux AIO would need it")
    told = f"{used} of {most} requests of Linux AIO are taken"
    if int(most) - int(used) >= AIO_REQUESTS_LEAST:
        return Finding("aio-max-nr", "ok", told)
    return Finding("aio-max-nr", "note", f"{told}: a new file backend may get none", _RAISE_AIO)


_RAISE_AIO = "sysctl fs.aio-max-nr=1048576"


def huge_pages(root: Path) -> Finding:
    """Whether large stretches of memory may lie in huge pages."""
    text = read(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = re.search(r"\[(\w+)\]", text)
    if chosen is None:
        return Finding("huge pages", "ok", "this kernel does not show them")
    if chosen[1] != "never":
        return Finding("huge pages", "ok", f"transparent ones: {chosen[1]}, and we ask for them")
    return Finding(
        "huge pages",
        "note",
        "transparent ones are switched off: passes over large memory miss the TLB",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)",
    )


def numa(root: Path, allowed: Sequence[int]) -> Finding:
    """NUMA nodes, and whether this process may use the processors of all."""
    folder = root / "sys/devices/system/node"
    nodes = {}
    for node in sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        processors = _numbers(read(node / "cpulist") or "")
        if processors:
            nodes[int(node.name[4:])] = processors
    if len(nodes) < 2:
        return Finding("NUMA", "ok", "one node")
    used = [number for number, processors in nodes.items() if processors & set(allowed)]
    told = f"{len(nodes)} nodes of {', '.join(str(len(one)) for one in nodes.values())} processors"
    if len(used) < len(nodes):
        return Finding(
            "NUMA",
            "note",
            f"{told}; this process may run on node {', '.join(map(str, used))} only, and the "
            "memory of the others is slower to reach",
            "one rank per node (torchrun), or a wider affinity (taskset, --cpuset-cpus)",
        )
    if read(root / "proc/sys/kernel/numa_balancing") not in (None, "0"):
        told += "; the kernel moves pages between them while threads are bound"
        return Finding("NUMA", "note", told, "sysctl kernel.numa_balancing=0")
    return Finding("NUMA", "ok", f"{told}; the update's threads are bound to them in turn")


def governor(root: Path) -> Finding:
    """How the processors choose their clock."""
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    found = {read(path) or "unknown" for path in files}
    if not found:
        return Finding("CPU clock", "ok", "not ours to set (a virtual machine, or fixed)")
    slow = sorted(found & {"powersave", "conservative"})
    if not slow:
        return Finding("CPU clock", "ok", f"governor {', '.join(sorted(found))}")
    told = f"governor {', '.join(slow)}: the clock may stay low between updates"
    return Finding("CPU clock", "note", told, "cpupower frequency-set -g performance (as root)")


def processors(allowed: Sequence[int], online: int, quota: float | None) -> Finding:
    """Processors that this process may use."""
    told = f"{len(allowed)} of {online}" if len(allowed) < online else f"{online}"
    if quota is not None and quota < len(allowed):
        return Finding(
            "processors",
            "note",
            f"{told}, but its cgroup gives the time of {quota:g}: threads are stopped in turns",
            "raise the container's CPU limit (docker --cpus, Kubernetes resources.limits.cpu)",
        )
    if len(allowed) == 1 and online > 1:
        return Finding(
            "processors",
            "note",
            f"{told}: compute, updates and transfers take turns on one",
            "a wider affinity (taskset, docker --cpuset-cpus, Slurm --cpus-per-task)",
        )
    return Finding("processors", "ok", told)


def threads(environment: Mapping[str, str], cores: int, ranks: int = 1) -> list[Finding]:
    """Settings of OpenMP in the environment that take processors from where they are needed."""
    found = []
    share = max(1, cores // ranks)
    count = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if count.isdigit() and int(count) > share:
        told = f"OMP_NUM_THREADS={count} on {share} cores: threads wait for one another"
        found.append(Finding("OpenMP", "note", told, f"OMP_NUM_THREADS={share}, or unset it"))
    if count.isdigit() and 2 * int(count) <= share:
        told = f"OMP_NUM_THREADS={count} of {share} cores, as launchers set it: torch's own ops"
        found.append(
            Finding("OpenMP", "note", f"{told} are slow", f"OMP_NUM_THREADS={share}, or unset it")
        )
    for name, value in environment.items():
        told = f"{name}={value}"
        if name == "OMP_WAIT_POLICY" and value.lower() == "active":
            told += ": threads that wait spin on the processors of updates and transfers"
            found.append(Finding("OpenMP", "note", told, "unset it"))
        elif name in _BINDING and value.lower() not in ("", "false", "disabled", "none"):
            told += ": torch's threads keep to processors that others need too"
            found.append(Finding("OpenMP", "note", told, "unset it, and bind ranks with numactl"))
        elif name == "KMP_BLOCKTIME" and value not in ("", "0"):
            told += ": threads of Intel's OpenMP spin before they sleep"
            found.append(Finding("OpenMP", "note", told, "KMP_BLOCKTIME=0"))
    return found or [Finding("OpenMP", "ok", "nothing in the environment that hurts")]


_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def _numbers(text: str) -> set[int]:
    """The numbers of a list as Linux writes it: `0-3,8`."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found.update(range(int(first), int(last or first) + 1))
    return found
