"""Flags derived from a dataclass by tyro, and what is wrong with them told in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TextIO, TypeVar

import tyro

from offload.cli import BadInput, in_lines, nearest

WIDE_COLUMNS = 100_000
"""A terminal in which no message is wrapped."""

Settings = TypeVar("Settings")


def flag(name: str) -> str:
    """The command-line spelling of a field: `seq_len` is `--seq-len`."""
    return "--" + name.replace("_", "-")


def as_paths(values: Sequence[str]) -> list[str]:
    """Paths out of a file as they are typed: one that begins with a dash would be a flag."""
    return [os.path.join(os.curdir, value) if value.startswith("-") else value for value in values]


@dataclass(frozen=True, kw_only=True)
class Flags(Generic[Settings]):
    """The flags of one command."""

    kind: type[Settings]
    """Frozen dataclass whose fields are the flags."""
    command: str
    """What is typed before them, such as `offload train`."""
    known: tuple[str, ...]
    """Names of all fields, those of nested dataclasses too."""
    registry: tyro.constructors.ConstructorRegistry = field(
        default_factory=tyro.constructors.ConstructorRegistry
    )
    """How unusual types are read."""

    @property
    def switches(self) -> tuple[str, ...]:
        """Names of the fields that take no value, those of nested dataclasses too."""
        return tuple(_switches(self.kind))

    def parse(self, flags: Sequence[str]) -> Settings:
        """The settings that `flags` ask for.

        Raises:
            BadInput: a flag is no setting or has a value that it cannot have.
            SystemExit: help was asked for, and shown.
        """
        shown = _Shown(sys.stdout)
        options = itertools.takewhile(lambda word: word != "--", flags)
        if {"-h", "--help"}.intersection(options):
            flags = ["--help"]  # After an argument tyro would leave that out of the help.
            _join_lines(self.kind)
        try:
            with (
                contextlib.redirect_stderr(io.StringIO()),
                contextlib.redirect_stdout(shown),  # type: ignore[type-var]
            ):
                return self._parse(flags)
        except (SystemExit, ValueError) as stop:
            if isinstance(stop, SystemExit) and not stop.code:
                sys.stdout.write(in_lines(shown.text, sys.stdout))
                raise
        raise BadInput(self.complaint(flags))

    def _parse(self, flags: Sequence[str]) -> Settings:
        return tyro.cli(self.kind, prog=self.command, args=flags, registry=self.registry)

    def complaint(self, flags: Sequence[str]) -> str:
        """What there is against some flags, in one line and without a box; empty for nothing."""
        told, columns = io.StringIO(), os.environ.get("COLUMNS")
        os.environ["COLUMNS"] = str(WIDE_COLUMNS)
        try:
            with contextlib.redirect_stderr(told):
                self._parse(flags)
                return ""
        except ValueError as error:
            return str(error)
        except SystemExit as stop:
            if not stop.code:
                return ""
        finally:
            del os.environ["COLUMNS"]
            if columns is not None:
                os.environ["COLUMNS"] = columns
        return self._in_one_line(told.getvalue())

    def _in_one_line(self, told: str) -> str:
        text = re.sub(r"\x1b\[[0-9;]*m", "", told)
        rows = [line.strip("│| ") for line in text.splitlines()]
        # The title is in the frame, or where the terminal has ASCII only, above a line of its own.
        rows = rows[2:] if len(rows) > 1 and not rows[1].strip("-") else rows[1:]
        first = itertools.takewhile(lambda row: row.strip("─╰╯-"), rows)
        line = re.sub(r"^Error parsing (\w+: )?", "", " ".join(first))
        if unknown := re.match(r"Unrecognized options: ([^\s,]+)", line):
            return self._unknown(unknown[1])
        if wrong := re.match(r"invalid choice '(.*)' for argument '(.*)'\..*?\((.*)\)", line):
            asked, name, choices = wrong[1], wrong[2], re.findall(r"'([^']*)'", wrong[3])
            choices = [choice for choice in choices if choice != "None"]  # What is left out.
            close = nearest(asked, choices)
            return f"{name} {asked}: it cannot be that{close}; it takes {', '.join(choices)}"
        for found, clearer in _CLEARER.items():
            line = re.sub(found, clearer, line)
        return line or text

    def _unknown(self, name: str) -> str:
        known = [flag(key) for key in self.known]
        if name in known:
            return f"{name} comes after --, where options end: leave out the --"
        if name.startswith("-"):
            return f"there is no option {name}{nearest(name, known)}: {self.command} --help has all"
        none = " and ".join(flag(key) for key in sorted(self.switches))
        contrary = ", ".join(flag(f"no_{key}") for key in sorted(self.switches))
        return (
            f"{name} belongs to no option: each takes one value, {none} none ({contrary} for the "
            "contrary)"
        )


class _Shown:
    """What is to be shown on a stream, kept until it is broken between words."""

    def __init__(self, stream: TextIO):
        self.text = ""
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As of any stream."""
        self.text += text
        return len(text)


def _join_lines(kind: type) -> None:
    """Let tyro tell of each field in lines of its own: it would keep those of the source."""
    import docstring_parser

    told: dict[str, str] = {}
    for one in reversed([one for one in kind.__mro__ if dataclasses.is_dataclass(one)]):
        found = docstring_parser.parse_from_object(one).params
        told |= {each.arg_name: " ".join((each.description or "").split()) for each in found}
    for field_ in dataclasses.fields(kind):  # type: ignore[arg-type]
        if dataclasses.is_dataclass(field_.default):
            _join_lines(type(field_.default))
        elif text := told.get(field_.name):
            field_.metadata = MappingProxyType({**field_.metadata, "help": text})


def _switches(kind: type) -> Iterator[str]:
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]
        if isinstance(one.default, bool):
            yield one.name
        elif dataclasses.is_dataclass(one.default):
            yield from _switches(type(one.default))


_CLEARER = {
    r"Missing value for argument '(.*)'\. Expected \d+ values?\.": (
        r"\1 is there without its value: give one, or leave out \1"
    ),
    r"invalid literal for int\(\) with base 10: (.*)": r"\1 is no whole number",
    r"could not convert string to float: (.*)": r"\1 is no number",
    r"Could not find valid parse for arguments: \[(.*)\]": r"\1 is not what this option takes",
}
"""What Python and tyro say, and how to say it to a user."""
