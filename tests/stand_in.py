"""A device for tests whose native lanes drive the stand-in for CUDA's library.

What torch computes runs in logical time on the paced accelerator of `paced`; what native lanes copy
runs in real time, on threads of `src/libcuda_stand_in.cpp`. The two meet in events: one that is
recorded on a stream of the user is the paced accelerator's, and who waits for it lets its clock
run.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offload.runtime.books import BOOKS_VARIABLE
from tests.paced import Paced, paced
from tests.paced_streams import Event, Stream

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tests" / "src" / "libcuda_stand_in.cpp"

RECORD = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_size_t)
WAIT = ctypes.CFUNCTYPE(None, ctypes.c_uint64)


@functools.cache
def library(*defines: str) -> Path:
    """The stand-in, compiled once for all processes; a test without a compiler is skipped."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("there is no compiler for the stand-in")
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread", *defines]
    digest = hashlib.sha256(SOURCE.read_bytes() + repr(flags).encode()).hexdigest()[:12]
    built = ROOT / "build" / f"libcuda_stand_in-{digest}.so"
    if not built.exists():
        built.parent.mkdir(exist_ok=True)
        made = built.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *flags, str(SOURCE), "-o", str(made)], check=True, timeout=120)
        made.replace(built)
    return built


def controls(seed: int = 0, delay_us_max: int = 0) -> Any:
    """The calls of tests, after a reset to these delays."""
    found: Any = ctypes.CDLL(str(library()))
    gc.collect()  # Engines of before call it when they are collected.
    found.stand_in_failed.restype = ctypes.c_char_p
    found.stand_in_reset(seed, delay_us_max)
    return found


class Driven(Paced):
    """The paced accelerator, whose copies native lanes make by the stand-in."""

    def __init__(self, calls: Any) -> None:
        """With the calls of tests."""
        super().__init__()
        self.calls = calls
        self._tokens: dict[int, Event] = {}
        self._by_handle: dict[int, Stream] = {}
        self._hooks = RECORD(self._record), WAIT(self._wait)  # As long as the library has them.
        calls.stand_in_hooks(*self._hooks)

    def open(self, native: Any) -> Any:
        return native.open_cuda(str(library()), 0)

    def drain_all(self) -> None:
        self.calls.stand_in_drain()

    def handle(self, stream: Any) -> int:
        self._by_handle[stream.number + 1] = stream
        return int(stream.number) + 1

    def _record(self, handle: int) -> int:
        token = len(self._tokens) + 1
        self._tokens[token] = Event(self.timeline, self._by_handle[handle])
        return token

    def _wait(self, token: int) -> None:
        self.pause()
        self._tokens[token].synchronize()


@contextmanager
def driven(seed: int = 0, delay_us_max: int = 0) -> Iterator[Driven]:
    """Attach to such a device; its copies are late by up to so many microseconds, twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(BOOKS_VARIABLE, raising=False)
        device = Driven(controls(seed, delay_us_max))
        with paced(device):
            yield device
