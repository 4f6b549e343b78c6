"""Flags derived from a dataclass by tyro, and what is wrong with them told in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import tyro

from offload.cli import BadInput, nearest
from offload.cli.console import Output

Settings = TypeVar("Settings")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AsJson:
    """What each command that shows something may be told."""

    json: bool = False
    """One JSON object on standard output, nothing else there."""


def flag(name: str) -> str:
    """The command-line spelling of a field: `seq_len` is `--seq-len`."""
    return "--" + name.replace("_", "-")


def check_field(settings: Any, name: str, right: bool, expected: str) -> None:
    """Refuses what a field holds unless it is `right`."""
    if not right:
        value = getattr(settings, name)
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        raise ValueError(f"{flag(name)} {shown}: expected {expected}")


def parse_flags(
    kind: type[Settings],
    command: str,
    flags: Sequence[str],
    registry: tyro.constructors.ConstructorRegistry | None = None,
    default: Settings | None = None,
) -> Settings:
    """The settings that `flags` of a command ask for: `kind`, whose fields are the flags, and which
    are else those of `default`."""
    registry = registry or tyro.constructors.ConstructorRegistry()
    defaults: Any = {} if default is None else {"default": default}
    if {"-h", "--help"}.intersection(flags):
        flags = ["--help"]  # After an argument tyro would leave that out of the help.
    told, shown, columns = io.StringIO(), io.StringIO(), os.environ.get("COLUMNS")
    if list(flags) != ["--help"]:
        os.environ["COLUMNS"] = "100000"  # No message is wrapped.
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(shown):
            found: Settings = tyro.cli(
                kind, prog=command, args=flags, registry=registry, **defaults
            )
            return found
    except ValueError as error:
        raise BadInput(str(error)) from None
    except SystemExit as stop:
        if not stop.code:
            Output().sentence(_wrapped_anew(shown.getvalue()))
            raise
        raise BadInput(_in_one_line(told.getvalue(), kind, command)) from None
    finally:
        os.environ.pop("COLUMNS", None)
        if columns is not None:
            os.environ["COLUMNS"] = columns


def fields_of(kind: type) -> Iterator[dataclasses.Field[Any]]:
    """All fields that are flags, those of nested dataclasses too."""
    for one in dataclasses.fields(kind):
        if dataclasses.is_dataclass(one.default):
            yield from fields_of(type(one.default))
        elif "Positional" not in str(one.type):
            yield one


def _wrapped_anew(told: str) -> str:
    """Tyro's help, whose lines break where those of a docstring do, too."""
    rows, width = [""], shutil.get_terminal_size().columns
    first = next(row for row in told.splitlines() if row.startswith("  -h, --help "))
    blank = " " * first.index("show ")
    for row in map(str.rstrip, told.splitlines()):
        continues = row.startswith(blank) and rows[-1][len(blank) - 2 :].startswith("  ")
        rows[-1:] = [f"{rows[-1]} {row.strip()}"] if continues else [rows[-1], row]
    filled = (textwrap.fill(r, width, subsequent_indent=blank * r.startswith(" ")) for r in rows)
    return "\n".join(filled).strip()


def _in_one_line(told: str, kind: type, command: str) -> str:
    """A complaint of tyro's without its box, in the words of a user."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", told)
    rows = [line.strip("│| ") for line in text.splitlines()]
    # The title is in the frame, or where the terminal has ASCII only, above a line of its own.
    rows = rows[2:] if len(rows) > 1 and not rows[1].strip("-") else rows[1:]
    first = itertools.takewhile(lambda row: row.strip("─╰╯-"), rows)
    line = re.sub(r"^Error parsing (\w+: )?", "", " ".join(first))
    if unknown := re.match(r"Unrecognized options: ([^\s,]+)", line):
        name, known = unknown[1], [flag(one.name) for one in fields_of(kind)]
        close = nearest(name, known)
        if not name.startswith("-"):
            return f"{name} belongs to no option: its --NAME is missing, or takes no value"
        return f"there is no option {name}{close}: {command} --help has all"
    if wrong := re.match(r"invalid choice '(.*)' for argument '(.*)'\..*?\((.*)\)", line):
        choices = [one for one in re.findall(r"'([^']*)'", wrong[3]) if one != "None"]
        close = nearest(wrong[1], choices)
        return (
            f"{wrong[2]} {wrong[1]}: there is no such choice{close}; it takes {', '.join(choices)}"
        )
    if line.startswith("Missing"):
        what = " and ".join(re.findall(r"(?:: |\) |')(--[\w-]+|[A-Z]+)(?=[ '])", line))
        return (
            f"{command} needs {'a value of ' * ('value' in line[:13])}{what}; see {command} --help"
        )
    numbers = r"(\S+): (?:invalid literal for int|could not convert string to float).*?: '(.*)'"
    if wrong := re.match(numbers, line):
        return f"{wrong[1]} {wrong[2]}: expected a {'whole ' * ('int' in line)}number"
    return line or text
