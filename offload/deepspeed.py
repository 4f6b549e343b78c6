"""Translates a DeepSpeed JSON file into fields of Config, and says what became of each key.

[Note: What a file asks for]
Placement becomes fields of Config. Optimizer, scheduler, precision and batch size are in the user's
own program, and that counts; the Config keeps what the file says of the optimizer, and `attach`
refuses an optimizer that contradicts it. Buffers, buckets and thresholds are left to the planner.
No key is dropped in silence: `deepspeed_keys.json` says of each what it becomes, or why nothing.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Key:
    """A key of DeepSpeed 0.19, as `deepspeed_keys.json` lists them."""

    name: str
    """With its sections: `zero_optimization.stage`."""
    aliases: tuple[str, ...]
    """Other names that DeepSpeed takes, without sections."""
    default: Any
    kind: str
    """What a value is read as: bool, int, float, text or any."""
    choices: tuple[str, ...]
    """The only texts allowed, if any are listed."""
    here: str
    """A field of Config that it becomes; or `yours`: the user's program has it; or `not done`:
    training differs where it is on; or `no meaning`."""
    says: str
    """How it is translated, or why it has no meaning."""


_KINDS = {bool: "bool", int: "int", float: "float", str: "text"}


def _table() -> Iterator[Key]:
    text = Path(__file__).with_name("deepspeed_keys.json").read_text("utf-8")
    for group in json.loads(text):
        for names, default in group["keys"].items():
            name, *aliases = names.split("|")
            kind = group.get("kind") or _KINDS.get(type(default), "any")
            choices = tuple(group.get("choices", ()))
            yield Key(name, tuple(aliases), default, kind, choices, group["here"], group["says"])


def _section_of(name: str) -> str:
    return name.rpartition(".")[0]


KEYS: dict[str, Key] = {key.name: key for key in _table()}

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
_PRECISIONS = ("fp16.enabled", "bf16.enabled")
_COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """What became of a file."""

    fields: Mapping[str, Any]
    """Fields of Config, and what the file asks of each."""
    values: Mapping[str, Any]
    """By proper name of a key, its value; "auto" and null count as absent."""
    auto: tuple[str, ...]
    """Keys that are "auto"."""
    unknown: tuple[str, ...]
    """Keys that DeepSpeed ignores as well."""
    spelled: Mapping[str, str]
    """By proper name of a key, the alias in the file."""

    @property
    def expects(self) -> tuple[tuple[str, Any], ...]:
        """What `conflicts` and `remarks` check: keys of optimizer and scheduler, bf16.enabled."""
        return tuple(
            (name, _hashable(value))
            for name, value in self.values.items()
            if name.startswith(("optimizer.", "scheduler.")) or name == "bf16.enabled"
        )

    def report(self, fields: Mapping[str, Any] | None = None) -> list[str]:
        """What became of each key, a line each; keys without a meaning share a line by reason.

        Args:
            fields: fields of Config that the program set otherwise than the file.
        """
        fields = {**self.fields, **(fields or {})}
        lines: list[str] = []
        reasons: dict[str, list[str]] = {}
        for name, value in self.values.items():
            key = KEYS.get(name) or KEYS[_section_of(name)]  # An argument has its section's.
            told = self.spelled.get(name, name)
            if name in _PRECISIONS and not value:
                lines.append(f"{told} = {shown(value)}: nothing is to be done for it")
            elif key.here == "yours":
                lines.append(f"{told} = {shown(value)}: yours: {key.says}")
            elif key.here == "not done" and _is_on(value):
                lines.insert(0, f"NOT DONE HERE, so training differs from DeepSpeed's: {told}")
            elif key.here in ("no meaning", "not done"):
                reasons.setdefault(key.says, []).append(told)
            else:
                lines.append(f"{told} = {shown(value)}: {self._became(key, fields)}")
        if "gradient_clipping" not in self.values:
            norm = fields["max_grad_norm"]
            how = '"auto"' if "gradient_clipping" in self.auto else "missing"
            whose = "DeepSpeed's default" if norm == self.fields["max_grad_norm"] else "your own"
            lines.append(f"gradient_clipping is {how}: Config.max_grad_norm={norm}, {whose}")
        if auto := [name for name in self.auto if name != "gradient_clipping"]:
            lines.append(f'"auto", so as if missing: {", ".join(auto)}')
        lines += [f"no meaning here: {', '.join(names)}: {why}" for why, names in reasons.items()]
        if self.unknown:
            lines.append(f"unknown, and ignored as DeepSpeed does: {', '.join(self.unknown)}")
        return lines

    def _became(self, key: Key, fields: Mapping[str, Any]) -> str:
        """The fields of Config that a key became."""
        tiers = {fields[kind] for kind in ("params", "gradients", "optimizer")}
        if key.here == "nvme_path" and not tiers & {"nvme", "auto"}:
            return "not needed, as nothing is on nvme"
        names = [key.here]
        offloads = key.name in (f"{_OPTIMIZER}.device", _OLD[_OPTIMIZER])
        if offloads and self.fields["gradients"] != "auto":
            names.append("gradients")
        own = {one: ", your own, which counts" * (fields[one] != self.fields[one]) for one in names}
        return ", ".join(f"Config.{one}={fields[one]!r}{own[one]}" for one in names)


def read(path: str | os.PathLike[str]) -> Translation:
    """Translates the JSON file at `path`.

    Comments (`//`, `#`, `/* */`) and commas before closing brackets are allowed.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON, or a key is misspelt, holds an impossible value or contradicts
            another; the message names file and keys.
    """
    name = os.fspath(path)
    try:
        text = Path(path).read_text("utf-8-sig")
    except OSError as error:
        told = f"{error.strerror}; give the path of a DeepSpeed JSON file"
        raise type(error)(error.errno, told, name) from None
    try:
        return translate(_parsed(text))
    except (ValueError, RecursionError) as error:
        gap = "\n  " if "\n" in str(error) else " "
        raise ValueError(f"{name}:{gap}{error}") from None


def translate(content: Any) -> Translation:
    """Translates the content of a file, with the same errors."""
    if not isinstance(content, Mapping):
        raise ValueError(f"expected one JSON object, found {shown(content)}")
    seen = _Seen()
    values = dict(_flat(content, "", seen))
    if seen.problems:
        raise ValueError("\n  ".join(seen.problems))
    return Translation(
        fields=_fields(values, seen.auto),
        values=values,
        auto=tuple(seen.auto),
        unknown=tuple(seen.unknown),
        spelled=seen.spelled,
    )


@dataclass(slots=True)
class _Seen:
    """What reading a file found beside values; see `Translation`."""

    auto: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    spelled: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Everything wrong with single keys, so that all can be corrected at once."""


def _parsed(text: str) -> Any:
    string = r'("(?:[^"\\]|\\.)*")'
    text = re.sub(string + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", _keep_string, text, flags=re.DOTALL)
    text = re.sub(string + r"|,(?=\s*[}\]])", _keep_string, text, flags=re.DOTALL)
    try:
        return json.loads(text, object_pairs_hook=_once_each)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON, even with comments allowed: {error}; likely a comma, quote or bracket is "
            "missing just before"
        ) from None


def _keep_string(found: re.Match[str]) -> str:
    # Comments leave their line breaks, so that errors name the right line.
    return found[1] or "\n" * found[0].count("\n")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"key {name!r} is there twice")
    return dict(pairs)


def _flat(content: Mapping[str, Any], section: str, seen: _Seen) -> Iterator[tuple[str, Any]]:
    """Proper names and values of all keys in a section that hold a value."""
    given: dict[str, str] = {}
    for last, value in content.items():
        full = f"{section}.{last}".lstrip(".")
        name = ALIASES.get(full, full)
        try:
            if content[given.setdefault(name, last)] != value:
                raise ValueError(f"{full} and {given[name]} are one key, with different values")
            if name != full:
                seen.spelled[name] = full
            if isinstance(value, str) and _is_default(value):
                seen.auto.append(full)
            if name in _SECTIONS:
                yield from _flat(_as_section(name, value), name, seen)
            elif name not in KEYS and section not in _FREE:
                _refuse_misspelt(last, section)
                seen.unknown.append(full)
            elif not _is_default(value):
                yield name, value if section in _FREE else _as_kind(KEYS[name], value)
        except ValueError as error:
            seen.problems.append(str(error))


def _refuse_misspelt(last: str, section: str) -> None:
    """Refuses an unknown key that is like a known one, and any in `zero_optimization`.

    DeepSpeed refuses unknown keys there, too; elsewhere it ignores them.
    """
    names = [name for name in (*KEYS, *ALIASES, *_SECTIONS) if _section_of(name) == section]
    known = [name.rpartition(".")[2] for name in names]
    closed = section.partition(".")[0] == _ZERO
    close = difflib.get_close_matches(last, known, n=1, cutoff=0.6 if closed else 0.85)
    where = f" in {section}" if section else ""
    if close:
        raise ValueError(f"there is no key {last!r}{where}: did you mean {close[0]!r}?")
    if closed:
        raise ValueError(f"there is no key {last!r}{where} in DeepSpeed 0.19: remove it")


def _as_section(name: str, value: Any) -> Mapping[str, Any]:
    if _is_default(value) or value is False:
        return {}
    if value is True and name == _ZERO:  # As old files have it.
        return {"stage": 1}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} holds {shown(value)}: expected an object, {{...}}")
    return value


def _fields(values: Mapping[str, Any], auto: Sequence[str]) -> dict[str, Any]:
    """The fields of Config that a file asks for."""
    if all(values.get(name) for name in _PRECISIONS):
        raise ValueError("fp16.enabled and bf16.enabled are both true: set one of them to false")
    params, optimizer = _tier(values, _PARAM), _tier(values, _OPTIMIZER)
    gradients = "cpu" if optimizer in ("cpu", "nvme") else "auto"
    if optimizer == "cpu" and values.get(f"{_OPTIMIZER}.ratio", 1.0) < 1:
        optimizer = "auto"
    paths = {
        os.path.normpath(path): path
        for section, tier in ((_PARAM, params), (_OPTIMIZER, optimizer))
        if tier == "nvme" and (path := values.get(f"{section}.nvme_path"))
    }
    if "nvme" in (params, optimizer) and not paths:
        raise ValueError(
            "a device is nvme and nvme_path is missing: give the directory of a local drive as "
            "nvme_path beside it"
        )
    clipping = values.get("gradient_clipping", 1.0)
    if clipping < 0:
        raise ValueError(
            f"gradient_clipping holds {clipping}: expected a positive number, or 0 for none"
        )
    return {
        "params": params,
        "gradients": gradients,
        "optimizer": optimizer,
        "nvme_path": tuple(paths.values()),
        "gradient_dtype": "fp32"
        if values.get("data_types.grad_accum_dtype") == "fp32"
        else "param",
        "max_grad_norm": clipping or None,
        "micro_batches": batches(values, auto)[1],
    }


def _tier(values: Mapping[str, Any], section: str) -> str:
    """The tier that a section, or its deprecated switch, asks for."""
    old, now = values.get(_OLD[section]), values.get(f"{section}.device")
    if old and now not in (None, "cpu"):
        raise ValueError(f"{_OLD[section]} is true, and {section}.device is {now}: remove the old")
    if now is None:
        return "cpu" if old else "auto"
    return "device" if now == "none" else str(now)


def batches(values: Mapping[str, Any], auto: Sequence[str]) -> tuple[int | None, int | None]:
    """Samples in a micro-batch of one rank, and backward calls in a step.

    As in DeepSpeed a missing number follows from the others; if only one batch size is given, a
    step has one backward call. What depends on a number that is "auto" is None.

    Raises:
        ValueError: a number is not positive, or they contradict each other.
    """
    whole, micro, count = (values.get(name) for name in _COUNTS)
    for name in _COUNTS:
        if values.get(name, 1) < 1:
            raise ValueError(f"{name} holds {values[name]}: expected a whole number from 1")
    if (whole is None) != (micro is None) and not set(_COUNTS) & set(auto):
        count = count or 1
    if whole is None or (micro is None and count is None):
        return micro, count
    given = os.environ.get("WORLD_SIZE", "")  # Of the whole job; set by launchers.
    ranks = max(1, int(given)) if given.isdecimal() else 1
    found, rest = divmod(whole, (micro or 1) * (count or 1) * ranks)
    if rest or not found or (micro and count and found != 1):
        told = " and ".join(f"{name} {values[name]}" for name in _COUNTS[1:] if name in values)
        raise ValueError(
            f"train_batch_size {whole} with {told} on {ranks} ranks (WORLD_SIZE) do not agree: the "
            "first is the product of the others"
        )
    return micro or found, count or found


def conflicts(expects: Mapping[str, Any], optimizer: Any) -> Iterator[str]:
    """Where an optimizer contradicts a file (`Translation.expects`), in sentences."""
    groups = optimizer.param_groups
    if "scheduler.type" in expects and any("initial_lr" in group for group in groups):
        yield (
            f"scheduler.type is {expects['scheduler.type']}, and a scheduler has been made for the "
            "optimizer already (make it after attach)"
        )
    if "optimizer.type" not in expects:
        return
    asked, mine = str(expects["optimizer.type"]), type(optimizer).__name__
    kind, family = asked.lower(), ("adam", "adamw")
    if mine.lower().removeprefix("cpu") not in (family if kind in family else (kind,)):
        offered = kind in (*family, "sgd", "lion")
        absent = "" if offered else "which is not done here (AdamW, Adam, SGD and Lion are), "
        yield f"optimizer.type is {asked}, {absent}and yours is {mine}"
        return
    params = {
        name.rpartition(".")[2]: value
        for name, value in expects.items()
        if name.startswith("optimizer.params.")
    }
    for name in ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "amsgrad"):
        there = [_hashable(_value_in(group, name)) for group in groups if name in group]
        if name in params and there and plain(params[name]) not in there:
            yield f"optimizer.params.{name} is {shown(params[name])}, and yours is {there[0]}"
    if not plain(params.get("bias_correction", True)):
        yield "optimizer.params.bias_correction is false, and yours corrects"
    decoupled = kind == "adamw" or plain(params.get("adam_w_mode", True))
    for group in groups if kind in family else ():
        if group["weight_decay"] and bool(group.get("decoupled_weight_decay")) != decoupled:
            way = "decoupled (AdamW)" if decoupled else "within the gradient (Adam)"
            yield f"optimizer {asked} has its weight decay {way}, and yours has not"
            return


def _value_in(group: Mapping[str, Any], name: str) -> Any:
    # A scheduler may have changed the learning rate already.
    value = group.get("initial_lr", group["lr"]) if name == "lr" else group[name]
    return value.item() if hasattr(value, "item") else value


def remarks(expects: Mapping[str, Any], dtypes: Collection[str]) -> Iterator[str]:
    """Where a model with parameters of `dtypes` is not what a file expects, in sentences."""
    if expects.get("bf16.enabled") and "float32" in dtypes and "bfloat16" not in dtypes:
        yield (
            "the DeepSpeed file has bf16.enabled true, but no parameter of the model is bfloat16, "
            "so weights and gradients take twice the bytes; DeepSpeed casts the model itself, here "
            "call model.to(torch.bfloat16) before making the optimizer (fp32 masters are kept)"
        )


def _is_default(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() == "auto")


def _is_on(value: Any) -> bool:
    """Whether a switch is on, or a section not switched off."""
    if isinstance(value, Mapping):
        return bool(value) and plain(value.get("enabled", True)) not in (False, 0)
    return bool(value)


def _as_kind(key: Key, value: Any) -> Any:
    """A value as the key's kind: 5e8 is a whole number, "true" a switch."""
    if key.choices:
        if isinstance(value, str) and value.lower() in key.choices:
            return value.lower()
        raise _wrong(key.name, value, f"one of {', '.join(key.choices)}")
    if key.kind == "bool":
        if isinstance(value, (bool, str, int)) and str(value).lower() in _SWITCHES:
            return _SWITCHES[str(value).lower()]
        raise _wrong(key.name, value, "true or false")
    if key.kind in ("int", "float"):
        return number(key.name, value, whole=key.kind == "int")
    if key.kind == "text" and not isinstance(value, str):
        raise _wrong(key.name, value, "a text")
    return value


_SWITCHES = {"true": True, "false": False, "1": True, "0": False}


def number(name: str, value: Any, *, whole: bool) -> int | float:
    """A number of a file, which may be a text.

    Raises:
        ValueError: it is not a number; the message has the key's `name`.
    """
    try:
        found = float("" if isinstance(value, bool) else value)
        if not abs(found) <= 2**63 or (whole and found != int(found)):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        expected = "a whole number, such as 500000000 or 5e8" if whole else "a number"
        raise _wrong(name, value, expected) from None
    return int(found) if whole else found


def plain(value: Any) -> Any:
    """An argument of a class, where numbers and switches may be texts and tuples lists."""
    if isinstance(value, (list, tuple)):
        return tuple(plain(one) for one in value)
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return _SWITCHES.get(value.lower(), value)


def _wrong(name: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{name} holds {shown(value)}: expected {expected}, or auto")


def _hashable(value: Any) -> Any:
    """A value as a Config can keep it."""
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(one) for one in value)
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else value


def shown(value: Any) -> str:
    """A value as a file has it, cut to what a message can bear."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
