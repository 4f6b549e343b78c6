"""What a value in a file of DeepSpeed's means, where JSON leaves that open. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from offload.deepspeed_keys import Key


def is_default(value: Any) -> bool:
    """Whether a file leaves a key to others, by "auto" or null."""
    return value is None or (isinstance(value, str) and value.lower() == "auto")


def is_on(value: Any) -> bool:
    """Whether a switch is on, or a section not switched off."""
    if isinstance(value, Mapping):
        return bool(value) and plain(value.get("enabled", True)) not in (False, 0)
    return bool(value)


def as_kind(key: Key, value: Any) -> Any:
    """The value as the key's kind."""
    if key.choices:
        if isinstance(value, str) and value.lower() in key.choices:
            return value.lower()
        raise _wrong(key.name, value, f"one of {', '.join(key.choices)}")
    if key.kind == "bool":
        if isinstance(value, (bool, str, int)) and str(value).lower() in _SWITCHES:
            return _SWITCHES[str(value).lower()]
        # An old file may have a whole section in place of true.
        if isinstance(value, dict) and "cpu_offload" in key.name:
            return True
        raise _wrong(key.name, value, "true or false")
    if key.kind in ("int", "float"):
        return number(key.name, value, whole=key.kind == "int")
    if key.kind == "text" and not isinstance(value, str):
        raise _wrong(key.name, value, "a text")
    return value


_SWITCHES = {"true": True, "false": False, "1": True, "0": False}


def number(name: str, value: Any, *, whole: bool) -> int | float:
    """A number as a file has it: 5e8 and texts too.

    Raises:
        ValueError: it is none; the message has the key's `name`.
    """
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise TypeError
        found = float(value)
        if not abs(found) <= 2**63 or (whole and found != int(found)):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        expected = "a whole number, such as 500000000 or 5e8" if whole else "a number"
        raise _wrong(name, value, expected) from None
    return int(found) if whole else found


def plain(value: Any) -> Any:
    """What an argument of a class means: a number or a switch may be a text, a list is a tuple."""
    if isinstance(value, (list, tuple)):
        return tuple(plain(one) for one in value)
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return _SWITCHES.get(value.lower(), value)


def _wrong(name: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{name} holds {shown(value)}: expected {expected}, or auto")


def hashable(value: Any) -> Any:
    """What a file holds, as a Config can keep it."""
    if isinstance(value, (list, tuple)):
        return tuple(hashable(one) for one in value)
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else value


def shown(value: Any) -> str:
    """A value as a file has it, and no longer than a message can bear."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _TEXT_MAX else f"{text[: _TEXT_MAX - 3]}..."


_TEXT_MAX = 60
