"""Small files that are kept between runs: where they are, and how one is written as a whole."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def in_cache(name: str) -> Path:
    """The file of that name in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "offload" / name


def write_whole(path: Path, text: str) -> None:
    """Put `text` in the place of what was there: all of it or, after an error, none.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, "utf-8")
        fresh.replace(path)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
