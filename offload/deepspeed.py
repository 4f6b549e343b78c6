"""A file of DeepSpeed's becomes a Config, with a report of what each key became and why.

[Note: What a file asks for]
Placement becomes fields of Config. Optimizer, scheduler, precision and batch size are in the user's
own program, which counts; what the file says of the optimizer is kept in the Config, and `attach`
refuses an optimizer that differs. Buffers, buckets and thresholds are found by the planner. What a
key asks for and nothing here does is in the report, never dropped in silence.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.deepspeed_keys import (
    ALIASES,
    BY_NAME,
    FREE_SECTIONS,
    OPEN_SECTIONS,
    OTHER,
    Key,
    known_in,
)
from offload.deepspeed_values import as_kind, hashable, is_default, is_on, shown

_ZERO = "zero_optimization"
_PARAM, _OPTIMIZER = f"{_ZERO}.offload_param", f"{_ZERO}.offload_optimizer"
_GRADIENT_DTYPES = {"fp32": "fp32", "bf16": "param", "fp16": "param"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """What a file became."""

    fields: Mapping[str, Any]
    """Fields of Config, and what the file asks of each."""
    expects: tuple[tuple[str, Any], ...] = ()
    """Keys below `optimizer` and `scheduler` that hold something, and what they hold; and
    bf16.enabled."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """By proper name of a key, what the file holds; "auto" and null are as good as absent."""
    auto: tuple[str, ...] = ()
    """Keys that the file leaves to others."""
    unknown: tuple[str, ...] = ()
    """Keys that neither DeepSpeed nor this table knows, where DeepSpeed ignores them."""
    spelled: Mapping[str, str] = field(default_factory=dict)
    """By proper name of a key, the name that the file has for it, where that is another."""

    def report(
        self, became: Mapping[str, str] | None = None, fields: Mapping[str, Any] | None = None
    ) -> list[str]:
        """What each key became, a line each; those without a meaning together, by reason.

        `became` says by key what a program made of what is its own, `fields` the fields of Config
        where the program has others than the file.
        """
        fields = {**self.fields, **(fields or {})}
        missing = self.missing()
        lines = [f"NOT DONE HERE, so something else is trained: {name}" for name in missing]
        reasons: dict[str, list[str]] = {}
        for name, value in self.values.items():
            key, told = _key_of(name), self.spelled.get(name, name)
            if became and name in became:
                lines.append(f"{told} = {shown(value)}: {became[name]}")
            elif name in _PRECISIONS and not value:
                lines.append(f"{told} = {shown(value)}: nothing is to be done for it")
            elif key.fate == "nothing" and told not in missing:
                reasons.setdefault(key.says, []).append(told)
            elif key.becomes:
                lines.append(f"{told} = {shown(value)}: {self._now(name, fields)}")
            elif told not in missing:
                lines.append(f"{told} = {shown(value)}: yours: {key.says}")
        if "gradient_clipping" not in self.values:
            norm = fields["max_grad_norm"]
            how = '"auto"' if "gradient_clipping" in self.auto else "missing"
            whose = "DeepSpeed's default" if norm == self.fields["max_grad_norm"] else "your own"
            lines.append(f"gradient_clipping is {how}: Config.max_grad_norm={norm}, {whose}")
        if auto := [name for name in self.auto if name != "gradient_clipping"]:
            lines.append(f'"auto", so as if they were not there: {", ".join(auto)}')
        lines += [f"no meaning here: {', '.join(n)}: {why}" for why, n in reasons.items()]
        if self.unknown:
            unknown = [f"{name}{_nearest(name)}" for name in self.unknown]
            lines.append(f"unknown, and ignored as DeepSpeed does: {', '.join(unknown)}")
        return lines

    def _now(self, name: str, fields: Mapping[str, Any]) -> str:
        """The fields of Config that a key became."""
        places = [fields[kind] for kind in ("params", "gradients", "optimizer")]
        if name.endswith("nvme_path") and not {"nvme", "auto"}.intersection(places):
            return "not needed, as nothing is on nvme"
        wanted = [_key_of(name).becomes]
        if (
            name in (f"{_OPTIMIZER}.device", _OLD[_OPTIMIZER])
            and self.fields["gradients"] != "auto"
        ):
            wanted.append("gradients")
        found = []
        for one in wanted:
            value = fields[one]
            own = ", your own, which counts" * (value != self.fields[one])
            found.append(f"Config.{one}={value!r}{own}")
        return ", ".join(found)

    def missing(self) -> list[str]:
        """Keys that are on and change what is trained, and that nothing here does."""
        return [
            self.spelled.get(name, name)
            for name, value in self.values.items()
            if _key_of(name).says == OTHER and is_on(value)
        ]


def read(path: str | os.PathLike[str]) -> Translation:
    """Translates the JSON file at `path`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, a key is misspelt, holds what it cannot, or contradicts another;
            the message names file and key.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except OSError as error:
        told = f"{error.strerror}; {_UNREADABLE}"
        raise type(error)(error.errno, told, os.fspath(path)) from error
    try:
        return translate(_parsed(text))
    except ValueError as error:
        told = str(error)
        gap = "\n  " if "\n" in told else " "
        raise ValueError(f"{os.fspath(path)}:{gap}{told}") from None
    except RecursionError:
        raise ValueError(f"{os.fspath(path)}: nested too deeply for a configuration") from None


_UNREADABLE = (
    "likely it is misspelt, or meant from another working directory; give the whole path of a JSON "
    "file"
)


def translate(content: Any) -> Translation:
    """Translates what is in a file, with the same errors."""
    if not isinstance(content, Mapping):
        raise ValueError(f"expected one JSON object, found {shown(content)}")
    seen = _Seen()
    values = dict(_flat(content, "", seen))
    if not seen.problems:
        return Translation(
            fields=_fields(values, seen.auto),
            expects=tuple(
                (name, hashable(value))
                for name, value in values.items()
                if name.startswith(("optimizer.", "scheduler.")) or name == "bf16.enabled"
            ),
            values=values,
            unknown=tuple(seen.unknown),
            auto=tuple(seen.auto),
            spelled=seen.spelled,
        )
    raise ValueError("\n  ".join(seen.problems))


@dataclass(slots=True)
class _Seen:
    """What reading came upon beside values; see `Translation`."""

    unknown: list[str] = field(default_factory=list)
    spelled: dict[str, str] = field(default_factory=dict)
    auto: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """All that is wrong with single keys, so that they can be mended at once."""


def _parsed(text: str) -> Any:
    """JSON with comments (`//`, `#`, `/* */`) and commas before closing brackets."""
    string = r'("(?:[^"\\]|\\.)*")'
    text = re.sub(string + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", _keep_string, text, flags=re.DOTALL)
    text = re.sub(string + r"|,(?=\s*[}\]])", _keep_string, text, flags=re.DOTALL)
    try:
        return json.loads(text, object_pairs_hook=_once_each)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON, even with comments allowed: {error}; likely a comma, quote or bracket is "
            "missing just before; mend it there"
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


def _flat(found: Mapping[str, Any], section: str, seen: _Seen) -> Iterator[tuple[str, Any]]:
    """Proper names and values of all keys that hold something; all else goes to `seen`."""
    names: dict[str, str] = {}
    for given, value in found.items():
        full = f"{section}.{given}".lstrip(".")
        name = ALIASES.get(full, full)
        try:
            if name in names and value != found[names[name]]:
                told = f"{full} and {names[name]} are one key, and hold different values"
                raise ValueError(told)
            if name in names:
                continue
            names[name] = given
            if name != full:
                seen.spelled[name] = full
            if isinstance(value, str) and is_default(value):
                seen.auto.append(full)
            if name not in BY_NAME and given not in known_in(section):
                _refuse_misspelt(given, section)
            if section in FREE_SECTIONS:
                if not is_default(value):
                    yield full, value
            elif name not in BY_NAME:
                seen.unknown.append(full)
            elif BY_NAME[name].kind == "section" or name in FREE_SECTIONS:
                yield from _flat(_as_section(name, value), name, seen)
            elif not is_default(value):
                yield name, as_kind(BY_NAME[name], value)
        except ValueError as error:
            seen.problems.append(str(error))


def _nearest(name: str) -> str:
    """What a key that is ignored may have been meant for, or nothing."""
    section, _, given = name.rpartition(".")
    close = difflib.get_close_matches(given, known_in(section), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _refuse_misspelt(given: str, section: str) -> None:
    where = f" in {section}" if section else ""
    open_ = section in OPEN_SECTIONS + FREE_SECTIONS
    cutoff = 0.88 if section in FREE_SECTIONS else 0.85 if open_ else 0.6
    close = difflib.get_close_matches(given, known_in(section), n=1, cutoff=cutoff)
    if close:
        raise ValueError(f"there is no key {given!r}{where}: did you mean {close[0]!r}?")
    if not open_:
        raise ValueError(
            f"there is no key {given!r}{where} in DeepSpeed 0.19, which refuses what it does not "
            "know there: remove it"
        )


def _as_section(name: str, value: Any) -> Mapping[str, Any]:
    if value is None or value == "auto" or value is False:
        return {}
    if value is True and name == _ZERO:  # As old files have it.
        return {"stage": 1}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} holds {shown(value)}: expected an object, {{...}}")
    return value


def _fields(values: Mapping[str, Any], auto: Sequence[str]) -> dict[str, Any]:
    """The fields of Config that a file asks for."""
    if all(values.get(name) for name in _PRECISIONS):
        raise ValueError(
            f"{' and '.join(_PRECISIONS)} are both true: the weights have one type; set one of the "
            "two to false"
        )
    places = {"params": _place(values, _PARAM), "optimizer": _place(values, _OPTIMIZER)}
    if places["optimizer"] == "cpu" and values.get(f"{_OPTIMIZER}.ratio", 1.0) < 1:
        places["optimizer"] = "auto"
    on_host = values.get(f"{_OPTIMIZER}.device", "cpu" if values.get(_OLD[_OPTIMIZER]) else "none")
    fields: dict[str, Any] = dict(places)
    fields["gradients"] = "cpu" if on_host != "none" else "auto"
    paths = [
        values.get(f"{section}.nvme_path")
        for section, field_name in ((_PARAM, "params"), (_OPTIMIZER, "optimizer"))
        if places[field_name] == "nvme"
    ]
    if paths and not any(paths):
        raise ValueError(
            "a device is nvme and nvme_path is missing: give the directory of a local drive as "
            "nvme_path beside it"
        )
    fields["nvme_path"] = tuple({os.path.normpath(path): path for path in paths if path}.values())
    fields["max_grad_norm"] = values.get("gradient_clipping", 1.0) or None
    if (fields["max_grad_norm"] or 1.0) < 0:
        raise ValueError(
            f"gradient_clipping holds {values['gradient_clipping']}: expected a positive number, "
            "or 0 for none"
        )
    fields["micro_batches"] = batches(values, auto)[1]
    dtype = values.get("data_types.grad_accum_dtype", "bf16")
    fields["gradient_dtype"] = _GRADIENT_DTYPES[dtype]
    return fields


_PRECISIONS = ("fp16.enabled", "bf16.enabled")

_OLD = {_PARAM: f"{_ZERO}.cpu_offload_param", _OPTIMIZER: f"{_ZERO}.cpu_offload"}


def _place(values: Mapping[str, Any], section: str) -> str:
    """The tier that a section, or the switch that it once was, asks for."""
    old, now = values.get(_OLD[section]), values.get(f"{section}.device")
    if old and now not in (None, "cpu"):
        raise ValueError(f"{_OLD[section]} is true, and {section}.device is {now}: remove the old")
    if now is None:
        return "cpu" if old else "auto"
    return "device" if now == "none" else str(now)


def batches(values: Mapping[str, Any], auto: Sequence[str]) -> tuple[int | None, int | None]:
    """Samples in a micro-batch of a rank, and backward calls in a step.

    DeepSpeed finds those of three numbers that are missing by the others; where only one of the
    first two is there, by one backward call. What depends on a number that is "auto" is left to
    whoever fills it in: None.

    Raises:
        ValueError: a number is none that can be, or they contradict each other.
    """
    whole, micro, count = (values.get(name) for name in _COUNTS)
    for name in _COUNTS:
        if values.get(name, 1) < 1:
            raise ValueError(f"{name} holds {values[name]}: expected a whole number from 1")
    if (whole is None) != (micro is None) and not set(_COUNTS) & set(auto):
        count = count or 1
    if whole is None or (micro is None and count is None):
        return micro, count
    ranks = world_size()
    found, rest = divmod(whole, (micro or 1) * (count or 1) * ranks)
    if rest or not found or (micro and count and found != 1):
        others = (("train_micro_batch_size_per_gpu", micro), ("gradient_accumulation_steps", count))
        told = " and ".join(f"{name} {value}" for name, value in others if value)
        raise ValueError(
            f"train_batch_size {whole} with {told} on {ranks} ranks (WORLD_SIZE) do not agree: the "
            "first is the product of the others"
        )
    return micro or found, count or found


_COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def world_size() -> int:
    """Ranks of the whole job, as launchers tell; 1 without one."""
    given = os.environ.get("WORLD_SIZE", "")
    return int(given) if given.isascii() and given.isdigit() and int(given) else 1


def _key_of(name: str) -> Key:
    """The row of the table for a key, which may be an argument in a free section."""
    return BY_NAME[name] if name in BY_NAME else BY_NAME[name.rpartition(".")[0]]
