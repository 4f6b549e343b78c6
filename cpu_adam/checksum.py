"""CRC32C (Castagnoli; RFC 3720) of bytes in memory: compiled where it can be, Google's elsewhere.

Knows bytes only, so that whoever describes files can use it: a tensor is told by its `data_ptr`.
See [Note: CRC32C] in src/crc32c.cpp for the arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cpu_adam.choice import kernel

POLYNOMIAL = 0x82F63B78
"""Castagnoli's, its lowest power in the highest bit."""


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

        return int(google_crc32c.extend(value, data.tobytes()))
    return int(chosen.native.crc32c(chosen.index, data, value))


def crc32c_combined(first: int, second: int, count: int) -> int:
    """The CRC32C of bytes of which these are the CRC32Cs of a first part and of a second one, which
    has `count` bytes. (Multiplies by x ** (8 * count) modulo the polynomial, as zlib does.)

    >>> crc32c_combined(crc32c(b"12345"), crc32c(b"6789"), 4) == crc32c(b"123456789")
    True
    """
    factor, power = 1 << 31, 1 << 23  # x ** 0 and x ** 8: the lowest power is the highest bit.
    while count:
        factor = _product(factor, power) if count & 1 else factor
        power, count = _product(power, power), count >> 1
    return _product(factor, first) ^ second


def _product(one: int, other: int) -> int:
    found = 0
    for bit in reversed(range(32)):
        found ^= other if one >> bit & 1 else 0
        other = other >> 1 ^ (POLYNOMIAL if other & 1 else 0)
    return found


def _bytes_of(buffer: Any) -> npt.NDArray[np.uint8]:
    """The bytes of anything that has some, as they lie in memory."""
    if hasattr(buffer, "data_ptr"):
        if buffer.is_cpu and buffer.is_contiguous() and (buffer.data_ptr() or not buffer.nbytes):
            found: npt.NDArray[np.uint8] = buffer.detach().reshape(-1).view(torch.uint8).numpy()
            return found
    elif (view := memoryview(buffer)).c_contiguous:
        return np.frombuffer(view, np.uint8)
    raise ValueError(
        f"asked for the CRC32C of contiguous bytes in CPU memory; found a {type(buffer).__name__} "
        f"that is strided, elsewhere or without memory; likely cause: a sliced view, or a DTensor; "
        f"try: contiguous().cpu(), or to_local(), first"
    )
