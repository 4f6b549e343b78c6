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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offload.runtime.native import RUNNER_VARIABLE
from tests.device_build import build
from tests.paced import Paced, paced
from tests.paced_streams import Event, Stream

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tests" / "src" / "libcuda_stand_in.cpp"
KERNELS = sorted((ROOT / "cpu_adam" / "src").rglob("*.*"))

RECORD = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_size_t)
WAIT = ctypes.CFUNCTYPE(None, ctypes.c_uint64)
LATER = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_uint64)


@functools.cache
def kernels() -> Path:
    """The kernels of the device as a library, compiled once for all processes."""
    digest = hashlib.sha256(b"".join(one.read_bytes() for one in KERNELS)).hexdigest()[:12]
    return _once(ROOT / "build" / f"device_kernels-{digest}.so", partial(build, _compiler()))


def _compiler() -> str:
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    return compiler or pytest.skip("there is no compiler for the stand-in")


def _once(built: Path, make: Callable[[Path], object]) -> Path:
    if not built.exists():
        built.parent.mkdir(exist_ok=True)
        made = built.with_suffix(f".{os.getpid()}")
        make(made)
        made.replace(built)
    return built


@functools.cache
def library(*defines: str) -> Path:
    """The stand-in, compiled once for all processes; a test without a compiler is skipped."""
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread", *defines]
    digest = hashlib.sha256(SOURCE.read_bytes() + repr(flags).encode()).hexdigest()[:12]

    def make(into: Path) -> None:
        command = [_compiler(), *flags, str(SOURCE), "-o", str(into), "-ldl"]
        subprocess.run(command, check=True, timeout=120)

    return _once(ROOT / "build" / f"libcuda_stand_in-{digest}.so", make)


def controls(seed: int = 0, delay_us_max: int = 0) -> Any:
    """The calls of tests, after a reset to these delays."""
    found: Any = ctypes.CDLL(str(library()))
    gc.collect()  # Engines of before call it when they are collected.
    found.stand_in_failed.restype = ctypes.c_char_p
    found.stand_in_run.argtypes = [ctypes.c_uint64]
    found.stand_in_reset(seed, delay_us_max)
    found.stand_in_kernels(str(kernels()).encode())
    return found


class Driven(Paced):
    """The paced accelerator, whose copies native lanes make by the stand-in."""

    def __init__(self, calls: Any) -> None:
        """With the calls of tests."""
        super().__init__()
        self.calls = calls
        self._tokens: dict[int, Event] = {}
        self.waits = 0
        """Of the host for what the user's streams have to do."""
        self._by_handle: dict[int, Stream] = {}
        # As long as the library has them.
        self._hooks = RECORD(self._record), WAIT(self._wait), LATER(self._later)
        calls.stand_in_hooks(*self._hooks)

    def open(self, native: Any) -> Any:
        return native.open_cuda(str(library()), 0)

    def drain_all(self) -> None:
        super().drain_all()
        self.calls.stand_in_drain()

    def handle(self, stream: Any) -> int:
        self._by_handle[stream.number + 1] = stream
        return int(stream.number) + 1

    def _record(self, handle: int) -> int:
        token = len(self._tokens) + 1
        self._tokens[token] = Event(self.timeline, self._by_handle[handle])
        return token

    def _later(self, handle: int, token: int) -> None:
        with self.unordered(self._by_handle[handle]):
            self.timeline.queue("a driver's call", [], lambda: self.calls.stand_in_run(token))

    def _wait(self, token: int) -> None:
        self.pause()
        self.waits += 1
        self._tokens[token].synchronize()


@contextmanager
def driven(seed: int = 0, delay_us_max: int = 0) -> Iterator[Driven]:
    """Attach to such a device; its copies are late by up to so many microseconds, twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(RUNNER_VARIABLE, raising=False)
        device = Driven(controls(seed, delay_us_max))
        with paced(device):
            yield device
