"""New files, their space reserved, O_DIRECT: unnamed ones, which leave nothing, and others."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from collections.abc import Callable, Sequence

from aio.errors import naming
from aio.file import Backend, File
from aio.system import ALIGN_BYTES, COPY_ON_WRITE, IO, MEMORY_FILE_SYSTEMS

_O_TMPFILE = getattr(os, "O_TMPFILE", 0)
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
_THERE = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_FILL_BYTES = 4 << 20


def create_scratch(directory: str | os.PathLike[str], bytes: int, backend: Backend) -> File:
    """A new unnamed file of `bytes` (rounded up to 4096), all of them reserved, mode 0600.

    It is O_TMPFILE where the file system has that, else created and unlinked at once: it is gone
    when the last descriptor is, however the process ends. O_DIRECT where there is a disk that
    takes it, aligned as the kernel asks; `File.direct` and `File.notice` tell. Copying on write is
    switched off for the file where it can be, else told.

    Reserved is not written: a first write is slower than an overwrite (0.5 to 0.75 of its speed on
    ext4). Where the file system cannot reserve, zeros are written instead (`File.filled`).

    Args:
        directory: where; any number of files and processes may share it.
        bytes: size of the file, positive.
        backend: what moves the bytes.

    Raises:
        OSError: the directory is missing, is none, or cannot be written; the space is not there
            (errno, path, bytes asked and free). Nothing is left behind.
        ValueError: `bytes` is not positive.
    """
    if bytes <= 0:
        raise ValueError(f"scratch file of {bytes} bytes: the size must be positive")
    return _create(os.path.abspath(os.fspath(directory)), None, bytes, backend)


def create_file(path: str | os.PathLike[str], bytes: int, backend: Backend) -> File:
    """A new file under a name that nobody has yet, else as `create_scratch` makes one.

    Raises:
        OSError: as there; EEXIST where there is such a name. Nothing is left behind.
    """
    folder, name = os.path.split(os.path.abspath(os.fspath(path)))
    return _create(folder, name, bytes, backend)


def open_file(path: str | os.PathLike[str], bytes: int, backend: Backend) -> File:
    """A file that `create_file` made, with what is in it.

    Raises:
        OSError: it is missing, of another size, or may not be written.
    """
    backend.check_process()
    io, path = backend.io, os.path.abspath(os.fspath(path))
    size = -(-bytes // ALIGN_BYTES) * ALIGN_BYTES
    with naming(asked_file(size, path), path):
        fd = io.open(path, _THERE, 0)
        try:
            if os.fstat(fd).st_size != size:
                raise OSError(errno.EIO, f"it has {os.fstat(fd).st_size} bytes")
            align, notice = turn_direct_on(io, fd, writing=False)
            notice = _join(path, None, notice, False)
        except BaseException:
            io.close(fd)
            raise
    return File(backend, fd, path, size, align is not None, notice, align or (1, 1))


def asked_file(bytes: int, name: str | None) -> str:
    """How errors call a file that is asked for; one without a name is scratch."""
    return f"{'scratch ' if name is None else ''}file of {bytes:,} bytes"


def _create(folder: str, name: str | None, bytes: int, backend: Backend) -> File:
    backend.check_process()
    size = -(-bytes // ALIGN_BYTES) * ALIGN_BYTES
    asked = asked_file(size, name)
    io, path = backend.io, os.path.join(folder, name or "(unnamed scratch file)")
    with naming(asked, folder, io):
        fd = _open_unnamed(io, folder) if name is None else io.open(path, _NEW, 0o600)
    try:
        with naming(asked, folder, io):
            copying = _write_in_place(io, fd)
            filled = _reserve(io, fd, size)
            align, notice = turn_direct_on(io, fd, writing=True)
        notice = _join(path if name else f"the scratch file in {folder}", copying, notice, filled)
        direct = align is not None
        file = File(backend, fd, path, size, direct, notice, align or (1, 1))
        file.filled = filled
        return file
    except BaseException:
        io.close(fd)
        if name is not None:
            io.unlink(path)
        raise


def _open_unnamed(io: IO, folder: str) -> int:
    if _O_TMPFILE:
        try:
            return io.open(folder, _O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
    name = os.path.join(folder, f".aio-{os.getpid()}-{secrets.token_hex(8)}")
    fd = io.open(name, _NEW, 0o600)
    try:
        io.unlink(name)
    except BaseException:
        io.close(fd)
        raise
    return fd


def _write_in_place(io: IO, fd: int) -> str | None:
    """What is to be said of a file system that copies on write, and does so for this file too."""
    kind = io.file_system(fd)
    if kind not in COPY_ON_WRITE:
        return None
    try:
        io.write_in_place(fd)
    except OSError:
        return (
            f"is on {kind}, which copies on write: every overwrite takes new space and scatters "
            "the file, so that transfers slow down and a nearly full drive may refuse them; "
            "give a directory on ext4 or xfs"
        )
    return None


def _reserve(io: IO, fd: int, size: int) -> bool:
    """Makes `size` bytes of the file really there. True where that took writing zeros."""
    free = io.free_bytes(fd)
    if free is not None and size > free:  # at once, instead of filling a shared drive first
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    while True:
        try:
            io.fallocate(fd, 0, size)
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
            break
        return False
    zeros, at = memoryview(bytes(_FILL_BYTES)), 0
    while at < size:
        at += _move(io.pwritev, fd, zeros[: size - at], at)
    return True


def _move(
    call: Callable[[int, Sequence[memoryview], int], int], fd: int, view: memoryview, offset: int
) -> int:
    while True:
        try:
            return call(fd, [view], offset)
        except (InterruptedError, BlockingIOError):
            continue


def turn_direct_on(io: IO, fd: int, *, writing: bool) -> tuple[tuple[int, int] | None, str | None]:
    """What O_DIRECT asks of addresses, and of offsets and lengths; where it is off, the reason.

    The system's word is not enough: tmpfs takes the flag and ignores it, and some file systems
    take the flag and refuse the transfer, so one block is written, or read, to see.
    """
    kind = io.file_system(fd)
    if kind in MEMORY_FILE_SYSTEMS:
        return None, (
            f"is on {kind}, which is memory and not a disk: what it holds takes memory; give a "
            "directory on a drive"
        )
    memory, offset = io.direct_alignment(fd) or (ALIGN_BYTES, ALIGN_BYTES)
    if not memory or not offset:
        return _buffered(f"is on {kind}, which has no O_DIRECT for this file")
    if ALIGN_BYTES % memory or ALIGN_BYTES % offset:
        return _buffered(
            f"is on a drive that takes O_DIRECT transfers at multiples of {max(memory, offset)} "
            f"bytes only, and what is stored here is laid out in blocks of {ALIGN_BYTES}"
        )
    try:
        io.set_direct(fd, True)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        return _buffered(f"is on {kind}, which has no O_DIRECT")
    try:
        with mmap.mmap(-1, ALIGN_BYTES) as block, memoryview(block) as view:
            _move(io.pwritev if writing else io.preadv, fd, view, 0)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        io.set_direct(fd, False)
        return _buffered(f"is on {kind}, which refuses O_DIRECT transfers of {ALIGN_BYTES} bytes")
    return (memory, offset), None


def _buffered(why: str) -> tuple[None, str]:
    return None, f"{why}: transfers are buffered and take memory of the page cache"


def _join(file: str, copying: str | None, notice: str | None, filled: bool) -> str | None:
    parts = [] if copying is None else [copying]
    if notice is not None:
        parts.append(notice)
    if filled:
        parts.append("is on a file system that cannot reserve space: zeros were written instead")
    return f"{file} {' and '.join(parts)}." if parts else None
