"""Backends by name, whether or not the package has native ones."""

from __future__ import annotations

import os
from typing import Any, Protocol

import aio
from aio.file import Backend
from aio.pool import Pool
from aio.system import IO

BACKEND_VARIABLE = "AIO_BACKEND"
"""Environment variable: the one backend to use."""

THREADS_MAX = 32

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
    limits = {"piece_bytes": piece_bytes, "inflight_bytes_max": inflight_bytes_max}
    if _open is None:
        return Pool(min(depth, THREADS_MAX), io, **limits)
    found: Opened = _open(name, depth=depth, io=io, **limits)
    return found


def usable() -> tuple[tuple[str, ...], dict[str, str]]:
    """Backends that run here, the preferred first, and why others do not, by name.

    `python` is among them only where nothing else is. `AIO_BACKEND` leaves the one it names.
    """
    probes = () if _probe is None else _probe()
    names = tuple(probe.name for probe in probes if probe.usable and probe.name != "python")
    forced = os.environ.get(BACKEND_VARIABLE)
    if forced in (*names, "python"):
        names = (forced,)
    return names or ("python",), {one.name: one.reason for one in probes if not one.usable}


def latencies_of(backend: Backend) -> tuple[int, ...]:
    """The histogram of a backend's operations, by powers of two of microseconds; () without."""
    counters: Any = getattr(backend, "counters", None)
    return () if counters is None else tuple(counters().latencies)
