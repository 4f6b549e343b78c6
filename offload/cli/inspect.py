"""`offload inspect`: what is in a directory that was saved, and whether all of it is whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from offload.cli import EXIT_FAILED, bad_input
from offload.cli.console import Output, emit
from offload.cli.flags import parse_flags

if TYPE_CHECKING:
    from offload.checkpoint.inspection import Inspection

_Directory = tyro.conf.arg(
    metavar="DIR", help_behavior_hint="", help="A save, a durable run, or a folder of safetensors."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspect:
    """Check every checksum of a save, and show what is in it: step, optimizer, sets of tensors,
    user data. Nothing is changed. The exit status is 1 where something is broken.
    """

    directory: tyro.conf.Positional[Annotated[str, _Directory]]

    json: bool = False
    """One JSON object on standard output, nothing else there: rows, broken, unchecked."""


def command(arguments: Sequence[str]) -> int:
    """Shows what is in a directory. Returns 0, or 1 where something is broken.

    Raises:
        BadInput: the arguments, or there is nothing that is known.
    """
    asked = parse_flags(Inspect, "offload inspect", arguments)
    from offload.checkpoint.inspection import inspect

    with bad_input():
        found = inspect(asked.directory)
    if asked.json:
        emit({"directory": asked.directory, **asdict(found)})
        return EXIT_FAILED if found.broken else 0
    _show(Output(), found)
    return EXIT_FAILED if found.broken else 0


def _show(console: Output, found: Inspection) -> None:
    for name, row in found.rows.items():
        console.sentence(f"{name:<16} {row}")
    if found.unchecked:
        console.sentence(f"{found.unchecked} tensors have no checksum: they were read, no more")
    for one in found.broken:
        console.sentence(f"broken: {one}", style="bold red")
    console.sentence(f"{len(found.broken)} broken" if found.broken else "whole")
