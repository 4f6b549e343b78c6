"""CRC32C (Castagnoli; RFC 3720) of bytes in memory: compiled where it can be, numpy elsewhere.

Knows bytes only, so that whoever describes files can use it: a tensor is told by its `data_ptr`
(that torch is imported is the package's doing, not this file's). See [Note: CRC32C] in
src/crc32c.cpp for the arithmetic, which is the same here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cpu_adam.choice import kernel

_Bytes = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.uint32]

_POLYNOMIAL = 0x82F63B78  # without x**32, reflected: bit 31 is x**0
_ONE, _MASK = 0x80000000, 0xFFFFFFFF
_WORD = np.dtype("<u4")
_LANES = (8192, 512, 32)  # words that are folded at once: many as long as there are many


def crc32c(buffer: Any, value: int = 0, *, threads: bool = False) -> int:
    """The CRC32C of the bytes of `buffer`, continuing from `value` of the bytes before.

    Compiled, it works at the speed of memory, and other Python threads run meanwhile.

    Args:
        buffer: contiguous bytes in CPU memory, which are not copied: bytes, a memoryview, a NumPy
            array, a torch tensor.
        value: the result for what precedes `buffer`, 0 at the start.
        threads: share a large buffer with the update's threads (see `set_threads`).

    Raises:
        ValueError: the bytes are not contiguous or not in CPU memory, or `value` is no CRC.
        TypeError: `buffer` gives no access to bytes.

    >>> hex(crc32c(b"123456789")), crc32c(b"6789", crc32c(b"12345")) == crc32c(b"123456789")
    ('0xe3069283', True)
    """
    data = _bytes_of(buffer)
    _check(value)
    chosen = kernel()
    if chosen.native is None:
        return _by_numpy(data, value)
    return int(chosen.native.crc32c(chosen.index, data, value, threads))


def crc32c_combine(a: int, b: int, bytes_of_b: int) -> int:
    """The CRC32C of two stretches of bytes, one behind the other, from that of each.

    Raises ValueError where `a` or `b` is no CRC or `bytes_of_b` is no length.

    >>> crc32c_combine(crc32c(b"12345"), crc32c(b"6789"), 4) == crc32c(b"123456789")
    True
    """
    _check(a)
    _check(b)
    if not 0 <= bytes_of_b < 1 << 64:
        raise _refusal("the number of bytes that a CRC32C is of", bytes_of_b)
    native = kernel().native
    if native is not None:
        return int(native.crc32c_combine(a, b, bytes_of_b))
    return _product(_power(8 * bytes_of_b), a) ^ b


def _check(value: int) -> None:
    if not 0 <= value <= _MASK:
        raise _refusal("a CRC32C of earlier bytes, from 0 to 2**32 - 1", value)


def _refusal(asked: str, found: int) -> ValueError:
    return ValueError(
        f"asked for {asked}; found {found}; likely cause: arguments in another order; try: name "
        f"them"
    )


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


def _bytes_of(buffer: Any) -> _Bytes:
    """The bytes of anything that has some, as they lie in memory."""
    if isinstance(buffer, np.ndarray):
        contiguous = buffer.flags.c_contiguous
        if contiguous:
            return buffer.reshape(-1).view(np.uint8)
    elif hasattr(buffer, "data_ptr"):
        contiguous = buffer.is_cpu and buffer.is_contiguous()
        if contiguous and buffer.nbytes == 0:  # Of which NumPy before 2.3 takes no address.
            return np.empty(0, np.uint8)
        contiguous = contiguous and _is_stored(buffer)
        if contiguous:
            return np.asarray(_Memory(buffer))
    else:
        view = memoryview(buffer)
        contiguous = view.c_contiguous
        if contiguous:
            return np.frombuffer(view, np.uint8)
    raise ValueError(
        f"asked for the CRC32C of contiguous bytes in CPU memory; found a {type(buffer).__name__} "
        f"that is strided, on another device or without memory of its own; likely cause: a "
        f"transposed or sliced view, or a DTensor; try: make it contiguous (and move it to the "
        f"CPU, or take to_local()) first"
    )


def _is_stored(tensor: Any) -> bool:
    """Whether a contiguous tensor's storage has memory as far as the tensor goes."""
    end = tensor.storage_offset() * tensor.element_size() + tensor.nbytes
    return bool(tensor.data_ptr() != 0 and end <= tensor.untyped_storage().nbytes())


def _by_numpy(data: _Bytes, value: int) -> int:
    """Fold the data down to a few hundred bytes, and take those one by one."""
    register = value ^ _MASK
    for lanes in _LANES:
        rows = data.size // (4 * lanes)
        if rows > 1:
            whole = data[: 4 * lanes * rows]
            last = _folded(whole.view(_WORD).reshape(rows, lanes), register)
            data = np.concatenate([last.view(np.uint8), data[whole.size :]])
            register = 0
    table = _byte_table()
    for byte in data.tolist():
        register = table[(register ^ byte) & 255] ^ register >> 8
    return register ^ _MASK


def _folded(rows: _Words, register: int) -> _Words:
    """The row of words that has the same remainder, from a register of 0, as all rows have."""
    low, high = _carriers(rows.shape[1])
    state: _Words = rows[0].copy()
    state[0] ^= register
    for row in rows[1:]:
        carried = low.take(state & 0xFFFF)
        carried ^= high.take(state >> 16)
        np.bitwise_xor(carried, row, out=state)
    return state


@cache
def _carriers(words: int) -> tuple[_Words, _Words]:
    """Products of the lower and of the upper half of a word, carried `words` words on."""
    factor = _power(32 * words)
    low, high = np.zeros((2, 1 << 16), _WORD)
    for bit in range(16):
        ahead = slice(1 << bit, 2 << bit)
        np.bitwise_xor(low[: 1 << bit], _product(1 << bit, factor), out=low[ahead])
        np.bitwise_xor(high[: 1 << bit], _product(1 << 16 + bit, factor), out=high[ahead])
    return low, high


@cache
def _byte_table() -> tuple[int, ...]:
    """Products of a byte, carried one byte on."""
    factor = _power(8)
    return tuple(_product(byte, factor) for byte in range(256))


def _product(a: int, b: int) -> int:
    """Of two polynomials, modulo P."""
    found = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            found ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found


def _power(exponent: int) -> int:
    """x**exponent."""
    found, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            found = _product(found, square)
        square = _product(square, square)
        exponent >>= 1
    return found
