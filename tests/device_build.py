"""The kernels of the device without one: compiled as C++, or their PTX (`ptx`), block by block."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cpu_adam import choice, device_kernels

SOURCE = Path(device_kernels.__file__).parent / "src" / "device" / "device.cu"
OPTIONS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing")


def built(folder: Path) -> ctypes.CDLL | None:
    """A library of the kernels, or None without a compiler."""
    compiler = choice.compiler()
    return None if compiler is None else ctypes.CDLL(str(build(compiler, folder / "device.so")))


def build(compiler: str, library: Path) -> Path:
    """Compile the kernels to a library."""
    command = [compiler, *OPTIONS, "-x", "c++", str(SOURCE), "-o", str(library)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return library


Blocks = Callable[[str, tuple[int, int], bytes], None]
"""What runs the blocks of a grid: given an entry, columns and rows, and its argument."""


def blocks_of(library: ctypes.CDLL) -> Blocks:
    """Those of a library."""

    def run(entry: str, grid: tuple[int, int], arguments: bytes) -> None:
        kernel = ctypes.cast(getattr(library, entry), ctypes.c_void_p)
        library.run_blocks(kernel, *(ctypes.c_int64(count) for count in grid), arguments)

    return run


class Launches:
    """See `device_kernels.Launch`; `launched` has the entry and grid of each launch."""

    def __init__(self, blocks: Blocks, columns: int | None = None) -> None:
        """columns: of all grids, in place of what is asked for."""
        self._blocks, self._columns = blocks, columns
        self.launched: list[tuple[str, tuple[int, int]]] = []

    def __call__(
        self, device: int, entry: str, grid: tuple[int, int], block: int, arguments: bytes
    ) -> None:
        assert block == device_kernels.BLOCK_THREADS
        self.launched.append((entry, grid))
        columns = self._columns if self._columns and entry != device_kernels.TOTAL else grid[0]
        self._blocks(entry, (columns, grid[1]), arguments)


@contextmanager
def on_the_cpu(launcher: device_kernels.Launch) -> Iterator[None]:
    """Have CPU tensors served by a device's kernels."""
    device_kernels.use("cpu", launcher)
    try:
        yield
    finally:
        device_kernels.use("cpu", None)
