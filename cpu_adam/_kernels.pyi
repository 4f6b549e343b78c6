"""The compiled kernels: addresses and sizes in, nothing kept. See src/module.cpp."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

VERSION: int
"""Of what the module offers; see `built`."""

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
    checksums: npt.NDArray[np.uint32] | None,
    meanwhile: Callable[[], object] | None = None,
) -> None:
    """Do one operation on many spans, by all threads, without the GIL.

    gradient: 0 bfloat16 (or none), 1 float16, 2 float32. rows: a span each: elements, row of
    factors, first element in its parameter, then the address of each array. Addresses are not
    checked. meanwhile: called once, when the other threads have begun; what it raises is raised
    when all is done.
    """

def answers_are(
    questions: npt.NDArray[np.int64],
    handles: npt.NDArray[np.int64],
    expected: npt.NDArray[np.int64],
) -> bool:
    """Whether functions in C, by their addresses, answer what is expected.

    Each is called with the address of each handle. expected: a row for each handle, with a number
    for each question.
    """

def sum_of_squares(kernel: int, gradient: int, address: int, elements: int) -> float:
    """The sum of squares of a gradient at an address, in the order of the reference."""

def crc32c(kernel: int, bytes: npt.NDArray[np.uint8], value: int, threads: bool) -> int:
    """The CRC32C of `value`'s bytes and these behind them, on one thread or by all."""

def crc32c_combine(a: int, b: int, bytes_of_b: int) -> int:
    """The CRC32C of two stretches of bytes, one behind the other."""

def configure(places: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Have a thread for each place: (NUMA node, processors to bind to or none)."""

def threads() -> int:
    """Threads that a call may use, with the caller's."""
