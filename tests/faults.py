"""Helpers for tests of files: aligned memory, what the process holds, the n-th call failing."""

import contextlib
import gc
import mmap
import os
import threading
import time

import numpy as np
import torch

import aio
from tests.simulated import MemoryIO


def aligned(count: int, fill: bytes | None = None) -> np.ndarray:
    """`count` bytes of page-aligned memory, zero or filled with `fill`."""
    memory = mmap.mmap(-1, max(count, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, dtype=np.uint8, count=count)
    if fill is not None:
        array[:] = np.frombuffer(fill, dtype=np.uint8)
    return array


def aligned_tensor(count: int, seed: int | None = None) -> torch.Tensor:
    """`count` bytes of page-aligned memory as a tensor, zero or random by `seed`."""
    array = aligned(count)
    if seed is not None:
        array[:] = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    return torch.from_numpy(array)


def scratch(pool, size=1 << 20, directory="/simulated"):
    """A scratch file; in a directory that only simulated systems have."""
    return aio.create_scratch(directory, size, pool)


def volume_of(ios, blocks, threads=1, **options):
    """A volume of `blocks` blocks over simulated drives."""
    names = [f"/drive{n}" for n in range(len(ios))]
    turns = iter(ios)
    return aio.create_volume(
        names, blocks * aio.ALIGN_BYTES, lambda: aio.ThreadBackend(threads, next(turns)), **options
    )


class GateIO(MemoryIO):
    """A drive whose transfers wait while its gate is shut. It is open at first."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def preadv(self, fd, views, offset):
        assert self.gate.wait(20)
        return super().preadv(fd, views, offset)

    def pwritev(self, fd, views, offset):
        assert self.gate.wait(20)
        return super().pwritev(fd, views, offset)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def nothing_leaks():
    """Fails where the body leaves threads or file descriptors behind."""
    files, threads = descriptors(), set(threading.enumerate())
    yield
    end = time.monotonic() + 5
    while descriptors() > files or not threads.issuperset(threading.enumerate()):
        assert time.monotonic() < end, (descriptors() - files, threading.enumerate())
        gc.collect()
        time.sleep(0.01)


def failure_of(work) -> OSError | None:
    """The OSError that `work` raises, if it raises one."""
    try:
        work()
    except OSError as error:
        return error
    return None


def in_child(work) -> int:
    """Forks, runs `work` in the child and answers its exit status: 0 where it returned."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: forking with threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")
