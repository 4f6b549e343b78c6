"""What `offload doctor` has to say of the software: pure functions from what was seen to findings.

What is seen of the machine is in `findings_host`. Nothing here imports torch: the doctor must be
able to say that torch is what is missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from aio.backends import BACKEND_NAMES, BACKEND_VARIABLE, Probe
from offload.cli import in_flags
from offload.machine import DriveSpeed

Level = Literal["ok", "note", "stop"]
"""`ok`: as it should be. `note`: training starts, but slower or with less. `stop`: it cannot."""

PYTHON_LEAST = (3, 10)
TORCH_LEAST = (2, 9)
"""As pyproject.toml asks for."""

PACKAGES = ("numpy", "safetensors")
"""What has to be there beside torch and what this command itself needs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    level: Level
    found: str
    """What was seen, in a line."""
    fix: str = ""
    """One thing to do about it; empty where all is well."""

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.level != "ok"), self
        assert "\n" not in self.found + self.fix, self


def ready(findings: Sequence[Finding]) -> bool:
    """Whether training can start."""
    return all(finding.level != "stop" for finding in findings)


def read(path: Path) -> str | None:
    """The text of a small file without its last newline; None where it cannot be read."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None


def python(version: tuple[int, int, int], platform: str) -> Finding:
    """The interpreter and the system under it."""
    shown = ".".join(map(str, version))
    if version < PYTHON_LEAST:
        least = ".".join(map(str, PYTHON_LEAST))
        return Finding("Python", "stop", f"{shown} is too old", f"install Python {least} or newer")
    if platform != "linux":
        told = f"{shown} on {platform}: only device and cpu memory are tiers here"
        return Finding("Python", "note", told, "use Linux for the nvme tier")
    return Finding("Python", "ok", f"{shown} on Linux")


def torch(version: str | None, error: str = "") -> Finding:
    """The installed torch; `version` is None where importing it raised `error`."""
    if version is None:
        return Finding(
            "torch", "stop", f"cannot be imported: {error}", "pip install torch, then look again"
        )
    least = ".".join(map(str, TORCH_LEAST))
    numbers = [part for part in version.split("+")[0].split(".")[:2] if part.isdigit()]
    if tuple(map(int, numbers)) < TORCH_LEAST:
        return Finding("torch", "stop", f"{version} is too old", f"pip install 'torch>={least}'")
    return Finding("torch", "ok", version)


def packages(missing: Sequence[str]) -> Finding:
    """The packages of `PACKAGES` that are not there."""
    if not missing:
        return Finding("packages", "ok", ", ".join(PACKAGES))
    told = f"missing: {', '.join(missing)}"
    return Finding("packages", "stop", told, f"pip install {' '.join(missing)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """What torch says of accelerators."""

    name: str | None
    """Of the one in use; None without."""
    free_bytes: int = 0
    built_for: str | None = None
    """What this torch was built for, such as `CUDA 12.8`; None for the CPU alone."""
    error: str = ""
    """Why torch cannot use what it was built for."""
    registers: bool = False
    """Whether there is a call that registers CPU memory with it."""


def accelerator(
    seen: Accelerator, root: Path, environment: Mapping[str, str], shown: Callable[[int], str]
) -> Finding:
    """The compute device, beside what the driver under `root` says there is."""
    driver = root / "proc/driver/nvidia"
    gpus = len(list((driver / "gpus").glob("*"))) if driver.is_dir() else 0
    if seen.name is not None:
        told = f"{seen.name}, {shown(seen.free_bytes)} free"
        return Finding("accelerator", "ok", f"{told} (torch built for {seen.built_for})")
    if not gpus and not driver.is_dir():
        return Finding("accelerator", "ok", "none: the CPU is the compute device")
    there = f"{gpus or 'an'} NVIDIA GPU{'s' if gpus > 1 else ''} here"
    if seen.built_for is None:
        return Finding(
            "accelerator",
            "note",
            f"{there}, but torch was built for the CPU alone, which computes instead",
            "install a build of torch for CUDA, as pytorch.org/get-started says",
        )
    hidden = environment.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not hidden.strip(" -1"):
        told = f"{there}, hidden by CUDA_VISIBLE_DEVICES={hidden!r}: the CPU computes instead"
        return Finding("accelerator", "note", told, "unset CUDA_VISIBLE_DEVICES")
    because = f": {seen.error}" if seen.error else ""
    return Finding(
        "accelerator",
        "note",
        f"{there}, but torch ({seen.built_for}) cannot use it{because}; the CPU computes instead",
        "run nvidia-smi; update the driver, or install torch for the CUDA version that it names",
    )


def kernels(name: str, reason: str, compiler: str | None) -> Finding:
    """The update's kernel in use, and why it is this one."""
    if name != "python" or reason == "asked for":
        return Finding("update", "ok", f"the {name} kernel: {reason}")
    fix = f"reinstall ({sys.executable} -m pip install -v -e . in a checkout)"
    fix = f"install g++, then run make in a checkout, or {fix}" if compiler is None else fix
    told = f"the Python reference, same bits but slow: {reason}"
    if compiler is not None:
        told += f"; {compiler} is here now"
    return Finding("update", "note", told, f"{fix}, and read its errors" if compiler else fix)


def refused(subject: str, error: Exception, fix: str) -> Finding:
    """What raised where it was asked for."""
    return Finding(subject, "stop", " ".join(str(error).split()), fix)


def untrained(error: Exception, paths: Sequence[str]) -> Finding:
    """Why a very small model took no step; `paths`: where its states were to be.

    Of budgets that are too small it tells which they are, in place of the table of all.
    """
    lines = in_flags(str(error)).splitlines() or [type(error).__name__]
    short = [line.split()[0] for line in lines if "<-- too small" in line]
    likely = next((line for line in lines if line.startswith("likely ")), "")
    if not short:
        fix = "take a step with offload train and OFFLOAD_TRACEBACK=1, which shows where it ends"
        return refused("a step", error, fix)
    fix = "end other programs, or give this one more memory"
    if "nvme" in short and paths:
        fix = f"free some space in {paths[0]}, or name a directory on another drive"
    told = f"{lines[0]}: too little of {' and '.join(short)}; {likely}"
    return Finding("a step", "stop", told, fix)


def file_backends(probes: Sequence[Probe], environment: Mapping[str, str]) -> list[Finding]:
    """The backend that moves files to memory, and why the better ones do not."""
    usable = [probe.name for probe in probes if probe.usable]
    asked = environment.get(BACKEND_VARIABLE)
    if asked and asked not in usable:
        there = asked in BACKEND_NAMES
        why = next((probe.reason for probe in probes if probe.name == asked), "")
        told = f"{BACKEND_VARIABLE}={asked}: " + (why if there else "there is none of that name")
        return [Finding("file I/O", "stop", told, f"unset {BACKEND_VARIABLE}")]
    used = asked or usable[0]
    better = [] if asked else list(probes[: [probe.name for probe in probes].index(used)])
    if not better:
        why = f"{BACKEND_VARIABLE} asks for it" if asked else "the best there is, and it works here"
        return [Finding("file I/O", "ok", f"{used}: {why}")]
    whose: dict[str, list[str]] = {}
    for probe in better:
        whose.setdefault(probe.reason, []).append(probe.name)
    reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in whose.items())
    compiled = any("was not compiled" in probe.reason for probe in better)
    fix = _BACKEND_FIXES["compiler" if compiled else better[0].name]
    slower = "a little" if used in ("linux_aio", "threads") else "much"
    shown = "libaio (the package of PyPI)" if used == "libaio" else used
    told = f"{shown}, which costs {slower} more processor time than {better[0].name} ({reasons})"
    return [Finding("file I/O", "note", told, fix)]


_BACKEND_FIXES = {
    "compiler": "install g++, then run make in a checkout, or reinstall (pip install -v shows "
    "what fails)",
    "io_uring": "allow io_uring (sysctl kernel.io_uring_disabled=0; in a container, a seccomp "
    "profile with io_uring_setup, io_uring_enter and io_uring_register)",
    "linux_aio": "allow io_setup and io_submit in the container's seccomp profile",
    "threads": "report this: threads ask nothing of the kernel",
    "libaio": "pip install libaio (from PyPI), which needs the system's library libaio too",
}


def kept_speeds(
    path: Path,
    writable: bool,
    wrong: str | None = None,
    speeds: Mapping[str, DriveSpeed] = MappingProxyType({}),
) -> Finding:
    """Where measured speeds of drives are kept, and what they are by mount point.

    Args:
        wrong: what is the matter with what is there.
    """
    if wrong:
        told, _, fix = wrong.partition("; try: ")
        return Finding("speeds", "note", told, fix)
    if writable:
        each = "; ".join(f"{mount} {_speed(speed)}" for mount, speed in speeds.items())
        told = f"{path}: {each or 'nothing measured yet'}"
        if not any(speed.others_percent for speed in speeds.values()):
            return Finding("speeds", "ok", told)
        fix = "measure again on a quiet machine with offload bench nvme, or remove that file"
        return Finding("speeds", "note", told, fix)
    told = f"{path} cannot be written: what `offload bench nvme` measures is not kept"
    return Finding("speeds", "note", told, "OFFLOAD_MACHINE=FILE, somewhere you can write")


def _speed(speed: DriveSpeed) -> str:
    read, write = speed.read_bytes_per_s / 1e9, speed.write_bytes_per_s / 1e9
    doubt = f" while others kept {speed.others_percent}% of the processors busy"
    return (
        f"reads {read:.3g} GB/s and writes {write:.3g}, measured {speed.measured.replace('T', ' ')}"
        + doubt * bool(speed.others_percent)
    )


def may_write(path: Path) -> bool:
    """Whether this user can make `path`, or replace it."""
    folder = next(at for at in path.parents if at.exists() or at == at.parent)
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
