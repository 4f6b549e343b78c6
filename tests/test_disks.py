"""Drives below directories, in trees like those of Linux."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload import disks
from offload.disks import disks_below, same_drive


class Tree:
    """A /sys and /proc of drives that are not there, and directories that lie on them."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.numbers: dict[str, int] = {}
        inner = os.stat

        def stat(path: str, *args: object, **kwargs: object) -> object:
            if str(path) in self.numbers:
                number = self.numbers[str(path)]
                return type("Found", (), {"st_dev": number, "st_rdev": number})
            return inner(path, *args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(disks.os, "stat", stat)
        (root / "sys/dev/block").mkdir(parents=True)
        (root / "proc/self").mkdir(parents=True)

    def block(self, number: str, place: str, *slaves: str, partition: bool = False) -> None:
        """A block device, where /sys has its directory."""
        made = self.root / "sys/devices" / place
        (made / "slaves").mkdir(parents=True)
        for slave in slaves:
            (made / "slaves" / Path(slave).name).symlink_to(self.root / "sys/devices" / slave)
        if partition:
            (made / "partition").write_text("1\n")
        (self.root / "sys/dev/block" / number).symlink_to(made)

    def directory(self, path: str, major: int, minor: int) -> None:
        self.numbers[path] = os.makedev(major, minor)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    made = Tree(tmp_path, monkeypatch)
    made.block("259:0", "pci/nvme0n1")
    made.block("259:1", "pci/nvme0n1/nvme0n1p1", partition=True)
    made.block("259:2", "pci/nvme0n1/nvme0n1p2", partition=True)
    made.block("259:3", "pci/nvme1n1")
    made.block("8:0", "pci/sda")
    made.block("253:0", "virtual/dm-0", "pci/nvme0n1/nvme0n1p2")
    made.block("9:0", "virtual/md0", "pci/nvme1n1", "pci/sda")
    made.block("253:1", "virtual/dm-1", "virtual/md0")
    for path, numbers in {
        "/whole": (259, 0), "/one": (259, 1), "/two": (259, 2), "/other": (259, 3),
        "/crypt": (253, 0), "/raid": (253, 1), "/sata": (8, 0), "/net": (0, 40), "/btrfs": (0, 41),
        "/dev/nvme0n1p1": (259, 1),
    }.items():  # fmt: skip
        made.directory(path, *numbers)
    (tmp_path / "proc/self/mountinfo").write_text(
        "1 0 0:40 / /net rw - nfs server:/x rw\n2 0 0:41 / /btrfs rw - btrfs /dev/nvme0n1p1 rw\n"
    )
    return made


def test_what_lies_below(tree: Tree) -> None:
    for path, expected in {
        "/whole": {"nvme0n1"}, "/one": {"nvme0n1"}, "/other": {"nvme1n1"}, "/crypt": {"nvme0n1"},
        "/raid": {"nvme1n1", "sda"}, "/net": {"0:40"}, "/btrfs": {"nvme0n1"},
    }.items():  # fmt: skip
        assert disks_below(path, tree.root) == expected


def test_what_has_a_drive_in_common(tree: Tree) -> None:
    paths = ("/other", "/one", "/net", "/crypt", "/sata", "/btrfs")
    assert same_drive(paths, tree.root) == (0, 1, 2, 1, 4, 1)
    assert same_drive((*paths, "/raid"), tree.root) == (0, 1, 2, 1, 0, 1, 0)  # joins two
    assert same_drive((), tree.root) == ()


def test_this_machine(tmp_path: Path) -> None:
    assert same_drive((tmp_path, tmp_path / "..")) == (0, 0)
    assert disks_below(tmp_path)
    with pytest.raises(FileNotFoundError):
        disks_below(tmp_path / "missing")
