"""`offload train --deepspeed FILE`: what a file of DeepSpeed's is in flags of this command."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload import deepspeed, deepspeed_values
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

_FLOORS = {"WarmupDecayLR": 0.0, "WarmupLR": 1.0}
"""By kind of scheduler that this command has, too, what is left of the learning rate at the end."""


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
            raise BadInput(f"--deepspeed {path} cannot be read: {error.strerror}") from error
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
        values = self.translation.values
        ignored = {
            key: "ignored: this command has nothing like it"
            for key in values
            if key.startswith((_ADAM, _WARMUP))
        }
        scaling = {
            key: f"--dtype {settings.dtype} takes no scaling of the loss"
            for key in values
            if key.startswith("fp16.")
        }
        same = {
            key: f"{flag(name)} {getattr(settings, name)}"
            + ", your own, which counts" * (getattr(settings, name) != self.settings[name])
            for key, name in _SAME.items()
            if name in self.settings
        }
        became = {**ignored, **scaling, **same, **_AS_HERE}
        steps, asked = settings.steps, self.settings.get("steps", settings.steps)
        if steps != asked:
            became[f"{_WARMUP}total_num_steps"] = (
                f"--steps {steps}, your own, which counts: the schedule is that of {steps} steps"
            )
        became["scheduler.type"] = (
            f"a linear rise in --warmup {settings.warmup} steps, then "
            + ("no fall" if settings.lr_floor == 1 else "a linear fall")
            + f" (--lr-floor {settings.lr_floor:g})"
        )
        if f"{_WARMUP}warmup_type" not in values:
            became["scheduler.type"] += "; DeepSpeed's own default rises by the logarithm"
        became["bf16.enabled"] = f"--dtype {settings.dtype}"
        if values.get("fp16.enabled"):
            became["fp16.enabled"] = f"--dtype {settings.dtype}, your own, which counts"
        elif "fp16.enabled" in values:
            del became["fp16.enabled"]
        if (whole := "train_batch_size") in values:
            became[whole] = f"--batch {settings.batch} --micro-batches {settings.micro_batches}"
        placing = {name: getattr(settings.placing, name) for name in self.translation.fields}
        lines = self.translation.report(became, placing)
        if "dtype" not in self.settings and not values.get("fp16.enabled"):
            lines.append(f"bf16 and fp16 say nothing: --dtype {settings.dtype} as without it")
        return lines

    def refuse_conflicts(self, settings: Any, own: Collection[str]) -> None:
        """Refuses what this command has not, and settings that contradict the file's.

        Those of its optimizer and scheduler must agree with it. `own` are the names of the settings
        that the user gave beside the file.

        Raises:
            BadInput: something is refused; the message has all that the command has not.
        """
        if others := list(_others(self.translation.values, own)):
            gap = "\n  " if len(others) > 1 else " "
            raise BadInput(f"--deepspeed {self.path}:{gap}" + "\n  ".join(others))
        for name in ("lr", "weight_decay", "beta1", "beta2", "eps", "warmup", "lr_floor"):
            mine, theirs = getattr(settings, name), self.settings.get(name)
            if theirs is not None and mine != theirs:
                raise BadInput(
                    f"{flag(name)} {mine} contradicts {self.path}, which has {theirs}: leave out "
                    "one of the two"
                )


_AS_HERE = {
    "optimizer.type": "this command's AdamW",
    f"{_ADAM}betas": "--beta1 and --beta2",
    f"{_ADAM}adam_w_mode": "so it is here",
    f"{_ADAM}bias_correction": "so it is here",
    f"{_WARMUP}warmup_type": "so it is here",
    f"{_WARMUP}warmup_min_lr": "so it is here",
}
"""What this command does anyway, or was refused."""


def _settings(path: str, values: Mapping[str, Any], auto: Sequence[str]) -> dict[str, Any]:
    """What a file says of the settings of the command, beside those of the engine."""
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
    if values.get("scheduler.type") in _FLOORS:
        found["lr_floor"] = _FLOORS[values["scheduler.type"]]
    batch, _ = deepspeed.batches(values, auto)
    return found if batch is None else found | {"batch": batch}


def _number(path: str, key: str, value: Any, *, whole: bool) -> int | float:
    try:
        return deepspeed_values.number(key, value, whole=whole)
    except ValueError as error:
        raise BadInput(f"--deepspeed {path}: {error}") from None


def _others(values: Mapping[str, Any], own: Collection[str]) -> Iterator[str]:
    """What would be other mathematics than this command's, in sentences."""

    def of(key: str, default: Any) -> Any:
        return deepspeed_values.plain(values.get(key, default))

    kind = str(values.get("optimizer.type", "AdamW"))
    if kind.lower() not in ("adam", "adamw"):
        yield (
            f"optimizer.type is {kind}, and this command trains with AdamW alone: remove the "
            "section, or use offload.attach with an optimizer of your own"
        )
    elif kind.lower() == "adam" and not of(f"{_ADAM}adam_w_mode", True):
        yield (
            f"{_ADAM}adam_w_mode is false, which is Adam and not AdamW, and this command trains "
            "with AdamW alone: remove the key, or use offload.attach with an optimizer of your own"
        )
    if (
        of(f"{_ADAM}amsgrad", False)
        or of(f"{_ADAM}maximize", False)
        or not of(f"{_ADAM}bias_correction", True)
    ):
        yield (
            "optimizer.params asks for amsgrad, maximize or no bias_correction, and this command's "
            "AdamW has none of that: remove it, or use offload.attach"
        )
    if values.get("fp16.enabled") and "dtype" not in own:
        yield (
            "fp16.enabled is true, and this command trains in bfloat16 or float32: write "
            '"bf16": {"enabled": true} in the place of the section fp16, or say --dtype bfloat16'
        )
    schedule = values.get("scheduler.type", "WarmupLR")
    if schedule not in _FLOORS:
        yield (
            f"scheduler.type is {schedule}, and this command has {' and '.join(_FLOORS)} alone: "
            "remove the section, or use offload.attach in a loop with your scheduler"
        )
        return
    rises = of(f"{_WARMUP}warmup_type", "linear")
    if rises != "linear":
        yield (
            f"{_WARMUP}warmup_type is {deepspeed_values.shown(rises)}, and this command's learning "
            'rate rises in a line: write "linear", or use offload.attach with your scheduler'
        )
    if of(f"{_WARMUP}warmup_min_lr", 0):
        yield (
            f"{_WARMUP}warmup_min_lr is {values[f'{_WARMUP}warmup_min_lr']}, and this command's "
            "learning rate rises from 0: write 0, or use offload.attach with your scheduler"
        )
