"""Which drives lie below a directory, as Linux tells in /sys and /proc."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

SYSTEM = Path("/")
"""Where /sys and /proc are looked for."""


def disks_below(path: str | os.PathLike[str], system: Path | None = None) -> frozenset[str]:
    """Names of the drives that hold what is under a directory: {'nvme0n1'}, of a RAID several.

    Partitions, LVM, encryption and md are looked through. What is on no drive of this host (a
    network, memory, another system than Linux) has the number of its file system instead.

    Raises:
        OSError: there is no such path.
    """
    system = SYSTEM if system is None else system
    number = os.stat(path).st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    block = _block(system, name)
    if block is None:  # btrfs and the like have numbers of their own
        block = _block(system, _source(system, name))
    return frozenset({name} if block is None else _lowest(block))


def same_drive(
    paths: Sequence[str | os.PathLike[str]], system: Path | None = None
) -> tuple[int, ...]:
    """For each directory the place in the list of the first that has a drive in common with it.

    >>> same_drive(["/", "/"])
    (0, 0)
    """
    groups: list[tuple[set[int], set[str]]] = []
    for number, path in enumerate(paths):
        members, disks = {number}, set(disks_below(path, system))
        for group in [group for group in groups if group[1] & disks]:
            groups.remove(group)
            members |= group[0]
            disks |= group[1]
        groups.append((members, disks))
    first = {number: min(members) for members, _ in groups for number in members}
    return tuple(first[number] for number in range(len(paths)))


def _block(system: Path, number: str | None) -> Path | None:
    """The directory of a block device with such a number, where there is one."""
    if number is None:
        return None
    found = system / "sys/dev/block" / number
    return found.resolve() if found.exists() else None


def _source(system: Path, number: str) -> str | None:
    """The number of the device that a file system with such a number was mounted from."""
    try:
        lines = (system / "proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
        for line in lines:
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == number:
                found = os.stat(rest.split()[1]).st_rdev
                return f"{os.major(found)}:{os.minor(found)}"
    except (OSError, IndexError, ValueError):
        pass
    return None


def _lowest(block: Path) -> set[str]:
    """Names of the drives below a block device."""
    if (block / "partition").exists():
        block = block.parent
    slaves = block / "slaves"
    below = [one.resolve() for one in slaves.iterdir()] if slaves.is_dir() else []
    return {block.name}.union(*map(_lowest, below)) - ({block.name} if below else set())
