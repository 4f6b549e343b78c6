"""Small files that are kept between runs: where they are, and how one is written as a whole."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NO_HOME = Path("/nonexistent")
"""As Debian has it for users without one."""


def in_cache(name: str) -> Path:
    """The file of that name in the user's cache."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        cache = Path(given) if given else Path.home() / ".cache"
    except RuntimeError:  # This user has no home: nothing is found, and nothing can be kept.
        cache = _NO_HOME
    return cache / "offload" / name


def write_whole(path: Path, text: str) -> None:
    """Put `text` in the place of what was there: all of it or, after an error, none.

    A link stays one; what is no regular file, such as a pipe, is written to and not replaced.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_text(text, "utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, "utf-8")
        fresh.replace(path)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
