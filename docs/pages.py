"""Writes the pages that are made from the code: `python docs/pages.py`. A test holds them to it."""

import ast
import dataclasses
import json
from itertools import groupby, pairwise
from pathlib import Path

from offload import config
from offload.cli.flags import flag
from offload.config import Choice, Config
from offload.deepspeed import KEYS

HERE = Path(__file__).resolve().parent
MARK = "<!-- made by: python docs/pages.py -->\n"

CONFIGURATION = """# Configuration

Every field of `offload.Config` has a working default and is a flag of `offload train`. Sizes
are bytes, or texts: `"8GiB"` is 8 * 1024^3, `"8GB"` and `"8G"` are 8 * 1000^3, in the same way with
K, M and T.

"""


def texts_under_fields() -> dict[str, str]:
    """By field of Config, the docstring under it."""
    parsed = ast.parse(Path(config.__file__).read_text("utf-8"))
    (body,) = (one.body for one in parsed.body if getattr(one, "name", "") == "Config")
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def configuration() -> str:
    """The fields of Config, with the text under each."""
    texts = texts_under_fields()
    parts = []
    for field in dataclasses.fields(Config):
        kind = str(field.type).replace("Choice", str(Choice).replace("typing.", ""))
        kind = kind.replace(" | ", " or ")
        parts.append(f"## {field.name}\n\n`{kind}`, default `{field.default!r}`; ")
        parts.append(f"`{flag(field.name)}`\n\n{texts[field.name]}\n\n")
    return CONFIGURATION + MARK + "\n" + "".join(parts).rstrip() + "\n"


def deepspeed(before: str) -> str:
    """The page for DeepSpeed users: its own text, then the keys, those with one reason together."""
    rows = ["| keys, with DeepSpeed's defaults | here | how, or why not |", "|---|---|---|"]
    for (here, says), keys in groupby(KEYS.values(), lambda key: (key.here, key.says)):
        told = []
        for key in keys:
            default = "" if key.default in (None, {}) else f" ({json.dumps(key.default)})"
            told.append(" or ".join(f"`{name}`" for name in (key.name, *key.aliases)) + default)
        field = f"`{here}`" if here in config.Config.__slots__ else here
        rows.append(f"| {', '.join(told)} | {field} | {says} |")
    return before.partition(MARK)[0] + MARK + "\n" + "\n".join(rows) + "\n"


def pages() -> dict[Path, str]:
    """All pages that are made from the code."""
    coming = HERE / "deepspeed.md"
    return {
        HERE / "configuration.md": configuration(),
        coming: deepspeed(coming.read_text("utf-8")),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, "utf-8")
