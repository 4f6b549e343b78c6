"""What `offload train` can be told: flags, and the same names as keys of a JSON file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from offload import config
from offload.cli import BadInput, bad_input, nearest
from offload.config import Config

NoText = tyro.conf.arg(metavar="PATH", help_behavior_hint="")


@dataclass(frozen=True, kw_only=True, slots=True)
class Placing(Config):
    """The engine's own settings; every field of `offload.Config` is a flag."""

    nvme_path: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="")] = ()
    """Directory for the nvme tier, on a local drive. Default: the working directory, where nvme
    is asked for by name."""

    micro_batches: int | None = 1
    """Micro-batches in a step."""

    def __post_init__(self) -> None:
        if not self.nvme_path and "nvme" in (self.params, self.gradients, self.optimizer):
            object.__setattr__(self, "nvme_path", (os.curdir,))
        try:
            Config.__post_init__(self)
        except ValueError as error:
            in_flags = re.sub(r"\bConfig\.(\w+)=", lambda name: flag(name[1]) + " ", str(error))
            raise ValueError(in_flags) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Train a small byte-level GPT on real text, whatever tier its state lives in.

    Raises:
        ValueError: a field holds what it cannot mean; the message names the flag.
    """

    size: Literal["10m", "30m", "100m", "200m", "500m"] = "10m"
    """Parameters of the model, about."""

    data: Annotated[str | None, NoText] = None
    """File or folder of text. Default: the source of Python's own standard library."""

    steps: int = 120
    """Optimizer steps."""

    batch: int = 16
    """Windows of text in a micro-batch."""

    seq_len: int = 128
    """Bytes in a window."""

    lr: float = 2e-3
    """Peak learning rate."""

    warmup: int = 20
    """Steps in which the learning rate rises; then it falls, linearly, to a twentieth."""

    weight_decay: float = 0.1
    """Weight decay of the matrices."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights in use."""

    recompute: bool = False
    """Compute each block again in backward instead of keeping its activations."""

    seed: int = 0
    """Seed of the weights and of the order of the data."""

    eval_windows: int = 256
    """Most windows of held-out text that the loss at the end is measured on."""

    config: Annotated[str | None, NoText] = None
    """JSON file of settings, keys named like the flags (seq_len). Flags win over the file."""

    json: bool = False
    """One JSON object per step on standard output, and nothing else there."""

    placing: Annotated[Placing, tyro.conf.arg(name="")] = Placing()

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a step."""
        return self.placing.micro_batches or 1

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "seq_len", "eval_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} {getattr(self, name)}: expected 1 or more")
        for name in ("warmup", "weight_decay", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{flag(name)} {getattr(self, name)}: expected 0 or more")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"--lr {self.lr}: expected a positive number")


def flag(name: str) -> str:
    """The command-line spelling of a field: `seq_len` is `--seq-len`."""
    return "--" + name.replace("_", "-")


def parse(arguments: Sequence[str]) -> Train:
    """The settings that `arguments` and the file named by their `--config` ask for.

    A flag that cannot be parsed ends the program with a message and status 2.

    Raises:
        BadInput: settings contradict each other, or the file cannot be read or has a key that is
            no setting.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    path = finder.parse_known_args(list(arguments))[0].config
    # The file's settings come first as flags of their own: of two equal flags the last one counts.
    flags = _flags_in(path) if path else []
    with bad_input():
        return tyro.cli(
            Train, prog="offload train", args=[*flags, *arguments], registry=_registry()
        )


def keys() -> tuple[str, ...]:
    """Names of all settings that a file may hold: the flags, but for `config`."""
    own = [field.name for field in dataclasses.fields(Train)]
    return tuple(name for name in own if name not in ("config", "placing")) + config.FIELDS


def _flags_in(path: str) -> list[str]:
    with bad_input(), open(path, encoding="utf-8") as file:
        try:
            found = json.load(file)
        except ValueError as error:
            raise ValueError(f"--config {path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInput(f"--config {path}: expected one JSON object, found {type(found).__name__}")
    flags: list[str] = []
    for key, value in found.items():
        if key not in keys():
            raise BadInput(f"--config {path}: unknown key {key!r}{nearest(key, keys())}")
        flags += _flags_of(path, key, value)
    return flags


def _flags_of(path: str, key: str, value: Any) -> list[str]:
    """What one key of a file is on the command line; null is as good as absent."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag(key) if value else flag(f"no_{key}")]
    if isinstance(value, (str, int, float)):
        return [f"{flag(key)}={value}"]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [flag(key), *value]
    raise BadInput(f"--config {path}: key {key!r} holds {json.dumps(value)}, which is no setting")


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

    return registry
