"""What `offload doctor` has to say of directories for the nvme tier, and of the drives under them.

`root` is where the files of Linux begin: a test lays out files of its own.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aio.system import COPY_ON_WRITE, MEMORY_FILE_SYSTEMS
from offload.cli.findings import Finding, read
from offload.config import format_bytes

FREE_LEAST_BYTES = 1 << 30
"""The states of a model worth offloading take more."""

FREE_USED_BYTES = 128 << 20
"""With less not even what `offload train` trains by default has room there."""

NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "fuse.sshfs"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A file system in the tree of directories."""

    source: str
    """Its device, such as /dev/nvme0n1p1, or whatever stands for one."""
    at: str
    kind: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """What came of making a scratch file in a directory."""

    path: str
    asked: bool
    """The user named it; else we found it."""
    error: str = ""
    """Why there is no file, with what to try after the last semicolon; empty where there was."""
    direct: bool = False
    notice: str | None = None
    free_bytes: int = 0


def mounts(root: Path) -> list[Mount]:
    """All that is mounted."""
    found = []
    for line in (read(root / "proc/self/mounts") or "").splitlines():
        source, at, kind, *_ = (*line.split(" "), "", "", "")
        found.append(Mount(source=_plain(source), at=_plain(at), kind=kind))
    return found


def mount_of(path: str, mounted: Sequence[Mount]) -> Mount | None:
    """The file system that a directory is on; of several at one place the last hides the others."""
    absolute = Path(path).resolve()
    holding = [mount for mount in mounted if mount.at and absolute.is_relative_to(mount.at)]
    return max(reversed(holding), key=lambda mount: len(mount.at), default=None)


def candidates(mounted: Sequence[Mount]) -> list[str]:
    """Where each drive is mounted, once for each, in order; not what belongs to the system."""
    found: dict[str, str] = {}
    for mount in mounted:
        local = mount.source.startswith("/dev/") and not mount.source.startswith("/dev/loop")
        system = mount.at.startswith(("/boot", "/snap", "/etc/"))
        if local and not system and mount.source not in found:
            found[mount.source] = mount.at
    return list(found.values())


def drives(source: str, root: Path) -> list[str]:
    """The drives under a device: partitions, RAID and volume managers are seen through."""
    if not source.startswith("/dev/"):
        return []
    device = root / source.lstrip("/")
    name = os.path.basename(os.path.realpath(device) if device.is_symlink() else device)
    return _drives_of(name, root)


def _drives_of(name: str, root: Path) -> list[str]:
    block = root / "sys/class/block" / name
    below = sorted(path.name for path in (block / "slaves").glob("*"))
    if below:
        return [drive for one in below for drive in _drives_of(one, root)]
    if (block / "partition").exists():
        block = block.resolve().parent
    if not block.exists():
        return []
    model = " ".join((read(block / "device/model") or "").split())
    if not model:  # What a virtual one says of itself means nothing.
        return [f"a virtual drive {block.resolve().name}"]
    turning = read(block / "queue/rotational") == "1"
    return [f"{model} {block.resolve().name}{_HARD_DISK if turning else ''}"]


def directory(tried: Tried, mounted: Sequence[Mount], root: Path) -> Finding:
    """One directory: its file system, O_DIRECT, free space and drive."""
    subject = f"nvme {tried.path}"
    if tried.error:
        told, _, fix = tried.error.rpartition("; ")
        if tried.asked:
            return Finding(subject, "stop", told or tried.error, fix if told else _OTHER)
        if os.strerror(errno.ENOSPC) in told:
            return Finding(subject, "note", told, "free some space, or name another drive")
        mine = f"sudo install -d -o $USER {tried.path.rstrip('/')}/mine, and name that"
        return Finding(subject, "note", told or tried.error, mine)
    mount = mount_of(tried.path, mounted)
    kind = mount.kind if mount else "an unknown file system"
    under = drives(mount.source, root) if mount else []
    told = f"{kind}, {'O_DIRECT' if tried.direct else 'no O_DIRECT'}, "
    told += f"{format_bytes(tried.free_bytes)} free, "
    told += ", ".join(under) if under else "drive unknown"
    if tried.asked and tried.free_bytes < FREE_USED_BYTES:
        least = format_bytes(FREE_USED_BYTES)
        why = f"too little room: the least that offload train needs is {least}"
        return Finding(subject, "stop", f"{told}: {why}", "free some space")
    hurting = (
        (kind in MEMORY_FILE_SYSTEMS, "this is memory and no drive", _OTHER),
        (kind in NETWORK, "this is a network", _OTHER),
        (kind in COPY_ON_WRITE and tried.notice, "it copies on write", _OTHER),
        (not tried.direct, "transfers take memory of the page cache", _OTHER),
        (tried.free_bytes < FREE_LEAST_BYTES, "too little room", "free some space"),
        (_HARD_DISK in told, "updates from here will be slow", "give a directory on an SSD"),
    )
    if found := [(why, fix) for hurts, why, fix in hurting if hurts]:
        return Finding(
            subject, "note", f"{told}: {', and '.join(w for w, _ in found)}", found[0][1]
        )
    return Finding(subject, "ok", told)


_HARD_DISK = " (a hard disk)"
_OTHER = "give a directory on a local drive with ext4 or xfs"


def _plain(text: str) -> str:
    """A name as it is: blanks are written as octal numbers in the table of mounts."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
