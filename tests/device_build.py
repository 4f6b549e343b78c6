"""The kernels of the device compiled as C++ for this processor: a launcher that runs blocks."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpu_adam import choice, device_kernels

SOURCE = Path(device_kernels.__file__).parent / "src" / "device" / "device.cu"
OPTIONS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing")


def built(folder: Path) -> ctypes.CDLL | None:
    """A library of the kernels, or None without a compiler."""
    compiler, library = choice.compiler(), folder / "device.so"
    if compiler is None:
        return None
    quiet = ("-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function")
    command = [compiler, *OPTIONS, *quiet, "-x", "c++", str(SOURCE), "-o", str(library)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return ctypes.CDLL(str(library))


class BuiltLauncher:
    """See `device_kernels.Launch`; `launched` has the entry and grid of each launch."""

    def __init__(self, library: ctypes.CDLL, columns: int | None = None) -> None:
        """columns: of all grids, in place of what is asked for."""
        self._library, self._columns = library, columns
        self.launched: list[tuple[str, tuple[int, int]]] = []

    def __call__(
        self, device: int, entry: str, grid: tuple[int, int], block: int, arguments: bytes
    ) -> None:
        assert block == device_kernels.BLOCK_THREADS
        self.launched.append((entry, grid))
        columns = self._columns if self._columns and entry != device_kernels.TOTAL else grid[0]
        kernel = ctypes.cast(getattr(self._library, entry), ctypes.c_void_p)
        numbers = ctypes.c_int64(columns), ctypes.c_int64(grid[1])
        self._library.run_blocks(kernel, *numbers, arguments)


@contextmanager
def on_the_cpu(launcher: device_kernels.Launch) -> Iterator[None]:
    """Have CPU tensors served by a device's kernels."""
    device_kernels.use("cpu", launcher)
    try:
        yield
    finally:
        device_kernels.use("cpu", None)
