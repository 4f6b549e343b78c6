"""`offload train --deepspeed FILE`: what a file of DeepSpeed's is in flags of this command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload import deepspeed
from offload.cli import BadInput
from offload.cli.flags import as_paths, flag
from offload.config import FIELDS, Config

_ADAM = "optimizer.params."
_WARMUP = "scheduler.params."

_SAME = {
    f"{_ADAM}lr": "lr",
    f"{_ADAM}weight_decay": "weight_decay",
    f"{_ADAM}eps": "eps",
    f"{_WARMUP}warmup_max_lr": "lr",
    f"{_WARMUP}warmup_num_steps": "warmup",
    f"{_WARMUP}total_num_steps": "steps",
    "train_micro_batch_size_per_gpu": "batch",
}
"""By key of the file, the setting that means the same."""

_SCHEDULERS = ("WarmupDecayLR", "WarmupLR")
"""What this command's own schedule comes near to."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """A file of DeepSpeed's, as this command takes it."""

    path: str
    translation: deepspeed.Translation
    settings: Mapping[str, Any]
    """By name of a setting of the command, beside those of the engine, what the file says."""

    @staticmethod
    def of(path: str) -> Adopted:
        """Reads a file.

        Raises:
            BadInput: it cannot be read or understood, or asks for what this command has not.
        """
        try:
            found = deepspeed.read(path)
        except OSError as error:
            raise BadInput(
                f"--deepspeed {path} cannot be read: {error.strerror}; likely it is misspelt, or "
                "meant from another working directory; give the whole path of a JSON file"
            ) from error
        except ValueError as error:
            raise BadInput(f"--deepspeed {error}") from None
        return Adopted(path, found, _settings(path, found.values, found.auto))

    def flags(self) -> list[str]:
        """What the file says, as flags."""
        plain, found = Config(), list[str]()
        for name, value in (*self.translation.fields.items(), *self.settings.items()):
            if name == "nvme_path" and value:
                found += [flag(name), *as_paths(value)]
            elif value is not None and (name not in FIELDS or value != getattr(plain, name)):
                found.append(f"{flag(name)}={value}")
        return found

    def report(self, settings: Any) -> list[str]:
        """What each key became, a line each, with the settings of the command that came of it."""
        ignored = {
            key: "ignored: this command has nothing like it"
            for key in self.translation.values
            if key.startswith((_ADAM, _WARMUP))
        }
        same = {
            key: f"{flag(name)} {getattr(settings, name)}"
            for key, name in _SAME.items()
            if name in self.settings
        }
        became = {**ignored, **same}
        became["optimizer.type"] = "this command's AdamW"
        became[f"{_ADAM}betas"] = "--beta1 and --beta2"
        became["scheduler.type"] = (
            "this command's own schedule: a linear rise in --warmup steps, then a linear fall to a "
            "twentieth"
        )
        became["bf16.enabled"] = f"--dtype {settings.dtype}"
        if (whole := "train_batch_size") in self.translation.values:
            became[whole] = f"--batch {settings.batch} --micro-batches {settings.micro_batches}"
        placing = {name: getattr(settings.placing, name) for name in self.translation.fields}
        lines = self.translation.report(became, placing)
        if "dtype" not in self.settings:
            lines.append(f"bf16 and fp16 say nothing: --dtype {settings.dtype} as without it")
        return lines

    def refuse_conflicts(self, settings: Any) -> None:
        """Refuses settings that are not those of the file's optimizer and scheduler.

        Raises:
            BadInput: one differs.
        """
        for name in ("lr", "weight_decay", "beta1", "beta2", "eps", "warmup"):
            mine, theirs = getattr(settings, name), self.settings.get(name)
            if theirs is not None and mine != theirs:
                raise BadInput(
                    f"{flag(name)} {mine} contradicts {self.path}, which has {theirs}: leave out "
                    "one of the two"
                )


def _settings(path: str, values: Mapping[str, Any], auto: Sequence[str]) -> dict[str, Any]:
    """What a file says of the settings of the command, beside those of the engine."""
    _refuse_others(path, values)
    found: dict[str, Any] = {}
    for key, name in _SAME.items():
        if key not in values:
            continue
        value = _number(path, key, values[key], whole=name in ("warmup", "steps", "batch"))
        if name in found and found[name] != value:
            raise BadInput(
                f"--deepspeed {path}: {key} is {values[key]}, and elsewhere {found[name]}: this "
                f"command has one {flag(name)}; make them equal"
            )
        found[name] = value
    betas = values.get(f"{_ADAM}betas")
    if betas is not None:
        if not isinstance(betas, list) or len(betas) != 2:
            raise BadInput(f"--deepspeed {path}: {_ADAM}betas holds {betas}: expected two numbers")
        found["beta1"], found["beta2"] = (
            _number(path, f"{_ADAM}betas", beta, whole=False) for beta in betas
        )
    if "bf16.enabled" in values:
        found["dtype"] = "bfloat16" if values["bf16.enabled"] else "float32"
    batch, _ = deepspeed.batches(values, auto)
    return found if batch is None else found | {"batch": batch}


def _number(path: str, key: str, value: Any, *, whole: bool) -> int | float:
    try:
        return deepspeed.number(key, value, whole=whole)
    except ValueError as error:
        raise BadInput(f"--deepspeed {path}: {error}") from None


def _refuse_others(path: str, values: Mapping[str, Any]) -> None:
    kind = str(values.get("optimizer.type", "AdamW"))
    decoupled = kind.lower() == "adamw" or values.get(f"{_ADAM}adam_w_mode", True)
    if kind.lower() not in ("adam", "adamw") or not decoupled:
        raise BadInput(
            f"--deepspeed {path}: optimizer.type is {kind}, and this command trains with AdamW "
            "alone: remove the section, or use offload.attach with an optimizer of your own"
        )
    if (
        values.get(f"{_ADAM}amsgrad")
        or values.get(f"{_ADAM}maximize")
        or values.get(f"{_ADAM}bias_correction") is False
    ):
        raise BadInput(
            f"--deepspeed {path}: optimizer.params asks for amsgrad, maximize or no "
            "bias_correction, and this command's AdamW has none of that: remove it, or use "
            "offload.attach"
        )
    schedule = values.get("scheduler.type", "WarmupLR")
    if schedule not in _SCHEDULERS:
        raise BadInput(
            f"--deepspeed {path}: scheduler.type is {schedule}, and this command has a schedule of "
            "its own: remove the section, or use offload.attach in a loop with your scheduler"
        )
    if values.get("fp16.enabled"):
        raise BadInput(
            f"--deepspeed {path}: fp16.enabled is true, and this command trains in bfloat16 or "
            "float32: give bf16 instead"
        )
