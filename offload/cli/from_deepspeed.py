"""`offload train --deepspeed FILE`: what a file of DeepSpeed's is in flags of this command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload import deepspeed
from offload.cli import BadInput
from offload.cli.flags import flag, path_word
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

_WHOLE = ("batch", "steps", "warmup")
"""Settings that are whole numbers."""

_ALWAYS = {"amsgrad": False, "bias_correction": True, "maximize": False}
"""What AdamW is here, by argument: another value would be other mathematics."""

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
        try:
            return Adopted(path, found, _settings(path, found))
        except ValueError as error:
            raise BadInput(f"--deepspeed {path}: {error}") from None

    def flags(self) -> list[str]:
        """What the file says, as flags."""
        plain, config = Config(), self.translation.config
        chosen = {name: getattr(config, name) for name in FIELDS}
        found = []
        for name, value in (*chosen.items(), *self.settings.items()):
            if name == "nvme_path" and value:
                found += [flag(name), *map(path_word, value)]
            elif value is not None and (name not in FIELDS or value != getattr(plain, name)):
                found.append(f"{flag(name)}={value}")
        return found

    def report(self, settings: Any) -> list[str]:
        """What each key became, a line each, in the settings that came of file and flags."""

        def now(name: str) -> str:
            value = getattr(settings, name)
            flagged = name in self.settings and value != self.settings[name]
            return f"{flag(name)} {value}" + (" (your flag wins)" if flagged else "")

        found = self.translation
        became = dict.fromkeys(found.values, "ignored: this command has nothing of the kind")
        became |= {key: now(name) for key, name in _SAME.items()}
        became |= dict.fromkeys(("optimizer.type", f"{_ADAM}adam_w_mode"), "this command's AdamW")
        became[f"{_ADAM}betas"] = f"{now('beta1')}, {now('beta2')}"
        became |= {f"{_ADAM}{name}": "as it is here" for name in _ALWAYS}
        became["scheduler.type"] = (
            "this command's own schedule: a linear rise in --warmup steps, then a linear fall to a "
            "twentieth"
        )
        became |= dict.fromkeys(("bf16.enabled", "fp16.enabled"), now("dtype"))
        lines = found.report(became, settings.placing)
        if "train_batch_size" in found.values and "batch" in self.settings:
            lines.append(
                f"a micro-batch of that, on {deepspeed.world_size()} ranks: {now('batch')}"
            )
        if "bf16.enabled" not in (*found.values, *found.auto):
            lines.append(f"bf16.enabled is missing: {now('dtype')}, where DeepSpeed has float32")
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


def _settings(path: str, found: deepspeed.Translation) -> dict[str, Any]:
    """What a file says of the settings of the command, beside those of the engine.

    Raises:
        BadInput: it contradicts itself, or asks for what this command has not.
        ValueError: a key holds no number where one is needed.
    """
    values = found.values
    _refuse_others(path, values)
    chosen: dict[str, Any] = {}
    for key, name in _SAME.items():
        if key not in values:
            continue
        value = deepspeed.number(key, values[key], whole=name in _WHOLE)
        if chosen.setdefault(name, value) != value:
            raise BadInput(
                f"--deepspeed {path}: {key} is {value}, and elsewhere {chosen[name]}: this "
                f"command has one {flag(name)}; make them equal"
            )
    betas = values.get(f"{_ADAM}betas")
    if betas is not None:
        if not isinstance(betas, list) or len(betas) != 2:
            raise BadInput(f"--deepspeed {path}: {_ADAM}betas holds {betas}: expected two numbers")
        pair = [deepspeed.number(f"{_ADAM}betas", beta) for beta in betas]
        chosen["beta1"], chosen["beta2"] = pair
    if "bf16.enabled" in values:
        chosen["dtype"] = "bfloat16" if values["bf16.enabled"] else "float32"
    batch, _ = deepspeed.batches(values, found.auto)
    return chosen if batch is None else chosen | {"batch": batch}


def _refuse_others(path: str, values: Mapping[str, Any]) -> None:
    kind = str(values.get("optimizer.type", "AdamW"))
    decoupled = kind.lower() == "adamw" or values.get(f"{_ADAM}adam_w_mode", True)
    if kind.lower() not in ("adam", "adamw") or not decoupled:
        raise BadInput(
            f"--deepspeed {path}: optimizer.type is {kind}, and this command trains with AdamW "
            "alone: remove the section, or use offload.attach with an optimizer of your own"
        )
    for name, value in _ALWAYS.items():
        if values.get(f"{_ADAM}{name}", value) != value:
            raise BadInput(
                f"--deepspeed {path}: {_ADAM}{name} is not {str(value).lower()}, as it always is "
                "in this command: remove it, or use offload.attach with an optimizer of your own"
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
