"""What `offload train` can be told: flags, and the same names as keys of a JSON file."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from offload import config
from offload.cli import BadInput, from_deepspeed, in_flags, nearest
from offload.cli.flags import Flags, as_paths, flag
from offload.config import Config

NoText = tyro.conf.arg(metavar="PATH", help_behavior_hint="")

COUNT_MAX = 2**40
SEED_MAX = 2**64 - 1
FACTOR_MAX = 1e30
"""What the update can do with in float32."""

_SOME = ", at most 2**40"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placing(Config):
    """The engine's own settings; every field of `offload.Config` is a flag."""

    nvme_path: Annotated[tuple[str, ...], NoText] = ()
    """Directory on a local drive for the nvme tier; several, on different drives, share it.
    Default: the working directory where a tier is nvme by name, else none."""

    micro_batches: int | None = 1
    """Micro-batches (--batch windows each) in a step."""

    def __post_init__(self) -> None:
        if not self.nvme_path and "nvme" in (self.params, self.gradients, self.optimizer):
            object.__setattr__(self, "nvme_path", (os.curdir,))
        try:
            Config.__post_init__(self)
        except ValueError as error:
            raise ValueError(in_flags(str(error))) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Train a small byte-level GPT on real text, its weights and states in memory or on drives.

    Raises:
        ValueError: a field holds what it cannot mean; the message names the flag.
    """

    size: Literal["10m", "30m", "100m", "200m", "500m", "1b", "3b", "7b"] = "10m"
    """About how many parameters the model has: 10 million to 7 billion."""

    data: Annotated[str | None, NoText] = None
    """File or folder of text to learn from. Default: the source of Python's standard library."""

    steps: int = 120
    """Optimizer steps to train for."""

    batch: int = 16
    """Windows of text that go through the model at once (a micro-batch)."""

    seq_len: int = 128
    """Bytes of text in a window."""

    lr: float = 2e-3
    """Learning rate at its highest, after the warmup."""

    warmup: int = 20
    """Steps in which the learning rate rises from 0; after them it falls, both in a line."""

    lr_floor: float = 0.05
    """Part of --lr that is left at the last step, from 0 to 1; 1 does not fall."""

    weight_decay: float = 0.1
    """Weight decay, of matrices alone."""

    beta1: float = 0.9
    """AdamW's beta1: the share of the first moment that a step keeps."""

    beta2: float = 0.95
    """AdamW's beta2: the share of the second moment that a step keeps."""

    eps: float = 1e-8
    """AdamW's eps, added to the root of the second moment."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights that forward and backward use."""

    recompute: bool = False
    """Compute each block a second time in backward: slower, and its activations take no memory."""

    seed: int = 0
    """Seed of the weights and of the order of the data."""

    eval_windows: int = 256
    """Windows of held-out text, at most, for the loss at the end."""

    sample: int = 200
    """Bytes of text to write at the end, for at most ten seconds; 0 writes none."""

    plot: Annotated[str | None, NoText] = None
    """Also draw the loss to this file (.png, .svg, .pdf); needs matplotlib."""

    trace_file: Annotated[str | None, NoText] = None
    """File to leave for offload report: what ran when. Default: in your cache, where the last ten
    runs are kept."""

    config: Annotated[str | None, NoText] = None
    """JSON file of settings; keys are the flags with _ for - (seq_len). Flags win over the file."""

    deepspeed: Annotated[str | None, NoText] = None
    """Configuration file of DeepSpeed (JSON), read as flags. Flags win over it, but one that
    contradicts its optimizer or scheduler is refused."""

    json: bool = False
    """One JSON object per step and one summary on standard output, nothing else there."""

    placing: Annotated[Placing, tyro.conf.arg(name="")] = Placing()

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a step."""
        return self.placing.micro_batches or 1

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "seq_len", "eval_windows"):
            self._check(name, 1 <= getattr(self, name) <= COUNT_MAX, f"1 or more{_SOME}")
        self._check("data", self.data is None or self.data != "", "the path of a file or folder")
        self._check("warmup", 0 <= self.warmup <= COUNT_MAX, f"0 or more{_SOME}")
        self._check("sample", 0 <= self.sample <= COUNT_MAX, f"0 or more{_SOME}")
        for name in ("plot", "trace_file"):
            self._check(name, getattr(self, name) != "", "the path of a file")
        self._check("seed", 0 <= self.seed <= SEED_MAX, "0 or more, at most 2**64 - 1")
        self._check("lr", 0 < self.lr <= FACTOR_MAX, "a positive number, at most 1e30")
        self._check("weight_decay", 0 <= self.weight_decay <= FACTOR_MAX, "0 to 1e30")
        for name in ("beta1", "beta2"):
            self._check(name, 0 <= getattr(self, name) < 1, "0 or more, below 1")
        self._check("lr_floor", 0 <= self.lr_floor <= 1, "0 to 1")
        self._check("eps", 0 <= self.eps <= FACTOR_MAX, "0 to 1e30")

    def _check(self, name: str, right: bool, expected: str) -> None:
        if not right:
            raise ValueError(f"{flag(name)} {getattr(self, name)}: expected {expected}")


def parse(arguments: Sequence[str]) -> Train:
    """The settings that `arguments` and the file named by their `--config` ask for.

    Raises:
        BadInput: a flag or a key is no setting or has a value that it cannot have, settings
            contradict each other, or the file cannot be read.
        SystemExit: help was asked for, and shown.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in (*_FILES, "dtype"):
        finder.add_argument(flag(name), nargs="?")
    named = finder.parse_known_args(list(arguments))[0]
    # The files' settings come first as flags of their own: of two equal flags the last one counts.
    path = named.deepspeed
    theirs = None if path is None else from_deepspeed.Adopted.of(path)
    found = _flags_in(named.config) if named.config is not None else {}
    adopted = theirs.flags() if theirs else []
    given = [*adopted, *itertools.chain(*found.values()), *arguments]
    try:
        settings = FLAGS.parse(given)
    except BadInput:
        for key, flags in found.items():
            if told := FLAGS.complaint(flags):
                raise BadInput(f"--config {named.config}: key {key!r}: {told}") from None
        raise
    if theirs:
        own = {*found, *(["dtype"] if named.dtype else [])}
        theirs.refuse_conflicts(settings, own)
    return settings


_FILES = ("config", "deepspeed")
"""Flags that name files of settings, which no such file may hold."""


def keys() -> tuple[str, ...]:
    """Names of all settings that a file may hold: the flags, but for those that name files."""
    own = [field.name for field in dataclasses.fields(Train)]
    return tuple(name for name in own if name not in (*_FILES, "placing")) + config.FIELDS


def _flags_in(path: str) -> dict[str, list[str]]:
    """By key of the file, the flags that say the same."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            found = json.load(file, object_pairs_hook=_once_each)
    except OSError as error:
        cause, attempt = _CONFIG_ADVICE.get(type(error), ("the drive failed", "try another file"))
        raise BadInput(
            f"--config {path} cannot be read: {error.strerror}; likely {cause}; {attempt}"
        ) from error
    except ValueError as error:
        raise BadInput(f"--config {path} is not JSON: {error}") from None
    except RecursionError:
        raise BadInput(
            f"--config {path} is nested too deeply: expected one flat JSON object"
        ) from None
    if not isinstance(found, dict):
        raise BadInput(f"--config {path}: expected one JSON object, found {type(found).__name__}")
    flags: dict[str, list[str]] = {}
    for key, value in found.items():
        if key not in keys():
            raise BadInput(f"--config {path}: unknown key {key!r}{nearest(key, keys())}")
        flags[key] = _flags_of(path, key, value)
    return flags


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    for key in found if len(found) < len(pairs) else ():
        if sum(key == other for other, _ in pairs) > 1:
            raise ValueError(f"key {key!r} is there twice")
    return found


_CONFIG_ADVICE: dict[type[OSError], tuple[str, str]] = {
    FileNotFoundError: (
        "it is misspelt, or meant from another working directory",
        "give the whole path of a JSON file",
    ),
    IsADirectoryError: ("the file's name is missing", "give the JSON file in that folder"),
    NotADirectoryError: ("a part of the path is a file", "give the whole path of a JSON file"),
    PermissionError: ("this user may not read it", "change its mode, or give a copy of your own"),
}
"""The likely cause and one thing to try."""


def _flags_of(path: str, key: str, value: Any) -> list[str]:
    """What one key of a file is on the command line; null is as good as absent."""
    if value is None:
        return []
    switch = key in FLAGS.switches
    if switch and isinstance(value, bool):
        return [flag(key) if value else flag(f"no_{key}")]
    if isinstance(value, (str, int, float)) and not isinstance(value, bool) and not switch:
        return [f"{flag(key)}={value}"]
    several = key == "nvme_path" and isinstance(value, list)
    if several and all(isinstance(item, str) for item in value):
        return [flag(key), *as_paths(value)]
    wanted = "true or false" if switch else "a number or a text"
    wanted += ", or a list of texts" if key == "nvme_path" else ""
    found = json.dumps(value, ensure_ascii=False)
    found = found if len(found) <= 60 else f"{found[:57]}..."
    raise BadInput(f"--config {path}: key {key!r} holds {found}: expected {wanted}")


def _registry() -> tyro.constructors.ConstructorRegistry:
    """How tyro is to read and show types whose union would puzzle a reader of the help."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def _size(
        info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        if info.type != int | str | None:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="SIZE",
            instance_from_str=lambda texts: (
                None if texts[0] == "auto" else config.parse_bytes(texts[0])
            ),
            is_instance=lambda value: value is None or isinstance(value, (int, str)),
            str_from_instance=lambda value: ["auto" if value is None else str(value)],
        )

    @registry.primitive_rule
    def _number(
        info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        kind = {int | None: int, float | None: float}.get(info.type)  # type: ignore[call-overload]
        if kind is None:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar=kind.__name__.upper(),
            instance_from_str=lambda texts: None if texts[0] == "None" else kind(texts[0]),
            is_instance=lambda value: value is None or isinstance(value, (int, kind)),
            str_from_instance=lambda value: [str(value)],
        )

    @registry.primitive_rule
    def _path(
        info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        if info.type != tuple[str, ...]:
            return None

        def paths_of(texts: list[str]) -> tuple[str, ...]:
            if not texts or not all(texts):
                raise ValueError("expected the path of a directory, found none")
            return tuple(texts)

        return tyro.constructors.PrimitiveConstructorSpec(
            nargs="*",
            metavar="PATH",
            instance_from_str=paths_of,
            is_instance=lambda value: isinstance(value, tuple),
            str_from_instance=list,
        )

    return registry


FLAGS = Flags(kind=Train, command="offload train", known=(*keys(), *_FILES), registry=_registry())
"""The flags of `offload train`."""
