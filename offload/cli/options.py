"""What `offload train` can be told: its own flags, and every field of `offload.Config`."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import tyro

from offload import deepspeed
from offload.cli import BadInput, bad_input, in_flags
from offload.cli.flags import check_field, parse_flags
from offload.config import Config
from offload.planning import tiers

NoText = tyro.conf.arg(metavar="PATH", help_behavior_hint="")

SEED_MAX = 2**64 - 1


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
    """Train a small byte-level GPT on real text, its weights and states in memory or on drives."""

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

    lr: float | None = None
    """Learning rate at its highest, after the warmup. Default: 0.002 for 10m, and as much less as a
    larger model is wider."""

    warmup: int = 20
    """Steps in which the learning rate rises from 0; after them it falls to a twentieth."""

    weight_decay: float = 0.1
    """Weight decay, of matrices alone."""

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

    deepspeed: Annotated[str | None, NoText] = None
    """Configuration file of DeepSpeed (JSON): placement, clipping and accumulation are read as
    flags; flags win over it. Optimizer, schedule, precision and batch size remain flags."""

    json: bool = False
    """One JSON object per step and one summary on standard output, nothing else there."""

    placing: Annotated[Placing, tyro.conf.arg(name="")] = Placing()

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a step."""
        return self.placing.micro_batches or 1

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "seq_len", "eval_windows"):
            check_field(self, name, getattr(self, name) >= 1, "1 or more")
        for name in ("warmup", "sample", "lr", "weight_decay"):
            value = getattr(self, name)
            check_field(self, name, value is None or 0 <= value < math.inf, "0 or more")
        check_field(self, "seed", 0 <= self.seed <= SEED_MAX, "0 or more, at most 2**64 - 1")
        check_field(self, "data", self.data != "", "the path of a file or folder")


def parse(arguments: Sequence[str]) -> Train:
    """The settings that `arguments` and the file named by their `--deepspeed` ask for."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--deepspeed", nargs="?")
    path = finder.parse_known_args(list(arguments))[0].deepspeed
    read = () if path is None else translation(path).fields.items()
    with bad_input():
        plain = Train(deepspeed=path, placing=Placing(**{k: v for k, v in read if v is not None}))
    given = [  # A size is as good in capitals: 7B.
        one.lower() if before == "--size" or one.startswith("--size=") else one
        for before, one in zip(("", *arguments), arguments)
    ]
    asked = parse_flags(Train, "offload train", given, registry(), plain)
    if "--resume" in given and asked.placing.durable is None:
        raise BadInput("--resume is of a durable run: give its directory, --durable DIR")
    return asked


def translation(path: str) -> deepspeed.Translation:
    """What becomes of a file of DeepSpeed's."""
    try:
        return deepspeed.read(path)
    except OSError as error:
        raise BadInput(f"--deepspeed {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"--deepspeed {error}") from None


def registry() -> tyro.constructors.ConstructorRegistry:
    """How tyro is to read and show types whose union would puzzle a reader of the help."""
    made = tyro.constructors.ConstructorRegistry()

    @made.primitive_rule
    def _rule(
        info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        def one_of(kind: Callable[[str], Any], none: str, texts: list[str]) -> Any:
            return None if texts[0] == none else kind(texts[0])

        def paths(texts: list[str]) -> tuple[str, ...]:
            if not texts or not all(texts):
                raise ValueError("expected the path of a directory, found none")
            return tuple(texts)

        rules: dict[Any, tuple[str, Callable[[list[str]], Any]]] = {
            int | str | None: ("SIZE", partial(one_of, tiers.parse_bytes, "auto")),
            int | None: ("INT", partial(one_of, int, "None")),
            float | None: ("FLOAT", partial(one_of, float, "None")),
            str | None: ("PATH", partial(one_of, str, "None")),
            tuple[str, ...]: ("PATH", paths),
        }
        if info.type not in rules:
            return None
        metavar, read = rules[info.type]
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs="*" if read is paths else 1,
            metavar=metavar,
            instance_from_str=read,
            is_instance=lambda _: True,
            str_from_instance=lambda value: (
                list(value)
                if isinstance(value, tuple)
                else ["auto" if value is None and metavar == "SIZE" else str(value)]
            ),
        )

    return made
