"""Translates a DeepSpeed JSON file into fields of Config, and says what became of each key.

[Note: What a file asks for]
Placement, clipping and accumulation become fields of Config. Optimizer, scheduler, precision and
batch size are in the user's own program, and that counts. Buffers, buckets and thresholds are left
to the planner. No key is dropped in silence: `deepspeed_keys.json` says of each what it becomes, or
why nothing. Only values that are used are checked, by `Config` or here.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class JsonKey:
    """A key of DeepSpeed 0.19, as `deepspeed_keys.json` lists them."""

    name: str
    """With its sections: `zero_optimization.stage`."""
    aliases: tuple[str, ...]
    """Other names that DeepSpeed takes, without sections."""
    default: Any
    choices: tuple[str, ...]
    """The only texts allowed, if any are listed."""
    here: str
    """A field of Config that it becomes; or `yours`: the user's program has it; or `not done`:
    training differs where it is on; or `no meaning`."""
    says: str
    """How it is translated, or why it has no meaning."""


def _table() -> Iterator[JsonKey]:
    for group in json.loads(Path(__file__).with_name("deepspeed_keys.json").read_text("utf-8")):
        for names, default in group["keys"].items():
            name, *aliases = names.split("|")
            choices = tuple(group.get("choices", ()))
            yield JsonKey(name, tuple(aliases), default, choices, group["here"], group["says"])


def _section_of(name: str) -> str:
    return name.rpartition(".")[0]


KEYS: dict[str, JsonKey] = {key.name: key for key in _table()}

ALIASES: dict[str, str] = {"bfloat16": "bf16"}
"""The proper name of each other name."""
for _key in KEYS.values():
    ALIASES |= {f"{_section_of(_key.name)}.{one}".lstrip("."): _key.name for one in _key.aliases}

_FREE = ("optimizer.params", "scheduler.params")
"""Sections with any key in them: the arguments of a class."""

_SECTIONS = {*map(_section_of, KEYS), *_FREE} - {""}
_ZERO = "zero_optimization"
_PARAM, _OPTIMIZER = f"{_ZERO}.offload_param", f"{_ZERO}.offload_optimizer"
_OLD = {_PARAM: f"{_ZERO}.cpu_offload_param", _OPTIMIZER: f"{_ZERO}.cpu_offload"}
"""The deprecated switch of each section."""
_COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True, slots=True)
class Translation:
    """What became of a file."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of Config, and what the file asks of each."""
    values: dict[str, Any] = field(default_factory=dict)
    """By proper name of a key, its value; "auto" and null count as absent."""
    auto: list[str] = field(default_factory=list)
    """Keys that are "auto"."""
    unknown: list[str] = field(default_factory=list)
    """Keys that DeepSpeed ignores as well."""

    def report(self) -> list[str]:
        """What became of each key, a line each; keys without a meaning share a line by reason."""
        lines: list[str] = []
        reasons: dict[str, list[str]] = {}
        for name, value in self.values.items():
            key = KEYS.get(name) or KEYS[_section_of(name)]  # An argument has its section's.
            if key.here == "not done" and _is_on(value):
                lines.insert(0, f"NOT DONE HERE, so training differs from DeepSpeed's: {name}")
            elif key.here in ("no meaning", "not done"):
                reasons.setdefault(key.says, []).append(name)
            elif key.here != "yours":
                became = f"Config.{key.here}={self.fields[key.here]!r}"
                lines.append(f"{name} = {_shown(value)}: {became}")
            else:
                told = "nothing is to be done for it" if value is False else f"yours: {key.says}"
                lines.append(f"{name} = {_shown(value)}: {told}")
        if "gradient_clipping" not in self.values:
            norm = self.fields["max_grad_norm"]
            told = f"Config.max_grad_norm={norm}, DeepSpeed's default"
            lines.append(f"gradient_clipping is not set: {told}")
        if self.fields["gradients"] != "auto":
            lines.append("with the optimizer states go gradients: Config.gradients='cpu'")
        if self.auto:
            lines.append(f'"auto", so as if missing: {", ".join(self.auto)}')
        lines += [f"no meaning here: {', '.join(names)}: {why}" for why, names in reasons.items()]
        if self.unknown:
            lines.append(f"unknown, and ignored as DeepSpeed does: {', '.join(self.unknown)}")
        return lines


def read(path: str | os.PathLike[str]) -> Translation:
    """Translates the JSON file at `path`, with comments (`//`, `#`, `/* */`) and commas before
    closing brackets allowed. Raises OSError, and ValueError where it is not JSON, or a key is
    misspelt or holds an impossible value; the message names file and key."""
    string = r'("(?:[^"\\]|\\.)*")'
    text = Path(path).read_text("utf-8-sig")
    text = re.sub(string + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", _keep_string, text, flags=re.DOTALL)
    text = re.sub(string + r"|,(?=\s*[}\]])", _keep_string, text, flags=re.DOTALL)
    try:
        return translate(json.loads(text))
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def _keep_string(found: re.Match[str]) -> str:
    # Comments leave their line breaks, so that errors name the right line.
    return found[1] or "\n" * found[0].count("\n")


def translate(content: Any) -> Translation:
    """Translates the content of a file, with the same errors."""
    found = Translation()
    _fill(found, content, "")
    found.fields.update(_fields(found.values))
    return found


def _fill(found: Translation, content: Any, section: str) -> None:
    if not isinstance(content, Mapping):
        raise ValueError(f"{section or 'it'} holds {_shown(content)}: expected an object, {{...}}")
    for last, value in content.items():
        full = f"{section}.{last}".lstrip(".")
        name = ALIASES.get(full, full)
        if name not in KEYS and name not in _SECTIONS and section not in _FREE:
            _refuse_misspelt(last, section)
            found.unknown.append(full)
        elif isinstance(value, str) and value.lower() == "auto":
            found.auto.append(full)
        elif value is None or (name in _SECTIONS and value is False):
            continue
        elif name in _SECTIONS:
            _fill(found, value, name)
        else:
            found.values[name] = value if section in _FREE else _as_kind(KEYS[name], value)


def _refuse_misspelt(last: str, section: str) -> None:
    """Refuses an unknown key that is like a known one, and as DeepSpeed any in `_ZERO`."""
    names = [name for name in (*KEYS, *ALIASES, *_SECTIONS) if _section_of(name) == section]
    known = [name.rpartition(".")[2] for name in names]
    closed = section.partition(".")[0] == _ZERO
    close = difflib.get_close_matches(last, known, n=1, cutoff=0.6 if closed else 0.85)
    if close or closed:
        likely = f"did you mean {close[0]!r}?" if close else "DeepSpeed 0.19 has none: remove it"
        raise ValueError(f"there is no key {last!r} in {section or 'the file'}: {likely}")


def _as_kind(key: JsonKey, value: Any) -> Any:
    """A value as its key's kind, where it is used: 5e8 is a whole number, "true" a switch."""
    text, kind = str(value).lower(), type(key.default)
    try:
        if key.here in ("no meaning", "not done"):
            return value
        if key.choices:
            expected = f"one of {', '.join(key.choices)}"
            return key.choices[key.choices.index(text)]
        if kind is bool:
            expected = "true or false"
            return {"true": True, "1": True, "false": False, "0": False}[text]
        if kind is float:
            expected = "a number"
            return float(text)
        if key.name in _COUNTS:
            expected = "a whole number from 1"
            if float(text) < 1 or float(text) % 1:
                raise ValueError
            return int(float(text))
    except (ValueError, KeyError):
        raise ValueError(f"{key.name} holds {_shown(value)}: expected {expected}") from None
    return str(value)


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    params, optimizer = _tier(values, _PARAM), _tier(values, _OPTIMIZER)
    gradients = "cpu" if optimizer in ("cpu", "nvme") else "auto"
    if optimizer == "cpu" and values.get(f"{_OPTIMIZER}.ratio", 1.0) < 1:
        optimizer = "auto"
    paths = {
        os.path.normpath(path): path
        for section, tier in ((_PARAM, params), (_OPTIMIZER, optimizer))
        if tier == "nvme" and (path := values.get(f"{section}.nvme_path"))
    }
    sums = values.get("data_types.grad_accum_dtype")
    return {
        "params": params,
        "gradients": gradients,
        "optimizer": optimizer,
        "nvme_path": tuple(paths.values()),
        "gradient_dtype": "fp32" if sums == "fp32" else "param",
        "max_grad_norm": values.get("gradient_clipping", 1.0) or None,
        "micro_batches": _micro_batches(values),
    }


def _tier(values: Mapping[str, Any], section: str) -> str:
    """The tier that a section, or its deprecated switch, asks for."""
    tier = values.get(f"{section}.device", "cpu" if values.get(_OLD[section]) else "auto")
    return "device" if tier == "none" else str(tier)


def _micro_batches(values: Mapping[str, Any]) -> int | None:
    """Backward calls in a step, where the file says or implies them."""
    whole, micro, count = (values.get(name) for name in _COUNTS)
    if whole is None or micro is None:
        return count
    ranks = int(os.environ.get("WORLD_SIZE") or 1)  # Of the whole job; set by launchers.
    found, rest = divmod(whole, micro * ranks)
    if rest or not found or count not in (None, found):
        raise ValueError(
            f"train_batch_size {whole} with {_COUNTS[1]} {micro} and {_COUNTS[2]} {count} on "
            f"{ranks} ranks (WORLD_SIZE) do not agree: the first is the product of the others"
        )
    return int(found)


def _is_on(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and value.get("enabled", True) not in (False, "false")
    return bool(value)


def _shown(value: Any) -> str:
    """A value as a file has it, cut to what a message can bear."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
