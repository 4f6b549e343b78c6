"""Writes the pages that are made from the code: `python docs/pages.py`. A test holds them to it."""

import dataclasses
from pathlib import Path

from offload import deepspeed_keys
from offload.cli.flags import flag
from offload.config import Config

HERE = Path(__file__).resolve().parent
MARK = "<!-- made by: python docs/pages.py -->\n"

CONFIGURATION = """# Configuration

Every field of `offload.Config` has a working default, is a flag of `offload train` and a key of its
`--config FILE` (JSON). Sizes are bytes, or texts: `"8GiB"` is 8 * 1024^3, `"8GB"` and `"8G"` are
8 * 1000^3, in the same way with K, M and T.

"""


def configuration() -> str:
    """The fields of Config, with the text under each."""
    texts = vars(Config)["__slots__"]
    parts = []
    for field in dataclasses.fields(Config):
        kind = str(field.type).replace(" | ", " or ")
        text = " ".join(texts[field.name].split())
        parts.append(f"## {field.name}\n\n`{kind}`, default `{field.default!r}`; ")
        parts.append(f"`{flag(field.name)}`\n\n{text}\n\n")
    return CONFIGURATION + MARK + "\n" + "".join(parts).rstrip() + "\n"


def deepspeed(before: str) -> str:
    """The page for who comes from DeepSpeed: its own text, then the table."""
    return before.partition(MARK)[0] + MARK + "\n" + deepspeed_keys.page()


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
