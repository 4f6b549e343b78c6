"""Compiled modules of another version than the Python beside them: as if they were not compiled.

An editable installation takes new Python with `git pull`, and new modules with `make` only.
"""

from __future__ import annotations

import warnings
from types import ModuleType

_told: list[bool] = []


def require_version(module: ModuleType, version: int) -> None:
    """Refuse a compiled module that is not of the version which its callers are written for.

    Raises:
        ImportError: it is not; that is warned of, too.
    """
    found = getattr(module, "VERSION", 0)
    if found == version:
        return
    _tell()
    raise ImportError(f"{module.__name__} is of version {found}, not {version}: run make")


def _tell() -> None:
    """Warn, of however many modules once."""
    if _told:
        return
    _told.append(True)
    warnings.warn(
        "asked for the compiled modules that belong to the Python files here; found others, of "
        "another version, which are not used, and all is slower; likely cause: the files are "
        "newer, as after git pull; try: make, or pip install -e . again",
        RuntimeWarning,
        stacklevel=3,
    )
