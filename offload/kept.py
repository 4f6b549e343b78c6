"""Small files that are kept between runs: where they are, and how one is written as a whole."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path


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
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, "utf-8")
        fresh.replace(path)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
