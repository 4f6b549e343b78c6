"""What the user asks for: one frozen dataclass, every field with a working default."""

from __future__ import annotations

import difflib
import math
import os
import reprlib
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

from offload import deepspeed
from offload.planning.tiers import Tier, parse_bytes

BUDGETS: dict[Tier, str] = {"device": "device_memory", "cpu": "cpu_memory", "nvme": "nvme_space"}
"""The field of `Config` that bounds each tier."""

Choice = Literal["auto", "device", "cpu", "nvme"]
"""A tier, or `auto`: the fastest that has room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How a model is spread over device memory, CPU memory and NVMe. Sizes take 8GiB and the like
    (8G is 8GB, powers of 1000).

    Raises:
        TypeError: there is no such field.
        ValueError: a field holds an impossible value; the message names the field.
    """

    params: Choice = "auto"
    """Tier of the weights."""

    gradients: Choice = "auto"
    """Tier of the gradients between backward and update."""

    optimizer: Choice = "auto"
    """Tier of the optimizer states: moments, and the low bits of the fp32 master weights."""

    nvme_path: tuple[str, ...] = ()
    """Directory for the nvme tier, or several on different drives. Several are striped over, in
    proportion to the speeds that `offload bench nvme` measured, in equal shares unless it measured
    all of them. Needed when anything lives on nvme."""

    device_memory: int | str | None = None
    """Most memory to take on the compute device, such as 8GiB, without activations. Default: half
    of what is free."""

    cpu_memory: int | str | None = None
    """Most CPU memory to take, such as 8GiB, by each rank. Default: three quarters of what is free,
    by the host's ranks; where the CPU is the compute device half of what device_memory leaves."""

    nvme_space: int | str | None = None
    """Most space to take on all directories of nvme_path together, such as 100GiB. Default: nine
    tenths of what is free."""

    states: Literal["exact", "compact"] = "exact"
    """Format of the optimizer states. `exact`: fp32 master weights and moments, bit for bit.
    `compact`: the moments in a byte each (Adam on bfloat16 weights), half the bytes."""

    gradient_dtype: Literal["param", "fp32"] = "param"
    """Type in which gradients are kept and accumulated: the parameter's own, or fp32."""

    max_grad_norm: float | None = None
    """Clip the gradient to this 2-norm, over all parameters, in step(). Default: no clipping.
    Its squares are summed as it comes, in the last backward of a step."""

    micro_batches: int | None = None
    """Number of backward() calls before each step(), where it is always the same. Updates then
    begin inside the last of these backwards, each as soon as its gradient is final, instead of
    after step(). From there on only step() may follow, also when that backward raised (out of
    memory, Ctrl-C): step() completes the update with the gradients that came. Leave it out where a
    batch may be dropped. optimizer.zero_grad() before the last backward starts the count again.
    With max_grad_norm, whose factor is known at step(), no update begins early."""

    exposed_memory: int | str | None = None
    """Most memory, such as 1GiB, for copies of weights that are read outside of the calls of their
    modules and of gradients on nvme that p.grad shows, together. Default: a tenth of what is free,
    at least 256 MiB. Further gradients on nvme are shown in files beside them, in CPU memory as far
    as there is any: that is slower, and takes space beyond nvme_space until they are let go."""

    shard: Literal["auto", 1, 2, 3] = "auto"
    """Over several ranks: whether the whole weights stay on each device until they are updated (2,
    as ZeRO-2) or are gathered for each use (3, as ZeRO-3). Gradients and states are cut in both.
    auto: 2 if it fits, and puts nothing more on a drive. 1 (as ZeRO-1) is 2 where each device also
    keeps the whole gradient of its own micro-batches, which is sent once a step: in the last
    backward that micro_batches tells of, else in step(). Its sums round in another order."""

    reduce: Literal["mean", "sum"] = "mean"
    """Over several ranks: whether gradients are averaged or summed. A mean over ranks that are no
    power of two rounds once more than one process does; a sum never does."""

    wire: Literal["exact"] = "exact"
    """Over several ranks: how weights and gradients are sent. exact: as they are. It is all there
    is: a rank sends nothing that is rounded, such as int8 with the error fed back."""

    comm_timeout: float = 300.0
    """Seconds that a rank waits for the others in one collective, before it gives up. A rank that
    fails or is gone is told much sooner."""

    durable: str | None = None
    """Directory of a run that can be killed at any instant and goes on from its last committed
    step: attach on a directory with a commit takes over all of it. Records lie in nvme_path, if
    that is given, else there, twice: room for weights and states, two times, is taken at attach,
    beside nvme_space. Over ranks each has a directory of its own in it."""

    commit_every: int | None = None
    """Commit every so many steps. Default: every step where all states live on nvme, else as often
    as writing them takes at most a tenth of the time."""

    resume: bool = True
    """Go on from the commit in the directory of durable. False refuses one that has any."""

    def __new__(cls, *unnamed: object, **given: object) -> Config:
        """Refuse what is no field, and name one that is."""
        known = cls.__dataclass_fields__
        if unnamed:
            raise TypeError(f"Config({unnamed[0]!r}): fields go by name, as Config(params='cpu')")
        for name in given.keys() - known.keys():
            near = difflib.get_close_matches(name, known, 1, 0.5)
            told = f"likely meant: {near[0]}" if near else f"it has {', '.join(known)}"
            raise TypeError(f"Config has no field {name!r}; {told}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if type(value) not in map(type, allowed) or value not in allowed:
                raise _refused(name, value, f"one of {', '.join(map(str, allowed))}")
        for name in (*BUDGETS.values(), "exposed_memory"):
            value = getattr(self, name)
            if value == "auto":  # As the command line has it.
                object.__setattr__(self, name, None)
            elif value is not None:
                try:
                    object.__setattr__(self, name, parse_bytes(value))
                except ValueError as error:
                    raise ValueError(f"Config.{name}: {error}") from None
        given = self.nvme_path if isinstance(self.nvme_path, (list, tuple)) else (self.nvme_path,)
        paths = tuple(_path("nvme_path", one, "() for no nvme tier") for one in given)
        if len(set(map(os.path.abspath, paths))) < len(paths):
            raise ValueError(
                f"Config.nvme_path={[*paths]}: a directory is named twice; name it once"
            )
        object.__setattr__(self, "nvme_path", paths)
        if self.durable is not None:
            object.__setattr__(self, "durable", _path("durable", self.durable, "or None"))
        for name, kind, plain, expected in _NUMBERS:
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < math.inf:
                raise _refused(name, value, f"{expected}, or None")
            object.__setattr__(self, name, plain(value))
        if not self.nvme_path and "nvme" in (self.params, self.gradients, self.optimizer):
            raise ValueError(
                "Config asks for the nvme tier but nvme_path is empty: give a directory on a local "
                "drive, nvme_path='/mnt/nvme'"
            )
        if self.durable is None and (self.commit_every is not None or not self.resume):
            name = "resume" if self.commit_every is None else "commit_every"
            raise ValueError(
                f"Config.{name}={getattr(self, name)} is of a durable run, and none is asked for: "
                "give its directory, Config(durable='run')"
            )

    @classmethod
    def from_deepspeed(
        cls, file: str | os.PathLike[str] | Mapping[str, Any], *, report: bool = True
    ) -> Config:
        """The Config that a DeepSpeed JSON file asks for, or the dict in it.

        A warning says what each key became, unless `report` is False. docs/deepspeed.md has every
        key.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not JSON, or a key is misspelt or holds an impossible value.
        """
        if isinstance(file, Mapping):
            what, found = "a DeepSpeed dict", deepspeed.translate(file)
        else:
            what, found = os.fspath(file), deepspeed.read(file)
        if report:
            lines = [f"what {what} became:", *found.report()]
            warnings.warn("\n    ".join(lines), stacklevel=2)
        return cls(**found.fields)

    def bytes_of(self, name: str) -> int | None:
        """The byte count in field `name`, or None where the default is to be measured."""
        value = getattr(self, name)
        assert value is None or isinstance(value, int), name
        return value


_ALLOWED: dict[str, tuple[str | bool, ...]] = {"resume": (True, False)}
for _name, _hint in get_type_hints(Config).items():
    if get_origin(_hint) is Literal:
        _ALLOWED[_name] = get_args(_hint)

_NUMBERS: tuple[tuple[str, Any, Any, str], ...] = (
    ("max_grad_norm", Real, float, "a positive number, finite"),
    ("micro_batches", Integral, int, "a whole number from 1"),
    ("comm_timeout", Real, float, "a number of seconds, finite"),
    ("commit_every", Integral, int, "a whole number from 1"),
)


def _refused(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"Config.{name}={reprlib.repr(value)}: expected {expected}")


def _path(name: str, given: object, without: str) -> str:
    """The path in a field as a text, with `~` expanded."""
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        raise _refused(name, given, f"the path of a directory; {without}")
    return os.path.expanduser(os.fspath(given))


def warn_user(message: str) -> None:
    """Give a RuntimeWarning at the user's line: the innermost outside this project and torch."""
    ours, level, frame = ("offload", "cpu_adam", "torch"), 1, sys._getframe(0)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ours:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)
