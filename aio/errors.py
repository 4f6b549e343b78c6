"""What a failed call means to a person: what was asked, what was found, why, and what to try."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aio.system import IO

_ADVICE = {
    errno.ENOSPC: (
        "the file system is full",
        "free some space, or give a directory on another drive",
    ),
    errno.EDQUOT: (
        "the disk quota of this user or project is used up",
        "free some space, raise the quota, or give a directory on another drive",
    ),
    errno.EFBIG: (
        "the file is larger than the file system or `ulimit -f` allows",
        "raise the limit, or spread over several directories",
    ),
    errno.EIO: (
        "the drive or its connection failed",
        "look at `dmesg` and the drive's health (`smartctl -a`), or use another drive",
    ),
    errno.ENOENT: (
        "the directory does not exist (not mounted, or misspelt)",
        "create or mount it first",
    ),
    errno.ENOTDIR: ("a part of the path is a file", "give a directory"),
    errno.EACCES: (
        "this user may not write there",
        "change its owner or mode, or give a directory of your own",
    ),
    errno.EPERM: (
        "this user may not write there",
        "change its owner or mode, or give a directory of your own",
    ),
    errno.EROFS: (
        "the file system is mounted read-only",
        "remount it writable, or give another directory",
    ),
    errno.EMFILE: ("too many files are open in this process", "raise `ulimit -n`"),
    errno.ENFILE: ("too many files are open on this machine", "raise `fs.file-max`"),
    errno.ENOMEM: ("the kernel has no memory left for the transfer", "lower the memory budgets"),
    errno.EINVAL: (
        "the file system refuses this alignment or size",
        "give a directory on another file system",
    ),
}

_NO_ADVICE = (
    "the file system or the drive refused the call",
    "look at `dmesg`, or give a directory on another drive",
)

SHORTENED = (
    "something else has changed it",
    "keep other programs, and other parts of this one, away from it",
)
"""Likely cause, and what to try, where a file ends too early."""

STOPPED = (
    "a seccomp filter came up since, or something closed descriptors that are not its own",
    "open a new backend, or try AIO_BACKEND=threads",
)
"""The same where the kernel no longer serves a backend."""

_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def os_error(
    code: int,
    asked: str,
    path: str,
    *,
    found: str | None = None,
    free: int | None = None,
    why: tuple[str, str] | None = None,
) -> OSError:
    """An OSError of errno `code` about `path` whose message has all four parts.

    Args:
        code: the errno; Python picks the subclass (FileNotFoundError and so on) by it. ETIMEDOUT
            becomes EIO.
        asked: what was asked, a noun phrase: `write of 4096 bytes at offset 0`.
        path: the file or directory.
        found: what was found; by default the system's text for `code`.
        free: bytes free on the file system, shown where space is what is missing.
        why: the likely cause and one thing to try, where more is known than `code` says.
    """
    found = os.strerror(code) if found is None else found
    if code == errno.ETIMEDOUT:  # Of a drive, with the same cause; no TimeoutError of a wait.
        code = errno.EIO
    if code in _OUT_OF_SPACE and free is not None:
        found += f" ({free:,} bytes are free)"
    cause, attempt = _ADVICE.get(code, _NO_ADVICE) if why is None else why
    return OSError(code, f"{asked} failed: {found}; likely {cause}; {attempt}", path)


@contextmanager
def naming(asked: str, path: str, io: IO | None = None) -> Iterator[None]:
    """What the system refuses in this context is told as `os_error` does: a `flush` of `path`. With
    `io` the bytes free there are told, too, where space is what is missing."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # Somebody's own words.
            raise
        free = None if io is None else io.free_bytes(path)
        raise os_error(error.errno, asked, path, free=free) from error
