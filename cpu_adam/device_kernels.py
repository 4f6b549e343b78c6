"""The operations of `native` on a device, by kernels of its own: src/device.

The kernels are text for CUDA's driver (`ptx`) with the arithmetic of the CPU's: the same bits. This
file calls no driver. Whoever does hands a `Launch` to `use`; from then on an operation on tensors
of such a device is one launch for 29 parts, in place of some thirty of torch's. How one is made is
in [Note: Launches] of src/device/table.cuh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cpu_adam.choice import Kernel
from cpu_adam.formats import FORMATS, GROUP_ELEMENTS, SUM_BLOCK_ELEMENTS
from cpu_adam.memory import is_wrapper
from cpu_adam.spans import ADDRESS_COLUMNS

BLOCK_THREADS, GRID_COLUMNS_MOST, ROWS = 256, 4096, 29
_ROW = np.dtype([("elements", "i8"), ("first", "i8"), ("arrays", "i8", 7), ("factors", "f4", 16)])
_TABLE = np.dtype([("scale", "u8"), ("gradient", "i4"), ("count", "i4"), ("rows", _ROW, ROWS)])
SQUARES, TOTAL = "squares_of_blocks", "sum_of_blocks"
_SUMS = ("accumulate_float32", "accumulate_bfloat16")
_BLOCK_ELEMENTS = {"compact": 8 * GROUP_ELEMENTS, SQUARES: 8 * SUM_BLOCK_ELEMENTS, TOTAL: 1 << 62}
"""What a block takes at a time, a warp a group; of others some elements for each thread."""


Launch = Callable[[int, str, tuple[int, int], int, bytes], None]
"""What queues a kernel on the calling thread's stream of a device: given the device's number, an
entry, columns and rows of blocks, the threads of one, and a `DeviceTable`, which is copied."""


def block_elements(entry: str) -> int:
    """How many elements a block of a kernel takes at a time: for grids of no more than it takes."""
    return _BLOCK_ELEMENTS.get(entry, 4 * BLOCK_THREADS)


@dataclass(frozen=True, slots=True)
class DeviceKernels:
    """The kernels of a device, with the face of the module of those of the CPU."""

    OPERATIONS: ClassVar = (*FORMATS, *_SUMS, "split", "join", SQUARES, TOTAL)
    FACTORS: ClassVar = 16

    launch: Launch

    def run(
        self,
        device: int,
        operation: int,
        gradient: int,
        rows: npt.NDArray[np.int64],
        factors: npt.NDArray[np.float32],
        scale: int = 0,
    ) -> None:
        """Queue an operation on many spans, as `run` of the CPU's kernels does it.

        scale: the address of a float32 on the device that gradients are multiplied by, too.
        """
        entry = self.OPERATIONS[operation]
        for some in (rows[start : start + ROWS] for start in range(0, len(rows), ROWS)):
            table = np.zeros((), _TABLE)
            table["scale"], table["gradient"], table["count"] = scale, gradient, len(some)
            into = table["rows"][: len(some)]
            into["elements"], into["first"] = some[:, 0], some[:, 2]
            into["arrays"][:, : some.shape[1] - ADDRESS_COLUMNS] = some[:, ADDRESS_COLUMNS:]
            into["factors"] = factors[some[:, 1]]
            blocks = -(-int(some[:, 0].max()) // block_elements(entry))
            grid = min(max(blocks, 1), GRID_COLUMNS_MOST), len(some)
            self.launch(device, entry, grid, BLOCK_THREADS, table.tobytes())


_kernels: dict[str, DeviceKernels] = {}  # by type of device


def use(device_type: str, launch: Launch | None) -> None:
    """Have tensors on such devices served by kernels; with None by torch's operations again."""
    _kernels.pop(device_type, None)
    if launch is not None:
        _kernels[device_type] = DeviceKernels(launch)


def ptx() -> bytes:
    """The text of the kernels, in the PTX of CUDA 12.4, for compute capability 7.0 and later."""
    return (Path(__file__).parent / "device.ptx").read_bytes()


def kernel_of(tensors: Sequence[Tensor]) -> Kernel | None:
    """The kernels that serve these tensors, where they are of one device that has such."""
    device = tensors[0].device
    found = _kernels.get(device.type)
    if found is None or any(
        x.device != device or not x.is_contiguous() or x.is_neg() or is_wrapper(x) for x in tensors
    ):
        return None
    return Kernel("device", "its launches were handed over", found, device.index or 0)
