"""What the user asks for: one frozen dataclass, every field with a working default."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import math
import os
import re
import reprlib
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, Literal

from offload import deepspeed
from offload.deepspeed_optimizer import conflicts, remarks

Tier = Literal["device", "cpu", "nvme"]
"""A place with a capacity in bytes: memory of the compute device, CPU memory, a file on a drive."""

TIERS: tuple[Tier, ...] = ("device", "cpu", "nvme")
"""All tiers, the fastest first."""

BUDGETS: dict[Tier, str] = {
    "device": "device_memory",
    "cpu": "cpu_memory",
    "nvme": "nvme_space",
}
"""The field of `Config` that bounds each tier."""

Choice = Literal["auto", "device", "cpu", "nvme"]
"""A tier asked for, or `auto`: the fastest that has room."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

BYTES_MAX = 2**62
"""Every size is smaller, so that sums of a few fit in 64 bits."""


def parse_bytes(text: str | int | float) -> int:
    """Bytes from a number or a text such as `"8GiB"`, `"500 MB"`, `"1.5g"` (as GB: 1.5 * 1000^3).

    Raises:
        ValueError: the text is not a size, is negative, or a number of bytes that is not whole.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        number, unit = text, ""
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", str(text).lower())
        if not match or match[2] not in _UNITS:
            raise ValueError(
                f"{_shown(text)} is not a size in bytes: expected a number with an optional unit: "
                "KiB, MiB, GiB, TiB (powers of 1024), or k, M, G, T, kB, MB, GB, TB (of 1000), "
                "for example 8GiB"
            )
        number, unit = float(match[1]), match[2]
    if not 0 <= number < BYTES_MAX or number * _UNITS[unit] >= BYTES_MAX:
        raise ValueError(
            f"{_shown(text)} is not a size in bytes: it must be from 0 to below 4 EiB (2**62)"
        )
    if unit == "" and number % 1:
        raise ValueError(f"{text!r} is not a size in bytes: it is no whole number; add a unit")
    return int(number * _UNITS[unit])


def format_bytes(count: int, *, up: bool = False) -> str:
    """`count` bytes in the largest binary unit that keeps it at one or more: `1.50 GiB`.

    `up` rounds up, so that what is shown is enough.
    """
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while abs(size) >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    if unit == "B":
        return f"{size:.0f} B"
    return f"{math.ceil(size * 100) / 100 if up else size:.2f} {unit}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How a model is spread over device memory, CPU memory and NVMe. Sizes take 8GiB and the like
    (8G is 8GB, powers of 1000).

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
    """Directory for the nvme tier, or several on different drives, over which it is striped: by
    the speeds that `offload bench nvme` has measured, in equal shares unless it has measured all
    of them. Needed when anything lives there."""

    device_memory: int | str | None = None
    """Most memory to take on the compute device, such as 8GiB, activations aside. Not given: half
    of what is free."""

    cpu_memory: int | str | None = None
    """Most CPU memory to take, such as 8GiB. Not given: half of what is free (after device_memory,
    where the CPU is the compute device)."""

    nvme_space: int | str | None = None
    """Most space to take on nvme_path, such as 100GiB, on all of several together. Not given: nine
    tenths of what is free."""

    states: Literal["exact", "compact"] = "exact"
    """Format of the optimizer states. `exact`: fp32 master weights and moments, bit for bit.
    `compact`: the moments in a byte each (Adam on bfloat16 weights), half the bytes."""

    gradient_dtype: Literal["param", "fp32"] = "param"
    """Type in which gradients are kept and accumulated: the parameter's own, or fp32."""

    max_grad_norm: float | None = None
    """Clip the gradient to this 2-norm, over all parameters, in step(). Not given: no clipping."""

    micro_batches: int | None = None
    """Number of backward() calls before each step(), where it is always the same. Updates then
    begin inside the last of them, each as soon as its gradient is final and its unit's backward is
    over, instead of after step(). From there on only step() may follow, also when that backward
    raised (out of memory, Ctrl-C): it completes the step with the gradients that came, as plain
    torch does when a step is taken after a backward that raised; all else is refused until then.
    Leave it out where a batch may be dropped. `zero_grad`, or any use of `p.grad`, before the last
    backward starts the count again; evaluations before it, and losses that nobody backpropagates,
    change nothing. A gradient that you hold (`g = p.grad`) may be changed until step(), so its
    unit's update begins there. Two steps in a row after fewer calls are told, once. With
    max_grad_norm, whose factor is known only at step(), nothing begins before it, so nothing is
    refused; there two steps in a row after more calls are told, too."""

    exposed_memory: int | str | None = None
    """Most memory, such as 1GiB, for copies of weights that are read outside forward and backward,
    and as much again for gradients that `p.grad` shows from nvme or an accelerator, or of which
    views are kept. Not given: a tenth of what is free, at least 256 MiB."""

    trace: bool = True
    """Keep what ran last in memory, for `offload report`: some megabytes, and far below a hundredth
    of the time."""

    def __new__(cls, *_: Any, **given: Any) -> Config:
        """Refuses a misspelt field, and says which is like it."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known and (close := difflib.get_close_matches(name, known, n=1)):
                raise TypeError(f"{cls.__name__} has no field {name!r}: did you mean {close[0]!r}?")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if not isinstance(self.trace, bool):
            raise _refused("trace", self.trace, "True or False")
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                raise _refused(name, value, f"one of {', '.join(allowed)}")
        for name in (*BUDGETS.values(), "exposed_memory"):
            value = getattr(self, name)
            if value is not None:
                try:
                    object.__setattr__(self, name, parse_bytes(value))
                except ValueError as error:
                    raise ValueError(f"Config.{name}: {error}") from None
        paths = _paths(self.nvme_path)
        object.__setattr__(self, "nvme_path", paths)
        object.__setattr__(self, "max_grad_norm", _norm(self.max_grad_norm))
        object.__setattr__(self, "micro_batches", _count(self.micro_batches))
        if not paths and "nvme" in (self.params, self.gradients, self.optimizer):
            raise ValueError(
                "Config asks for the nvme tier but nvme_path is empty: "
                "give a directory on a local drive, nvme_path=('/mnt/nvme',)"
            )

    @classmethod
    def from_deepspeed(
        cls, file: str | os.PathLike[str] | Mapping[str, Any], *, report: bool = True
    ) -> Config:
        """The Config that a JSON file of DeepSpeed asks for, or the dict that is in it.

        A warning says what each key became, but with `report=False`. `attach` then refuses an
        optimizer that contradicts the file. `offload.deepspeed.read` says the same without a
        Config; docs/deepspeed.md has every key.

        Raises:
            OSError: the file cannot be read.
            TypeError: it is neither a path nor a dict.
            ValueError: it is no JSON, or a key is misspelt or holds what it cannot mean.
        """
        if not isinstance(file, (str, bytes, os.PathLike, Mapping)):
            raise TypeError(
                f"Config.from_deepspeed was given {_shown(file)}: expected the path of a JSON file "
                "of DeepSpeed's or the dict that is in it; likely another argument, or a list "
                "around it; give one path"
            )
        if isinstance(file, Mapping):
            what, found = "a dict of DeepSpeed's", deepspeed.translate(file)
        else:
            what, found = os.fspath(file), deepspeed.read(file)
        if report:
            lines = [f"what {what} became:", *found.report()]
            warnings.warn("\n    ".join(lines), stacklevel=2)
        return DeepSpeedConfig(**found.fields, expects=found.expects)

    def conflicts(self, optimizer: Any) -> tuple[str, ...]:
        """Where `optimizer` is not what this Config was made for, each in a sentence."""
        return ()

    def remarks(self, dtypes: Collection[str]) -> tuple[str, ...]:
        """What this Config was made for and a model with parameters of `dtypes` is not."""
        return ()

    def bytes_of(self, name: str) -> int | None:
        """The byte count in field `name`, or None where the default is to be measured."""
        value = getattr(self, name)
        assert value is None or isinstance(value, int), name
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedConfig(Config):
    """A Config that knows which optimizer a file of DeepSpeed's asked for."""

    expects: tuple[tuple[str, Any], ...] = ()
    """See `offload.deepspeed.Translation`."""

    def conflicts(self, optimizer: Any) -> tuple[str, ...]:
        """See Config.conflicts."""
        return tuple(conflicts(dict(self.expects), optimizer))

    def remarks(self, dtypes: Collection[str]) -> tuple[str, ...]:
        """See Config.remarks."""
        return tuple(remarks(dict(self.expects), dtypes))


_ALLOWED: dict[str, tuple[str, ...]] = {
    "params": ("auto", *TIERS),
    "gradients": ("auto", *TIERS),
    "optimizer": ("auto", *TIERS),
    "states": ("exact", "compact"),
    "gradient_dtype": ("param", "fp32"),
}


def _shown(value: object) -> str:
    """A value as a message shows it: short, and with its type where the text hides that."""
    text, kind = reprlib.repr(value), type(value).__name__
    plain = isinstance(value, (str, int, float, type(None))) or text.startswith(kind)
    return text if plain else f"{text} ({kind})"


def _refused(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"Config.{name}={_shown(value)}: expected {expected}")


def _paths(given: object) -> tuple[str, ...]:
    """One path or several, as a tuple of texts."""
    several = given if isinstance(given, (list, tuple)) else (given,)
    paths = []
    for one in several:
        path = os.fspath(one) if isinstance(one, (str, os.PathLike)) else one
        if not isinstance(path, str) or not path or "\0" in path:
            expected = "the path of a directory, as text or pathlib.Path"
            raise _refused("nvme_path", given, f"{expected}; () for no nvme tier")
        paths.append(path)
    if len(set(map(os.path.abspath, paths))) < len(paths):
        raise ValueError(
            f"Config.nvme_path={paths}: a directory is named twice, and two files on one drive "
            "are no faster than one; name each drive once"
        )
    return tuple(paths)


def _norm(given: object) -> float | None:
    if given is None:
        return None
    if isinstance(given, Real) and not isinstance(given, bool):
        with contextlib.suppress(OverflowError):
            if 0 < float(given) < float("inf"):
                return float(given)
    raise _refused("max_grad_norm", given, "a positive number, finite, or None")


def _count(given: object) -> int | None:
    if given is None:
        return None
    if isinstance(given, Integral) and not isinstance(given, bool) and 1 <= int(given) < 2**63:
        return int(given)
    raise _refused("micro_batches", given, "a whole number from 1, or None")


def _texts_under_fields(kind: type) -> dict[str, str]:
    """By field of a dataclass, the text under it; none where there is no source to read."""
    try:
        (parsed,) = ast.parse(inspect.getsource(kind)).body
    except OSError:
        return {}
    assert isinstance(parsed, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(str(text.value.value))
        for field, text in pairwise(parsed.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


_texts: Any = _texts_under_fields(Config)
Config.__slots__ = _texts or Config.__slots__  # Where `help` looks for the texts of slots.

FIELDS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Config))
"""Names of all fields, in order."""
