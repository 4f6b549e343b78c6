"""The kernels of the device without one: compiled as C++, or their PTX (`ptx`), block by block."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from cpu_adam import FORMATS, choice, native
from cpu_adam.choice import SQUARES, Kernel, block_elements
from cpu_adam.memory import are_native

OPERATIONS = (*FORMATS, "accumulate_float32", "accumulate_bfloat16", "split", "join")
ROWS, COLUMNS_MOST = 30, 4096
ROW = np.dtype([("elements", "i8"), ("first", "i8"), ("arrays", "i8", 7), ("factors", "f4", 16)])
TABLE = np.dtype([("gradient", "i4"), ("count", "i4"), ("rows", ROW, ROWS)])
SOURCE = Path(choice.__file__).parent / "src" / "device" / "device.cu"
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
    """Launches of kernels, as a driver makes them; `launched` has the entry and rows of each.

    It has the face of the module of the CPU's kernels: see [Note: Launches] of table.cuh.
    """

    OPERATIONS = OPERATIONS
    FACTORS = ROW["factors"].shape[0]

    def __init__(self, blocks: Blocks, columns: int | None = None) -> None:
        """columns: of all grids, in place of what is asked for."""
        self._blocks, self._columns = blocks, columns
        self.launched: list[tuple[str, int]] = []

    def run(
        self,
        _: int,
        operation: int,
        gradient: int,
        rows: npt.NDArray[np.int64],
        factors: npt.NDArray[np.float32],
    ) -> None:
        """An operation on many spans, as the CPU's kernels do it."""
        for some in (rows[start : start + ROWS] for start in range(0, len(rows), ROWS)):
            self.launch(OPERATIONS[operation], gradient, some, factors)

    def launch(self, entry: str, gradient: int, rows: npt.NDArray[np.int64], factors: Any) -> None:
        """One launch."""
        table = np.zeros((), TABLE)
        table["gradient"], table["count"] = gradient, len(rows)
        into = table["rows"][: len(rows)]
        into["elements"], into["first"] = rows[:, 0], rows[:, 2]
        into["arrays"][:, : rows.shape[1] - 3] = rows[:, 3:]
        into["factors"] = factors[rows[:, 1]]
        blocks = -(-int(rows[:, 0].max()) // block_elements(entry))
        columns = min(max(blocks, 1), self._columns or COLUMNS_MOST)
        self.launched.append((entry, len(rows)))
        self._blocks(entry, (columns, len(rows)), table.tobytes())

    def squares(self, gradient: torch.Tensor) -> torch.Tensor:
        """The sum of squares of each leaf."""
        sums = torch.empty(-(-gradient.numel() // 1024), dtype=torch.float64)
        none = np.zeros((1, self.FACTORS), np.float32)
        at = gradient.numel(), 0, 0, gradient.data_ptr(), sums.data_ptr()
        dtype = native.GRADIENT_NUMBERS[gradient.dtype]
        self.launch(SQUARES, dtype, np.array([at], np.int64), none)
        return sums


@contextmanager
def on_the_cpu(launches: Launches) -> Iterator[None]:
    """Have CPU tensors served by a device's kernels."""
    kernel = Kernel("device", "", launches, 0)
    with patch.object(native, "_kernel_for", lambda *x: kernel if are_native(x) else None):
        yield
