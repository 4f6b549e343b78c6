"""Which backend serves: the first that works here, or the one that was asked for.

[Note: Order]
io_uring is the fastest and leaves the processor alone. Linux AIO is as fast with O_DIRECT, where
io_uring is switched off (containers, hardened kernels). Threads need nothing of the kernel. libaio
is for machines where the engine was not compiled, and `python` always works.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aio.file import Backend
from aio.system import ALIGN_BYTES, IO
from aio.threads import ThreadBackend

BACKEND_VARIABLE = "AIO_BACKEND"
"""Environment variable: name of the backend to use."""
BACKEND_NAMES = ("io_uring", "linux_aio", "threads", "libaio", "python")
"""Every backend there is, in order of preference."""
DEPTH, PIECE_BYTES = 16, 4 << 20
"""Pieces under way at once, and bytes of the longest, where nobody says otherwise. More keeps no
drive busier, and what waits in the engine instead goes on by turns, as reads and writes."""
THREADS_MAX = 32
"""Threads of the `python` backend, however great the depth."""

_KERNEL = Path("/proc/sys")


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a backend can be had here."""

    name: str
    """One of `BACKEND_NAMES`."""
    usable: bool
    reason: str
    """Why it is, or is not: one sentence for a person."""


def probe(depth: int = DEPTH) -> tuple[Probe, ...]:
    """Tries every backend with room for `depth` pieces under way, in order of preference.

    It takes some milliseconds; some 100 where the kernel is slow to take Linux AIO back.

    Raises:
        ValueError: no backend can have that many, or none at all.
    """
    return tuple(_probed(name, depth) for name in BACKEND_NAMES)


def open_backend(
    name: str | None = None,
    *,
    depth: int = DEPTH,
    piece_bytes: int = PIECE_BYTES,
    io: IO | None = None,
) -> Backend:
    """A backend: the one named, else that of `AIO_BACKEND`, else the first that works here.

    Args:
        name: one of `BACKEND_NAMES`.
        depth: pieces under way at once.
        piece_bytes: longest transfer of one call, a multiple of 4096.
        io: a simulation of the system's calls. Only `python` goes through it, and serves then.

    Raises:
        ValueError: there is none of that name, or it does not work here; an argument is out of
            its range.
        OSError: no descriptor is left (EMFILE, ENFILE), so that no file could be had either.
    """

    if io is not None and type(io) is not IO:
        threads = min(depth, THREADS_MAX)
        return ThreadBackend(threads, io, piece_bytes=piece_bytes)

    def opened(name: str) -> Backend:
        return _OPENERS[name](name, depth, piece_bytes)

    asked = name or os.environ.get(BACKEND_VARIABLE)
    if asked:
        if asked not in BACKEND_NAMES:
            raise ValueError(
                f"asked for the backend {asked!r}; found none of that name; likely a typing error; "
                f"try one of {', '.join(BACKEND_NAMES)}"
            )
        try:
            return opened(asked)
        except (ImportError, OSError) as error:
            raise ValueError(
                f"asked for the backend {asked!r}; found that it does not work here: "
                f"{_why(asked, error, depth)}; leave the choice to aio; `aio.probe()` says what "
                "works"
            ) from error
    for candidate in BACKEND_NAMES:
        try:
            return opened(candidate)
        except (ImportError, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise OSError(
                    error.errno,
                    f"asked for a backend of files; found for {candidate} that "
                    f"{_why(candidate, error, depth)}; likely files are opened and never closed",
                ) from error
    raise AssertionError("the python backend needs nothing")


def _open_native(name: str, depth: int, piece_bytes: int) -> Backend:
    from aio.native import NativeBackend

    return NativeBackend(name, depth, piece_bytes)


def _open_libaio(name: str, depth: int, piece_bytes: int) -> Backend:
    from aio.libaio import LibaioBackend

    return LibaioBackend(depth, piece_bytes)


def _open_python(name: str, depth: int, piece_bytes: int) -> Backend:
    threads = min(depth, THREADS_MAX)
    return ThreadBackend(threads, piece_bytes=piece_bytes)


_OPENERS: dict[str, Callable[[str, int, int], Backend]] = {
    "io_uring": _open_native,
    "linux_aio": _open_native,
    "threads": _open_native,
    "libaio": _open_libaio,
    "python": _open_python,
}


def _probed(name: str, depth: int) -> Probe:
    try:
        if name != "python":
            _OPENERS[name](name, depth, ALIGN_BYTES).close()
    except (ImportError, OSError) as error:
        return Probe(name, False, _why(name, error, depth))
    return Probe(name, True, "works here")


def _why(name: str, error: ImportError | OSError, depth: int) -> str:
    """Why a backend is not to be had, and what would help."""
    if isinstance(error, ImportError):
        if name == "libaio":
            return f"the package libaio of PyPI is missing ({error}): pip install libaio"
        return f"the engine was not compiled when this was installed ({error})"
    if name == "libaio" and "libaio.so" in str(error):
        return (
            f"the package libaio of PyPI is here, but not the system's library ({error}): install "
            "libaio1 (Debian 13, Ubuntu 24.04: libaio1t64), or libaio where packages are RPMs"
        )
    code = error.errno
    if name == "io_uring":
        setting = _setting("kernel/io_uring_disabled")
        if code in (errno.EPERM, errno.EACCES):
            if setting in ("1", "2"):
                return f"it is switched off: kernel.io_uring_disabled = {setting} (sysctl)"
            return "it is forbidden, likely by a seccomp filter, as containers have"
        if code == errno.ENOMEM:
            return "the kernel does not give the memory for its rings: see `ulimit -l`"
        if code == errno.EOPNOTSUPP:
            return "the kernel's io_uring is older than 5.11"
    if name == "linux_aio" and code == errno.EOPNOTSUPP:
        return "the kernel's Linux AIO is older than 4.18, which polls nothing"
    if code in (errno.EMFILE, errno.ENFILE):
        return f"no descriptor is left for it ({error}): raise `ulimit -n`, or close files"
    if code == errno.ENOSYS:
        return "the kernel has no such call, or a seccomp filter says so"
    if code == errno.EPERM:
        return "it is forbidden, likely by a seccomp filter, as containers have"
    if code == errno.EAGAIN and name in ("linux_aio", "libaio"):
        most, used = _setting("fs/aio-max-nr"), _setting("fs/aio-nr")
        return (
            f"fewer requests are left than the {depth + 1} it asks for of those that "
            f"fs.aio-max-nr allows ({used} of {most} are taken): raise it"
        )
    return str(error)


def _setting(name: str) -> str:
    try:
        return (_KERNEL / name).read_text().strip()
    except OSError:
        return "unknown"
