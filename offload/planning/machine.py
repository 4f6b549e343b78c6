"""What the hardware gives: free bytes in each tier, and the speeds of the lanes. No torch.

[Note: What ranks share]
A machine is what one rank sees while all others do the same: memory, drives, NICs and PCIe that
several use are divided by them. A collective goes along two axes, inside a node and between nodes.
It takes as long as the slower axis for what a rank sends there, or as both, and a hop to each
neighbour in turn. What goes between nodes passes the device's PCIe beside the copies, in both
directions: where that is too slow for both, each has half of it, or the one what the other leaves.

`probe` reads this host. The speeds of drives that `offload bench nvme` saved are in a file of the
user's cache.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine, real or imagined.

    Capacities are free bytes. Speeds are bytes per second as each lane counts them (`Op.bytes`);
    only the simulator uses them. The defaults are round figures for a workstation, not measured.
    """

    device_bytes: int
    cpu_bytes: int
    nvme_bytes: int = 0
    device_is_cpu: bool = False
    """The CPU is the compute device, so the device and cpu tiers share one memory."""
    h2d_bytes_per_s: float = 20e9
    d2h_bytes_per_s: float = 20e9
    disk_read_bytes_per_s: float = 3e9
    disk_write_bytes_per_s: float = 2e9
    cpu_bytes_per_s: float = 10e9
    """Operands of sums and updates on the CPU."""
    compute_bytes_per_s: float = 100e9
    """Operands of updates of states that live on the device."""
    op_seconds: float = 2e-4
    """Fixed cost of one op on any lane."""
    nodes: int = 1
    """Hosts over which ranks are spread evenly, see [Note: What ranks share]."""
    link_bytes_per_s: float = 20e9
    """What a rank sends to others of its node."""
    nic_bytes_per_s: float = 10e9
    """What a rank sends to other nodes, all ranks of its node at once."""
    pcie_bytes_per_s: float = 0.0
    """In each direction, what copies and the NIC of a rank share; 0 if each has its own."""
    hop_seconds: float = 0.0
    """From one rank to the next in a collective."""
    nic_exchange: float = 1.0
    """Bytes between nodes for each of a gradient that is exchanged: 1 where a node sends its sum,
    the ranks of a node where each sends its own."""
    axes_in_turn: bool = False
    """Collectives go along one axis and then the other, as over a mesh of two dimensions; else
    along both at once."""

    def axes(self, sent: int, ranks: int, *, sums: bool) -> tuple[float, float]:
        """Bytes that a rank sends inside its node and to others in a collective in which it sends
        so many in all; `sums` if those are gradients to be summed."""
        between = sent * (self.nodes - 1) / max(1, ranks - 1)
        return sent - between, between * (self.nic_exchange if sums else 1.0)


def probe(paths: tuple[str, ...] = (), *, device_free_bytes: int | None = None) -> Machine:
    """This host: free bytes, divided by the ranks that share it.

    Args:
        paths: directories of the nvme tier.
        device_free_bytes: free memory of the compute device; None if that is the CPU.

    Raises:
        OSError: a path is not a writable directory on a disk.
        ValueError: `LOCAL_WORLD_SIZE` is not a count.
    """
    ranks = ranks_on_host()
    host = host_free_bytes() // ranks
    return Machine(
        device_bytes=host if device_free_bytes is None else device_free_bytes,
        cpu_bytes=host,
        nvme_bytes=nvme_free_bytes(paths, shares_of(measured_speeds(paths))) // ranks,
        device_is_cpu=device_free_bytes is None,
    )


def ranks_of_job() -> int:
    """Processes of the whole job: `WORLD_SIZE` as torchrun sets it; 1 where it is no count."""
    given = os.environ.get("WORLD_SIZE", "")
    return int(given) if given.isascii() and given.isdigit() and int(given) else 1


def ranks_on_host() -> int:
    """Processes that share this host's memory: `LOCAL_WORLD_SIZE` as torchrun sets it, else 1.
    Raises ValueError where the variable is not a count."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if given.isascii() and given.isdigit() and int(given) > 0:
        return int(given)
    raise ValueError(
        f"LOCAL_WORLD_SIZE={given!r} in the environment: expected the number of ranks on this host "
        "(torchrun sets it), a whole number from 1; correct it, or unset it for one process"
    )


def host_free_bytes() -> int:
    """Host memory that can be allocated without swapping, within the cgroup's limit."""
    available = int(psutil.virtual_memory().available)
    limited = cgroup_free_bytes()
    return available if limited is None else min(available, limited)


def cgroup_free_bytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Bytes that the cgroup limits (v1 or v2) of this process leave free, or None without a limit:
    by the tightest, of its own group and those above it. Droppable page cache counts as free."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    found: list[int | None] = []
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
            if at == base or base in at.parents:
                found.append(_group_free_bytes(at, limit_name, used_name))
    return min((free for free in found if free is not None), default=None)


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
        # v1 counts child groups only in `total_`; v2 always does.
        droppable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        droppable = 0
    return max(0, int(limit) - used + droppable)


def nvme_free_bytes(
    paths: tuple[str, ...],
    shares: tuple[float, ...] = (),
    asked: str = "Config.nvme_path",
) -> int:
    """Free bytes for a file striped over `paths` in some `shares`, by default equal ones: the path
    that fills first limits it, and paths on one file system share its free space. `asked` is the
    setting that they come from. Raises OSError where one is not a writable directory on a disk."""
    free: dict[int, int] = {}
    taken: dict[int, float] = {}
    equal = (1 / max(1, len(paths)),) * len(paths)
    for path, share in zip(paths, shares or equal):
        free_bytes, system = _usable(path, asked)
        free[system] = free_bytes
        taken[system] = taken.get(system, 0.0) + share
    return min((int(free[system] / taken[system]) for system in free), default=0)


def _usable(path: str, asked: str) -> tuple[int, int]:
    """Free bytes of a directory's file system, and its device number."""
    try:
        stat = os.statvfs(os.path.join(path, ""))  # The trailing slash refuses a file.
        if stat.f_blocks == 0:
            raise OSError(errno.ENODEV, "its file system is the kernel's, not a disk")
        if not os.access(path, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return stat.f_bavail * stat.f_frsize, os.stat(path).st_dev
    except OSError as error:
        full = os.path.abspath(path)
        setting = f"{asked}={full!r}" if "nvme_path" in asked else asked
        advice = "give an existing directory on a local drive that you may write to"
        told = f"{setting} cannot be used: {error.strerror}; {advice}"
        raise OSError(error.errno, told, full) from None


def mount_point(path: str) -> str:
    """The mount point of the file system of `path`."""
    found = Path(path).resolve()
    return str(next(at for at in (found, *found.parents) if at.is_mount() or at == at.parent))


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveSpeed:
    """What `offload bench nvme` measured at a mount point."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    both_bytes_per_s: float
    """The sum of both directions, reading and writing at once."""
    measured: str
    """When, in ISO 8601."""
    others_percent: int = 0
    """Share of all processors that other programs used meanwhile; 0 if negligible."""


def measured_speeds(paths: Sequence[str]) -> tuple[DriveSpeed | None, ...]:
    """What was measured of each directory's file system, whose speed of both directions those there
    share equally; or None. A file that cannot be read is as none, and gives a RuntimeWarning."""
    saved, wrong = saved_speeds()
    if wrong:
        warnings.warn(wrong, RuntimeWarning, stacklevel=2)
    mounts = [mount_point(path) for path in paths]
    found = zip(mounts, map(saved.get, mounts))
    return tuple(
        speed and replace(speed, both_bytes_per_s=speed.both_bytes_per_s / mounts.count(mount))
        for mount, speed in found
    )


def shares_of(speeds: Sequence[DriveSpeed | None]) -> tuple[float, ...]:
    """Each directory's share of all transfers, in proportion to `both_bytes_per_s`; equal ones
    unless every drive was measured."""
    rates = [speed.both_bytes_per_s if speed else 0.0 for speed in speeds]
    rates = rates if all(rates) else [1.0] * len(rates)
    return tuple(rate / sum(rates) for rate in rates)


def profile_path() -> Path:
    """The file of measured speeds: `OFFLOAD_MACHINE`, else `machine.json` in the user's cache."""
    given = os.environ.get("OFFLOAD_MACHINE")
    return Path(given) if given else cache_path("machine.json")


def saved_speeds() -> tuple[dict[str, DriveSpeed], str | None]:
    """Measured speeds by mount point, and what is wrong with the file of them, or None."""
    try:
        path = profile_path()
        text = path.read_text("utf-8")
        drives = json.loads(text)["drives"] if text.strip() else {}
        return {mount: DriveSpeed(**found) for mount, found in drives.items()}, None
    except (FileNotFoundError, NotADirectoryError):
        return {}, None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return {}, (
            f"{path} holds no measured speeds of drives that can be read ({type(error).__name__}: "
            f"{error}); likely it was edited, or belongs to another program; remove it, or set "
            "OFFLOAD_MACHINE to another file, and measure again with `offload bench nvme`"
        )


def save_speed(path: str, speed: DriveSpeed) -> Path:
    """Saves what was measured of the drive below `path`, and returns the file. Raises OSError where
    that cannot be written, or is another program's."""
    saved = profile_path()
    drives, wrong = saved_speeds()
    if wrong:
        raise FileExistsError(errno.EEXIST, "it holds something else", str(saved))
    drives[mount_point(path)] = speed
    content = {"version": 1, "drives": {mount: asdict(one) for mount, one in drives.items()}}
    replace_file(saved, json.dumps(content, indent=2) + "\n")
    return saved


def cache_path(name: str) -> Path:
    """The path of a file in the user's cache, `~/.cache/offload` or `$XDG_CACHE_HOME/offload`.
    Raises OSError where this user has neither a home directory nor XDG_CACHE_HOME."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        told = "this user has no home directory: set HOME or XDG_CACHE_HOME"
        raise FileNotFoundError(errno.ENOENT, told, f"~/.cache/offload/{name}") from None
    return Path(cache) / "offload" / name


def replace_file(path: Path, text: str) -> None:
    """Replaces a file's content atomically: after an OSError the old content is still there.
    Follows symbolic links. Writes to a device or pipe, such as /dev/null, directly."""
    if path.exists() and not path.is_file():
        path.write_text(text, "utf-8")
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.fresh")
    try:
        fresh.write_text(text, "utf-8")
        os.replace(fresh, path)
    except OSError as error:
        error.filename = str(path)  # Instead of the temporary name, or of none on a full disk.
        raise
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
