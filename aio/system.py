"""The operating system's file calls behind one interface, so that tests can put faults there."""

from __future__ import annotations

import array
import ctypes
import errno
import os
import sys
from collections.abc import Sequence

if sys.platform == "linux":
    import fcntl

ALIGN_BYTES = 4096
"""What O_DIRECT asks of addresses, lengths and offsets where the kernel does not tell."""

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
"""File systems without a disk: O_DIRECT means nothing there, though some kernels accept it."""

COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs", "nilfs2"})
"""File systems that put every change in a new place, so that reserved space is not used again.

xfs does so only for blocks that two files share (reflink), which a file without a name never has.
"""

_FILE_SYSTEMS = {
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x958458F6: "hugetlbfs",
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs",
    0xCA451A4E: "bcachefs",
    0x3434: "nilfs2",
    0x794C7630: "overlayfs",
    0x6969: "nfs",
    0x65735546: "fuse",
}

_LIBC = ctypes.CDLL(None, use_errno=True)

_STATFS_BYTES = 512  # more than struct statfs on any platform; its first word is the type

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000  # since Linux 6.1
_STATX_WORDS = 64  # struct statx in words of 4 bytes; word 0 is the mask of what was filled in
_STATX_DIO_MEM_ALIGN, _STATX_DIO_OFFSET_ALIGN = 38, 39

_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS = 0x80086601, 0x40086602
_FS_NOCOW_FL = 0x00800000


class IO:
    """What a file needs of the system. Every method raises OSError with its errno on failure.

    None of them holds the GIL while it blocks. Tests put simulations in its place.
    """

    def open(self, path: str, flags: int, mode: int) -> int:
        """A file descriptor of `path`, not inherited across exec."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """Gives `fd` back."""
        os.close(fd)

    def unlink(self, path: str) -> None:
        """Removes the name `path`."""
        os.unlink(path)

    def set_direct(self, fd: int, direct: bool) -> None:
        """Turns O_DIRECT on or off. EINVAL where the file system has none."""
        if sys.platform != "linux":
            raise OSError(errno.EINVAL, "O_DIRECT exists on Linux only")
        flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))

    def truncate(self, fd: int, size: int) -> None:
        """Lets a file have `size` bytes."""
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Returns when all that was written to `fd` is on the drive."""
        os.fsync(fd)

    def file_system(self, fd: int) -> str:
        """The type of the file system under `fd`: `ext4`, `tmpfs`, or its number in hex."""
        if sys.platform != "linux":
            return "unknown"
        buffer = (ctypes.c_long * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_long)))()
        if _LIBC.fstatfs(ctypes.c_int(fd), buffer) != 0:
            return "unknown"
        kind = buffer[0] & 0xFFFFFFFF
        return _FILE_SYSTEMS.get(kind, hex(kind))

    def direct_alignment(self, fd: int) -> tuple[int, int] | None:
        """What O_DIRECT asks of addresses, and of offsets and lengths; (0, 0) where the file has
        no O_DIRECT, None where the system does not say. Never raises.

        From statx, which asks the drive under the file system.
        """
        call = getattr(_LIBC, "statx", None)
        if sys.platform != "linux" or call is None:
            return None
        found = (ctypes.c_uint32 * _STATX_WORDS)()
        mask = ctypes.c_uint(_STATX_DIOALIGN)
        if call(ctypes.c_int(fd), b"", ctypes.c_int(_AT_EMPTY_PATH), mask, found) != 0:
            return None
        if not found[0] & _STATX_DIOALIGN:
            return None
        return found[_STATX_DIO_MEM_ALIGN], found[_STATX_DIO_OFFSET_ALIGN]

    def write_in_place(self, fd: int) -> None:
        """Has an empty file overwritten in place on a copy-on-write file system (`chattr +C`)."""
        if sys.platform != "linux":
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        flags = array.array("l", [0])
        fcntl.ioctl(fd, _FS_IOC_GETFLAGS, flags)
        flags[0] |= _FS_NOCOW_FL
        fcntl.ioctl(fd, _FS_IOC_SETFLAGS, flags)

    def fallocate(self, fd: int, offset: int, count: int) -> None:
        """Reserves `count` bytes. EOPNOTSUPP where the file system cannot; never emulated.

        The plain call and not posix_fallocate, which writes a byte per block where the file
        system cannot reserve, and says nothing of it.
        """
        call = getattr(_LIBC, "fallocate", None)
        if sys.platform != "linux" or call is None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        result = call(ctypes.c_int(fd), 0, ctypes.c_int64(offset), ctypes.c_int64(count))
        if result != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def free_bytes(self, target: int | str) -> int | None:
        """Bytes free on the file system of a descriptor or path; None where it does not say.

        Counts what is kept for root only where this process is root.
        """
        try:
            found = os.statvfs(target)
        except OSError:
            return None
        if found.f_blocks == 0:  # network and user-space file systems that do not say
            return None
        blocks = found.f_bfree if os.geteuid() == 0 else found.f_bavail
        return blocks * found.f_frsize

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Reads into `views` from `offset`; the bytes read, fewer than asked at any time."""
        return os.preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Writes `views` at `offset`; the bytes written, fewer than asked at any time."""
        return os.pwritev(fd, views, offset)


def is_memory(directory: str) -> bool:
    """Whether files of a directory are in memory and on no drive."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        return IO().file_system(fd) in MEMORY_FILE_SYSTEMS
    finally:
        os.close(fd)
