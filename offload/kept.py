"""Small files that are kept between runs: where they are, and how one is written as a whole."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

_LOCK_SECONDS_MAX = 10.0


def in_cache(name: str) -> Path:
    """The file of that name in the user's cache.

    Raises:
        OSError: the user has none: neither a home directory nor XDG_CACHE_HOME.
    """
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        told = "this user has no home directory: set HOME or XDG_CACHE_HOME"
        raise FileNotFoundError(errno.ENOENT, told, f"~/.cache/offload/{name}") from None
    return Path(cache) / "offload" / name


@contextlib.contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """While entered, no other process is in here with the same file: to change it takes reading it.

    The lock is of its folder, as the file is replaced. Where there are none (some networks) it goes
    on without.

    Raises:
        OSError: the folder cannot be made, or another process has been at it for too long.
    """
    folder = Path(os.path.realpath(path)).parent
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(descriptor, str(path))
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: str) -> None:
    try:
        import fcntl
    except ImportError:
        return
    end = time.monotonic() + _LOCK_SECONDS_MAX
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= end:
                told = f"another process has had its folder locked for {_LOCK_SECONDS_MAX:g} s"
                raise OSError(error.errno, told, path) from None
            time.sleep(0.01)
        except OSError:
            return


def write_whole(path: Path, text: str) -> None:
    """Put `text` in the place of what was there: all of it or, after an error, none.

    A link stays, and what it leads to is replaced. What is no regular file (a device, a pipe) is
    written to as it stands: in its place would be a file.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, "utf-8")
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.fresh")
    try:
        fresh.write_text(text, "utf-8")
        fresh.replace(path)
    except OSError as error:
        error.filename = str(path)  # a full disk is told without any
        raise
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)


def sweep(path: Path) -> None:
    """Removes what writers of it that were killed have left beside it. For who is alone with it."""
    path = Path(os.path.realpath(path))
    fresh = re.compile(rf"\.{re.escape(path.name)}\.([0-9]{{1,9}})\.fresh")  # see `write_whole`
    with contextlib.suppress(OSError):
        for left in path.parent.iterdir():
            writer = fresh.fullmatch(left.name)
            if writer and not _runs(int(writer[1])):
                left.unlink()


def _runs(pid: int) -> bool:
    """Whether there is a process of that number, which may be another than there was."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return True
