"""What `offload doctor` has to say: pure functions from what was seen to findings.

Nothing here imports torch: the doctor must be able to say that torch is what is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aio.backends import BACKEND_NAMES, BACKEND_VARIABLE, Probe
from aio.system import MEMORY_FILE_SYSTEMS
from offload.cli import in_flags
from offload.planning.machine import DriveSpeed
from offload.planning.tiers import format_bytes

Level = Literal["ok", "note", "stop"]
"""`ok`: as it should be. `note`: training starts, but slower or with less. `stop`: it cannot."""

TORCH_LEAST = (2, 11)
"""As pyproject.toml asks for."""

MEMORY_LEAST_BYTES = 512 << 20
"""With less free memory not even the smallest model trains: torch alone takes half of it."""

FREE_LEAST_BYTES, FREE_USED_BYTES = 1 << 30, 128 << 20
"""Space on a drive: the states of a model worth offloading take more; and the least that
`offload train` needs by default."""

NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "fuse.sshfs"})

_OTHER = "give a directory on a local drive with ext4 or xfs"
_BUILD = f"install g++, then run make in a checkout, or {sys.executable} -m pip install -v -e ."

_BACKEND_FIXES = {
    "io_uring": "allow io_uring (sysctl kernel.io_uring_disabled=0; in a container, a seccomp "
    "profile with io_uring_setup, io_uring_enter and io_uring_register)",
    "linux_aio": "allow io_setup and io_submit in the container's seccomp profile",
    "threads": "report this: threads ask nothing of the kernel",
    "libaio": "pip install libaio (from PyPI), which needs the system's library libaio too",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    level: Level
    found: str
    """What was seen, in a line."""
    fix: str = ""
    """One thing to do about it; empty where all is well."""


def ready(findings: Sequence[Finding]) -> bool:
    """Whether training can start."""
    return all(finding.level != "stop" for finding in findings)


def torch(version: str | None, error: str = "") -> Finding:
    """The installed torch; `version` is None where importing it raised `error`."""
    if version is None:
        told = f"cannot be imported: {error}"
        return Finding("torch", "stop", told, "pip install torch, then look again")
    numbers = [part for part in version.split("+")[0].split(".")[:2] if part.isdigit()]
    if tuple(map(int, numbers)) < TORCH_LEAST:
        least = ".".join(map(str, TORCH_LEAST))
        return Finding("torch", "stop", f"{version} is too old", f"pip install 'torch>={least}'")
    return Finding("torch", "ok", version)


def accelerator(
    in_use: str, built_for: str | None, error: str, root: Path, environment: Mapping[str, str]
) -> Finding:
    """The compute device, beside what the driver under `root` says there is: what torch uses in
    words, what it was built for (None: the CPU alone), and why it cannot use that."""
    if in_use:
        return Finding("accelerator", "ok", f"{in_use} (torch built for {built_for})")
    if not (root / "proc/driver/nvidia").is_dir():
        return Finding("accelerator", "ok", "none: the CPU is the compute device")
    if built_for is None:
        why = "torch was built for the CPU alone"
        fix = "install a build of torch for CUDA, as pytorch.org/get-started says"
    elif not environment.get("CUDA_VISIBLE_DEVICES", "0").strip(" -1"):
        why, fix = "CUDA_VISIBLE_DEVICES hides it", "unset CUDA_VISIBLE_DEVICES"
    else:
        why = f"torch ({built_for}) cannot use it: {error or 'no reason given'}"
        fix = "run nvidia-smi; update the driver, or install torch for the CUDA that it names"
    told = f"an NVIDIA GPU here, but {why}; the CPU computes instead"
    return Finding("accelerator", "note", told, fix)


def kernels(name: str, reason: str) -> Finding:
    """The update's kernel in use, and why it is this one."""
    if name != "python" or reason == "asked for":
        return Finding("update", "ok", f"the {name} kernel: {reason}")
    told = f"the Python reference, same bits but slow: {reason}"
    return Finding("update", "note", told, f"{_BUILD}, and read its errors")


def refused(subject: str, error: Exception, fix: str) -> Finding:
    """What raised where it was asked for: the first line, and the likely cause where it is told."""
    lines = in_flags(str(error)).splitlines() or [type(error).__name__]
    likely = [line.strip() for line in lines[1:] if line.startswith("likely ")]
    return Finding(subject, "stop", "; ".join([lines[0], *likely]), fix)


def file_backends(probes: Sequence[Probe], environment: Mapping[str, str]) -> Finding:
    """The backend that moves files to memory, and why the better ones do not."""
    usable = [probe.name for probe in probes if probe.usable]
    asked = environment.get(BACKEND_VARIABLE)
    if asked and asked not in usable:
        why = next((probe.reason for probe in probes if probe.name == asked), "")
        why = why if asked in BACKEND_NAMES else "there is none of that name"
        told = f"{BACKEND_VARIABLE}={asked}: {why}"
        return Finding("file I/O", "stop", told, f"unset {BACKEND_VARIABLE}")
    if asked:
        return Finding("file I/O", "ok", f"{asked}: {BACKEND_VARIABLE} asks for it")
    used, best = usable[0], probes[0]
    if best.usable:
        return Finding("file I/O", "ok", f"{used}: the best there is, and it works here")
    slower = "a little" if used in ("linux_aio", "threads") else "much"
    told = f"{used}, which costs {slower} more processor time than {best.name} ({best.reason})"
    fix = _BUILD if "was not compiled" in best.reason else _BACKEND_FIXES[best.name]
    return Finding("file I/O", "note", told, fix)


def speeds(kept: Mapping[str, DriveSpeed], wrong: str | None = None) -> Finding:
    """Measured speeds of drives by mount point; `wrong`: why they cannot be read."""
    if wrong:
        return Finding("speeds", "note", wrong, "remove that file, or OFFLOAD_MACHINE=FILE")
    each = [
        f"{mount} reads {speed.read_bytes_per_s / 1e9:.3g} GB/s and writes "
        f"{speed.write_bytes_per_s / 1e9:.3g}, measured {speed.measured.replace('T', ' ')}"
        for mount, speed in kept.items()
    ]
    return Finding("speeds", "ok", "; ".join(each) or "none yet: offload bench nvme measures them")


def memory(free_bytes: int, total_bytes: int, ranks: int = 1) -> Finding:
    """Host memory that can be taken, within the limit of the container, by all ranks here."""
    told = f"{format_bytes(free_bytes)} free of {format_bytes(total_bytes)}"
    told += f", shared by {ranks} ranks" * (ranks > 1)
    if free_bytes // ranks < MEMORY_LEAST_BYTES:
        fix = "end other programs, or raise the container's memory limit"
        return Finding("memory", "stop", f"{told}: too little to train anything", fix)
    return Finding("memory", "ok", told)


def processors(allowed: int, online: int, quota: float | None) -> Finding:
    """Processors that this process may use."""
    told = f"{allowed} of {online}" if allowed < online else f"{online}"
    if quota is not None and quota < allowed:
        told += f", but its cgroup gives the time of {quota:g}: threads are stopped in turns"
        fix = "raise the container's CPU limit (docker --cpus, Kubernetes resources.limits.cpu)"
        return Finding("processors", "note", told, fix)
    if allowed == 1 and online > 1:
        told += ": compute, updates and transfers take turns on one"
        fix = "a wider affinity (taskset, docker --cpuset-cpus, Slurm --cpus-per-task)"
        return Finding("processors", "note", told, fix)
    return Finding("processors", "ok", told)


def threads(environment: Mapping[str, str], cores: int, ranks: int = 1) -> Finding:
    """The number of OpenMP threads that the environment asks for."""
    share = max(1, cores // ranks)
    count = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    fix = f"OMP_NUM_THREADS={share}, or unset it"
    if count.isdigit() and int(count) > share:
        told = f"OMP_NUM_THREADS={count} on {share} cores: threads wait for one another"
        return Finding("OpenMP", "note", told, fix)
    if count.isdigit() and 2 * int(count) <= share:
        told = f"OMP_NUM_THREADS={count} of {share} cores, as launchers set it: torch's ops"
        return Finding("OpenMP", "note", f"{told} are slow", fix)
    return Finding("OpenMP", "ok", "nothing in the environment that hurts")


def directory(
    path: str,
    kind: str,
    free_bytes: int,
    mount: str,
    *,
    direct: bool,
    copies: bool,
    asked: bool,
) -> Finding:
    """One directory for the nvme tier: its kind of file system, O_DIRECT, free space, mount point;
    `copies`: whether it copies on write."""
    subject = f"nvme {path}"
    told = f"{kind} at {mount}, {'O_DIRECT' if direct else 'no O_DIRECT'}, "
    told += f"{format_bytes(free_bytes)} free"
    if asked and free_bytes < FREE_USED_BYTES:
        why = f"the least that offload train needs is {format_bytes(FREE_USED_BYTES)}"
        return Finding(subject, "stop", f"{told}: too little room: {why}", "free some space")
    hurting = (
        (kind in MEMORY_FILE_SYSTEMS, "this is memory and no drive", _OTHER),
        (kind in NETWORK, "this is a network", _OTHER),
        (copies, "it copies on write", _OTHER),
        (not direct, "transfers take memory of the page cache", _OTHER),
        (free_bytes < FREE_LEAST_BYTES, "too little room", "free some space"),
    )
    for hurts, why, fix in hurting:
        if hurts:
            return Finding(subject, "note", f"{told}: {why}", fix)
    return Finding(subject, "ok", told)


def unusable(path: str, error: str, asked: bool) -> Finding:
    """A directory where no file could be made; `error` has what to try after its last semicolon."""
    told, _, fix = error.rpartition("; ")
    level: Level = "stop" if asked else "note"
    return Finding(f"nvme {path}", level, told or error, fix if told else _OTHER)
