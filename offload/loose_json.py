"""JSON as people write it: comments (`//`, `#`, `/* */`), and commas before closing brackets."""

from __future__ import annotations

import json
import re
from typing import Any


def loads(text: str) -> Any:
    """What a text holds.

    Raises:
        ValueError: it is no JSON, even so, or a key is in an object twice.
        RecursionError: it is nested too deeply.
    """
    string = r'("(?:[^"\\]|\\.)*")'
    text = re.sub(string + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", _keep_string, text, flags=re.DOTALL)
    text = re.sub(string + r"|,(?=\s*[}\]])", _keep_string, text, flags=re.DOTALL)
    try:
        return json.loads(text, object_pairs_hook=_once_each)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON, even with comments allowed: {error}") from None


def _keep_string(found: re.Match[str]) -> str:
    # Comments leave their line breaks, so that errors name the right line.
    return found[1] or "\n" * found[0].count("\n")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"key {name!r} is there twice")
    return dict(pairs)
