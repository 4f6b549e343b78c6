"""CRC32C (Castagnoli; RFC 3720) of bytes in memory: compiled where it can be, Google's elsewhere.

Knows bytes only, so that whoever describes files can use it: a tensor is told by its `data_ptr`.
See [Note: CRC32C] in src/crc32c.cpp for the arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cpu_adam.choice import kernel

_PART_BYTES = 1 << 20
"""What Google's library is given at a time, in a copy."""


def crc32c(buffer: Any, value: int = 0) -> int:
    """The CRC32C of the bytes of `buffer`, continuing from `value` of the bytes before.

    Compiled, it works at the speed of memory, and other Python threads run meanwhile.

    Args:
        buffer: contiguous bytes in CPU memory, which are not copied: bytes, a memoryview, a NumPy
            array, a torch tensor.
        value: the result for what precedes `buffer`, 0 at the start.

    Raises:
        ValueError: the bytes are not contiguous or not in CPU memory, or `value` is no CRC.
        TypeError: `buffer` gives no access to bytes.

    >>> hex(crc32c(b"123456789")), crc32c(b"6789", crc32c(b"12345")) == crc32c(b"123456789")
    ('0xe3069283', True)
    """
    data = _bytes_of(buffer)
    if not 0 <= value < 1 << 32:
        raise ValueError(
            f"asked for a CRC32C of earlier bytes, from 0 to 2**32 - 1; found {value}; likely "
            f"cause: arguments in another order; try: name them"
        )
    chosen = kernel()
    if chosen.native is None:
        import google_crc32c  # Needed here alone.

        for start in range(0, data.size, _PART_BYTES):
            value = google_crc32c.extend(value, data[start : start + _PART_BYTES].tobytes())
        return value
    return int(chosen.native.crc32c(chosen.index, data, value))


class _Memory:
    """The bytes of a tensor, as NumPy asks for them."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor  # alive as long as the array that looks at it
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), True),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _bytes_of(buffer: Any) -> npt.NDArray[np.uint8]:
    """The bytes of anything that has some, as they lie in memory."""
    if hasattr(buffer, "data_ptr"):
        if buffer.is_cpu and buffer.is_contiguous() and (buffer.data_ptr() or not buffer.nbytes):
            return np.asarray(_Memory(buffer)) if buffer.nbytes else np.empty(0, np.uint8)
    elif (view := memoryview(buffer)).c_contiguous:
        return np.frombuffer(view, np.uint8)
    raise ValueError(
        f"asked for the CRC32C of contiguous bytes in CPU memory; found a {type(buffer).__name__} "
        f"that is strided, elsewhere or without memory; likely cause: a sliced view, or a DTensor; "
        f"try: contiguous().cpu(), or to_local(), first"
    )
