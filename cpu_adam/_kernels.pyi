"""The compiled kernels: addresses and sizes in, nothing kept. See src/module.cpp."""

import numpy as np
import numpy.typing as npt

VERSION: int
"""Of what the module offers; see `choice.require_version`."""

OPERATIONS: tuple[str, ...]
"""Names of the operations, in the order of the numbers by which `run` knows them."""
FACTORS: int
"""Numbers in a row of factors."""
ADDRESS_COLUMNS: int
GROUP_ELEMENTS: int
SUM_BLOCK_ELEMENTS: int
"""As in Python, which looks whether they are the same when it loads the module."""

def kernel_names() -> list[str]:
    """Kernels that this machine can run, the best first; none on x86 without SSE4.1."""

def run(
    kernel: int,
    operation: int,
    gradient: int,
    rows: npt.NDArray[np.int64],
    factors: npt.NDArray[np.float32],
) -> None:
    """Do one operation on many spans, by all threads, without the GIL.

    gradient: 0 bfloat16 (or none), 1 float16, 2 float32. rows: a span each: elements, row of
    factors, first element in its parameter, then the address of each array. Addresses are not
    checked.
    """

def square_sums(
    kernel: int, gradient: int, address: int, elements: int, first: int
) -> list[tuple[int, int, float]]:
    """The sum of squares of a gradient at an address, in the order of the reference."""

def crc32c(kernel: int, bytes: npt.NDArray[np.uint8], value: int) -> int:
    """The CRC32C of `value`'s bytes and these behind them."""

def configure(threads: int) -> None:
    """Have so many threads, with the caller's."""

def pool() -> int: ...
def threads() -> int:
    """Threads that a call may use, with the caller's."""
