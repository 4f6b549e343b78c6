"""What the hardware gives: capacities in bytes and speeds of the lanes. `probe` reads this host.

Speeds of drives that `offload bench nvme` has measured are kept in a file of the user's and read
again by `probe`; everything else is as it is at that moment.
"""

from __future__ import annotations

import errno
import json
import math
import operator
import os
import re
import reprlib
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path

import psutil

from offload.disks import same_drive
from offload.kept import alone_with, in_cache, sweep, write_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine that need not exist.

    Capacities are what is free to us, in bytes. Speeds are bytes per second of the lane's own
    counting (see `program.Op.bytes`); they move the simulator and nothing else. The defaults are
    round figures of a workstation, not measurements.
    """

    device_bytes: int
    cpu_bytes: int
    nvme_bytes: int = 0
    nvme_shares: tuple[float, ...] = ()
    """By directory of the nvme tier, its share of all that is there; none: the same for each."""
    device_is_cpu: bool = False
    """The compute device is the CPU: device and cpu tier share one memory."""
    h2d_bytes_per_s: float = 20e9
    d2h_bytes_per_s: float = 20e9
    disk_read_bytes_per_s: float = 3e9
    disk_write_bytes_per_s: float = 2e9
    cpu_bytes_per_s: float = 10e9
    """Bytes of operands that adding and updating get through on the CPU."""
    compute_bytes_per_s: float = 100e9
    """The same for updates of states that live on the device."""
    op_seconds: float = 2e-4
    """Fixed cost of one op on any lane."""


def cgroup_free_bytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """What the memory cgroup of this process leaves free, or None without a limit.

    Reads the v2 files `memory.max` and `memory.current` of the process's own group and of every
    group above it (v1: `memory.limit_in_bytes`), and takes the tightest. Page cache that the group
    can drop counts as free.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    free: int | None = None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, used_name = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base = root / "memory"
            limit_name, used_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        for at in (group, *group.parents):
            if at != base and base not in at.parents:
                break
            left = _group_free_bytes(at, limit_name, used_name)
            if left is not None:
                free = left if free is None else min(free, left)
    return free


def _group_free_bytes(group: Path, limit_name: str, used_name: str) -> int | None:
    try:
        limit = (group / limit_name).read_text().strip()
        if limit == "max" or int(limit) >= 1 << 60:
            return None
        used = int((group / used_name).read_text())
    except (OSError, ValueError):
        return None
    try:
        lines = (group / "memory.stat").read_text().splitlines()
        stat = dict(line.split(maxsplit=1) for line in lines)
        # v1 counts the groups below only in the totals; v2 always does.
        droppable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        droppable = 0
    return max(0, int(limit) - used + droppable)


def host_free_bytes() -> int:
    """Host memory that can be taken without swapping, within the cgroup's limit."""
    available = int(psutil.virtual_memory().available)
    limited = cgroup_free_bytes()
    return available if limited is None else min(available, limited)


def nvme_free_bytes(
    paths: tuple[str, ...],
    shares: tuple[float, ...] = (),
    asked: str = "Config.nvme_path",
) -> int:
    """Free bytes for an ordinary user, striped over `paths` in such shares; 0 without a path.

    What is full first limits all of them. Paths on one file system share what is free on it.
    Stripes keep to shares that are not equal within a tenth only: a budget leaves that free.

    Args:
        shares: by path, of a sum of 1; none: the same for each.
        asked: what the paths were given as, for messages.

    Raises:
        OSError: a path is no directory on a disk where this user can write.
    """
    free: dict[int, int] = {}
    taken: dict[int, Fraction] = {}
    for path, share in zip(paths, _exactly(shares, len(paths))):
        free_bytes, system = _usable(path, asked)
        free[system] = free_bytes
        taken[system] = taken.get(system, Fraction(0)) + share
    return min((math.floor(free[system] / taken[system]) for system in free), default=0)


def _exactly(shares: tuple[float, ...], count: int) -> list[Fraction]:
    found = [Fraction(share) for share in shares] or [Fraction(1, max(1, count))] * count
    return [share / sum(found) for share in found]


def _usable(path: str, asked: str) -> tuple[int, int]:
    """Free bytes and file system of a directory for files, or an OSError that says why not."""
    try:
        stat = os.statvfs(path)
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if stat.f_blocks == 0:
            raise OSError(errno.ENODEV, "its file system holds no bytes")
        if not os.access(path, os.W_OK | os.X_OK):
            code = errno.EROFS if stat.f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(code, os.strerror(code))
        drive = os.stat(path).st_dev
    except OSError as error:
        advice = _advice(error, path)
        named = "nvme_path" in asked
        if named and path == os.curdir:
            asked = f"the working directory, which is {asked} where no other is given,"
        elif named:
            asked = f"{asked}={os.path.abspath(path)!r}"
        raise OSError(
            error.errno or errno.EIO,
            f"{asked} cannot be used: {error.strerror or error}; likely {advice[0]}; {advice[1]}",
            os.path.abspath(path),
        ) from None
    return stat.f_bavail * stat.f_frsize, drive


def _advice(error: OSError, path: str) -> tuple[str, str]:
    """The likely cause of an error with a directory, and one thing to try."""
    parts = path.replace(",", ":").split(":")
    if error.errno == errno.ENOENT and len(parts) > 1 and any(map(os.path.isdir, parts)):
        return "several are joined in one text", f"give each by itself: {' '.join(parts)}"
    return _ADVICE.get(error.errno or 0, ("the drive failed", "give another directory"))


_ADVICE = {
    errno.ENOENT: ("it is misspelt or not mounted", "create or mount it first"),
    errno.ENOTDIR: ("it is a file, or a part of it is", "give a directory"),
    errno.ENODEV: (
        "it is a view into the kernel (/proc, /sys) and not a disk",
        "give a directory on a local drive",
    ),
    errno.EACCES: ("this user may not write there", "give a directory of your own"),
    errno.EROFS: ("the file system is mounted read-only", "give a directory on another drive"),
}
"""What `_advice` says, by errno."""


def ranks_on_host() -> int:
    """Processes that share this host's memory: `LOCAL_WORLD_SIZE` of torchrun, else 1.

    Raises:
        ValueError: the variable holds no count.
    """
    given = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not re.fullmatch(r"0{0,9}[1-9][0-9]{0,8}", given, re.ASCII):
        raise ValueError(
            f"the environment has LOCAL_WORLD_SIZE={reprlib.repr(given)}, by which the ranks of "
            "this host share its memory: expected a whole number from 1, as torchrun sets it; "
            "likely a launcher or script set it; correct it, or unset it for one process"
        )
    return int(given)


def probe(paths: tuple[str, ...] = (), *, device_free_bytes: int | None = None) -> Machine:
    """The capacities of this host and what is known of its drives, each rank taking its share.

    Args:
        paths: directories of the nvme tier.
        device_free_bytes: free memory of the compute device, or None where that is the CPU.

    Raises:
        OSError: a path is no directory on a disk where this user can write.
        ValueError: `LOCAL_WORLD_SIZE` holds no count.
    """
    ranks = ranks_on_host()
    host = host_free_bytes() // ranks
    nvme_free_bytes(paths)  # refuses what is no directory on a disk
    speeds = measured_speeds(paths)
    shares = shares_of(speeds)
    found = Machine(
        device_bytes=host if device_free_bytes is None else device_free_bytes,
        cpu_bytes=host,
        nvme_bytes=nvme_free_bytes(paths, shares) // ranks,
        nvme_shares=shares,
        device_is_cpu=device_free_bytes is None,
    )
    equal = [1 / max(1, len(paths))] * len(paths)
    known = [(speed, share) for speed, share in zip(speeds, shares or equal) if speed]
    if not known:
        return found
    # A transfer is over when the last drive has moved its share.
    return replace(
        found,
        disk_read_bytes_per_s=min(s.read_bytes_per_s / share for s, share in known) / ranks,
        disk_write_bytes_per_s=min(s.write_bytes_per_s / share for s, share in known) / ranks,
    )


MACHINE_VARIABLE = "OFFLOAD_MACHINE"
"""Environment variable: the file of measured speeds, in place of the one in the user's cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveSpeed:
    """What `offload bench nvme` measured of the drive under a mount point."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    both_bytes_per_s: float
    """Reading and writing as much at once: both directions together."""
    backend: str
    """Of the setting that is best for both at once, as are the next two."""
    block_bytes: int
    depth: int
    """Blocks under way in each direction."""
    measured: str
    """When, in ISO 8601."""
    others_percent: int = 0
    """Of all processors' time, what other programs took then; 0 for too little to matter."""

    def __post_init__(self) -> None:
        rates = (self.read_bytes_per_s, self.write_bytes_per_s, self.both_bytes_per_s)
        if not all(0 < float(rate) < math.inf for rate in rates):
            raise ValueError(f"speeds of a drive must be positive and finite: {self}")
        if not 0 <= operator.index(self.others_percent) <= 100:
            raise ValueError(f"no share of the processors: {self.others_percent}%")
        block, depth = operator.index(self.block_bytes), operator.index(self.depth)
        if block % 4096 or not (0 < block <= 1 << 30 and 0 < depth <= 1024):
            raise ValueError(f"a drive cannot be asked like that: {self}")


def profile_path() -> Path:
    """The file of measured speeds: `OFFLOAD_MACHINE`, else `offload/machine.json` in the cache.

    Raises:
        OSError: this user has no cache.
    """
    if given := os.environ.get(MACHINE_VARIABLE):
        return Path(given)
    return in_cache("machine.json")


def saved_speeds() -> dict[str, DriveSpeed]:
    """By mount point, what has been measured; nothing where there is no file yet.

    Nothing, and a RuntimeWarning, where the file holds something else: what was measured only says
    how drives are asked and shared, so what can be done with it can be done without.
    """
    speeds, wrong = _kept()
    if wrong:
        warnings.warn(wrong, RuntimeWarning, stacklevel=2)
    return speeds


def unreadable_speeds() -> str | None:
    """What is wrong with the file of measured speeds; None where nothing is, or there is none."""
    return _kept()[1]


_NOT_OURS = (
    *(OSError, ValueError, TypeError, KeyError, AttributeError),
    *(ArithmeticError, RecursionError),
)
"""What reading something else as measured speeds may raise."""


def _kept() -> tuple[dict[str, DriveSpeed], str | None]:
    """By mount point what was measured, and what is wrong with the file."""
    try:
        kept = profile_path()
        if kept.exists() and not kept.is_file() and str(kept) != os.devnull:  # May never end.
            raise OSError(errno.EINVAL, "no regular file")
        text = kept.read_text("utf-8")
        drives = json.loads(text)["drives"] if text.strip() else {}
        return {str(mount): DriveSpeed(**found) for mount, found in drives.items()}, None
    except (FileNotFoundError, NotADirectoryError):
        return {}, None
    except _NOT_OURS as error:
        return {}, (
            f"asked {kept} for the measured speeds of drives; found none that can be read "
            f"({type(error).__name__}: {error}), so it is as if no drive had been measured; likely "
            "cause: it was cut off or edited, or is another program's; try: remove it, or set "
            f"{MACHINE_VARIABLE} to another, and measure with `offload bench nvme`"
        )


def measured_speeds(paths: Sequence[str]) -> tuple[DriveSpeed | None, ...]:
    """By directory what was measured of its drive, None where nothing was.

    Of several directories on one drive each has its part of what the drive does.
    """
    saved, drives = saved_speeds(), same_drive(paths)
    alone = [saved.get(mount_point(path)) for path in paths]
    found: list[DriveSpeed | None] = []
    for drive in drives:
        known = [speed for speed, other in zip(alone, drives) if speed and other == drive]
        slowest = min(known, key=lambda speed: speed.both_bytes_per_s, default=None)
        found.append(slowest and _part(slowest, drives.count(drive)))
    return tuple(found)


def shares_of(speeds: Sequence[DriveSpeed | None]) -> tuple[float, ...]:
    """By directory its share of all transfers, in proportion to what its drive reads and writes at
    once; none, which is the same for each, unless every drive was measured."""
    rates = [speed.both_bytes_per_s for speed in speeds if speed is not None]
    if len(rates) < max(1, len(speeds)):
        return ()
    return tuple(rate / sum(rates) for rate in rates)


def _part(speed: DriveSpeed, parts: int) -> DriveSpeed:
    return replace(
        speed,
        read_bytes_per_s=speed.read_bytes_per_s / parts,
        write_bytes_per_s=speed.write_bytes_per_s / parts,
        both_bytes_per_s=speed.both_bytes_per_s / parts,
    )


def save_speed(path: str, speed: DriveSpeed) -> Path:
    """Keeps what was measured of the drive under `path`, in place of what was known of it.

    Returns the file, which is replaced as a whole, and by one process after the other.

    Raises:
        OSError: it cannot be written, or holds something else, which is left as it is.
    """
    kept = profile_path()
    with alone_with(kept):
        drives, wrong = _kept()
        if wrong:
            raise FileExistsError(errno.EEXIST, "it holds something else", str(kept))
        sweep(kept)
        drives |= {mount_point(path): speed}
        content = {"version": 1, "drives": {mount: asdict(one) for mount, one in drives.items()}}
        write_whole(kept, json.dumps(content, indent=2) + "\n")
    return kept


def mount_point(path: str) -> str:
    """Where the file system of `path` is mounted."""
    found = Path(path).resolve()
    return str(next(at for at in (found, *found.parents) if at.is_mount() or at == at.parent))
