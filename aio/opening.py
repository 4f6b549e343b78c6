"""Backends by name, whether or not the package has native ones."""

from __future__ import annotations

from typing import Any, Protocol

import aio
from aio.file import Backend
from aio.pool import Pool
from aio.system import IO

_open: Any = getattr(aio, "open_backend", None)
_probe: Any = getattr(aio, "probe", None)


class Opened(Backend, Protocol):
    """A backend that can be closed."""

    def close(self) -> None:
        """Finishes what is under way, then ends its threads."""


def open_backend(
    name: str, *, depth: int, piece_bytes: int, inflight_bytes_max: int, io: IO | None
) -> Opened:
    """A backend for `depth` pieces at once; a simulation (`io`) is always served by threads."""
    if io is not None or _open is None or name == "python":
        return Pool(depth, io, piece_bytes=piece_bytes, inflight_bytes_max=inflight_bytes_max)
    found: Opened = _open(
        name, depth=depth, piece_bytes=piece_bytes, inflight_bytes_max=inflight_bytes_max
    )
    return found


def usable() -> tuple[tuple[str, ...], dict[str, str]]:
    """Backends that run here, the preferred first, and why others do not, by name.

    `python` is among them only where nothing else is.
    """
    if _probe is None:
        return ("python",), {}
    probes = _probe()
    names = tuple(probe.name for probe in probes if probe.usable and probe.name != "python")
    return names or ("python",), {p.name: p.reason for p in probes if not p.usable}
