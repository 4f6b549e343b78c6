"""What the user asks for: one frozen dataclass, every field with a working default."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Literal

Tier = Literal["device", "cpu", "nvme"]
"""A place with a capacity in bytes: memory of the compute device, CPU memory, a file on a drive."""

TIERS: tuple[Tier, ...] = ("device", "cpu", "nvme")
"""All tiers, the fastest first."""

Choice = Literal["auto", "device", "cpu", "nvme"]
"""A tier asked for, or `auto`: the fastest that has room."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str | int | float) -> int:
    """Bytes from a number or a text such as `"8GiB"`, `"500 MB"`, `"1.5g"`.

    Raises:
        ValueError: the text is not a size, is negative, or a number of bytes that is not whole.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        number, unit = text, ""
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", str(text).lower())
        if not match or match[2] not in _UNITS:
            raise ValueError(
                f"{text!r} is not a size in bytes: expected a number with an optional unit "
                "(kB, MB, GB, TB, KiB, MiB, GiB, TiB), for example 8GiB"
            )
        number, unit = float(match[1]), match[2]
    if unit == "" and number % 1:
        raise ValueError(f"{text!r} is not a size in bytes: it is no whole number; add a unit")
    if not 0 <= number * _UNITS[unit] < 2**62:
        raise ValueError(f"{text!r} is not a size in bytes: it must be positive and finite")
    return int(number * _UNITS[unit])


def format_bytes(count: int) -> str:
    """`count` bytes in the largest binary unit that keeps it at one or more: `1.50 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How a model is spread over device memory, CPU memory and NVMe. Sizes take 8GiB and the like.

    Raises:
        ValueError: a field holds what it cannot mean; the message names the field.
    """

    params: Choice = "auto"
    """Tier of the weights."""

    gradients: Choice = "auto"
    """Tier of the gradients between backward and update."""

    optimizer: Choice = "auto"
    """Tier of the optimizer states (moments, and what the weights lack to fp32)."""

    nvme_path: tuple[str, ...] = ()
    """Directory for the nvme tier; needed when anything lives there."""

    device_memory: int | str | None = None
    """Most bytes taken of the compute device's memory, activations aside. Default: half of
    what is free."""

    cpu_memory: int | str | None = None
    """Most bytes taken of CPU memory. Default: half of what is free (after device_memory, where
    the CPU is the compute device)."""

    nvme_space: int | str | None = None
    """Most bytes taken on nvme_path. Default: nine tenths of what is free."""

    states: Literal["exact"] = "exact"
    """Format of the optimizer states. `exact`: fp32 master weights and moments, bit for bit."""

    gradient_dtype: Literal["param", "fp32"] = "param"
    """Type in which gradients are kept and accumulated: the parameter's own, or fp32."""

    max_grad_norm: float | None = None
    """Clip the gradient to this global 2-norm inside step(), on every tier."""

    micro_batches: int | None = None
    """Number of backward() calls before each step(), where it is always the same. Updates then
    start inside the last of them, as soon as a gradient is final, instead of after step(); with
    max_grad_norm, whose factor is known only then, they start at step() all the same."""

    exposed_memory: int | str | None = None
    """Most bytes of private copies that touching parameters outside their use may hold at once.
    Default: a tenth of what is free, at least 256 MiB."""

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"Config.{name}={getattr(self, name)!r}: expected one of {', '.join(allowed)}"
                )
        for name in ("device_memory", "cpu_memory", "nvme_space", "exposed_memory"):
            value = getattr(self, name)
            if value is not None:
                try:
                    object.__setattr__(self, name, parse_bytes(value))
                except ValueError as error:
                    raise ValueError(f"Config.{name}: {error}") from None
        given = self.nvme_path
        paths = tuple(map(os.fspath, (given,) if isinstance(given, (str, os.PathLike)) else given))
        object.__setattr__(self, "nvme_path", paths)
        if len(paths) > 1:
            raise ValueError(
                f"Config.nvme_path={list(paths)}: striping over several drives is not available "
                "in this version; give one directory, on the fastest drive"
            )
        norm = self.max_grad_norm
        if norm is not None and not norm > 0:
            raise ValueError(f"Config.max_grad_norm={norm!r}: expected a positive number or None")
        if self.micro_batches is not None and self.micro_batches < 1:
            raise ValueError(
                f"Config.micro_batches={self.micro_batches!r}: expected a count from 1, or None"
            )
        if not paths and "nvme" in (self.params, self.gradients, self.optimizer):
            raise ValueError(
                "Config asks for the nvme tier but nvme_path is empty: "
                "give a directory on a local drive, nvme_path=('/mnt/nvme',)"
            )

    def bytes_of(self, name: str) -> int | None:
        """The byte count in field `name`, or None where the default is to be measured."""
        value = getattr(self, name)
        assert value is None or isinstance(value, int), name
        return value


_ALLOWED: dict[str, tuple[str, ...]] = {
    "params": ("auto", *TIERS),
    "gradients": ("auto", *TIERS),
    "optimizer": ("auto", *TIERS),
    "states": ("exact",),
    "gradient_dtype": ("param", "fp32"),
}

FIELDS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Config))
"""Names of all fields, in order."""
