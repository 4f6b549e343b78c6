"""The tiers, and sizes in bytes as people write them."""

from __future__ import annotations

import math
import re
import reprlib
from typing import Literal

Tier = Literal["device", "cpu", "nvme"]
"""A place for bytes: memory of the compute device, CPU memory, or files on drives."""

TIERS: tuple[Tier, ...] = ("device", "cpu", "nvme")
"""All tiers, fastest first."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

BYTES_MAX = 2**62
"""Above every size, so that sums of a few fit in 64 bits."""


def parse_bytes(text: str | int | float) -> int:
    """Bytes from a number or a text such as `"8GiB"`, `"500 MB"`, `"1.5g"` (as GB: 1.5 * 1000^3).

    Raises:
        ValueError: the text is not a size, or is negative, too large or a fraction of bytes.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        number, unit = text, ""
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", str(text).lower())
        if not match or match[2] not in _UNITS:
            raise ValueError(
                f"{reprlib.repr(text)} is not a size in bytes: expected a number with an optional "
                "unit: KiB, MiB, GiB, TiB (powers of 1024), or k, M, G, T, kB, MB, GB, TB (of "
                "1000), for example 8GiB"
            )
        number, unit = float(match[1]), match[2]
    if not 0 <= number < BYTES_MAX or number * _UNITS[unit] >= BYTES_MAX:
        raise ValueError(
            f"{reprlib.repr(text)} is not a size in bytes: it must be from 0 to below 4 EiB (2**62)"
        )
    if unit == "" and number % 1:
        raise ValueError(f"{text!r} is not a size in bytes: it is no whole number; add a unit")
    return int(number * _UNITS[unit])


def format_bytes(count: int, *, up: bool = False) -> str:
    """`count` bytes in the largest binary unit of which it is one or more: `1.50 GiB`.

    With `up` it is rounded up, so that a budget of the size shown is enough.
    """
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while abs(size) >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    if unit == "B":
        return f"{size:.0f} B"
    return f"{math.ceil(size * 100) / 100 if up else size:.2f} {unit}"
