"""What `offload train` leaves behind: a trace and a drawing. What is in their way is told, no more.

By then a run has its result, or an error of its own, which nothing here may take the place of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offload import recorded, runs
from offload.cli import live
from offload.cli.console import Output
from offload.cli.settings import Train
from offload.runs import Run


def note(remarks: Output, notices: Sequence[str]) -> None:
    """Tells each in a line of its own."""
    for notice in notices:
        remarks.print(f"note: {notice}", highlight=False, soft_wrap=True, markup=False)


def check(settings: Train) -> None:
    """Refuses a place for the trace in which it could not be left at the end.

    Raises:
        ValueError: it is a folder, or in none, or no trace is asked for.
    """
    if settings.trace_file is None:
        return
    path, told = Path(settings.trace_file), f"--trace-file {settings.trace_file}: "
    if not settings.placing.trace:
        raise ValueError(f"{told}--no-trace says that there is to be none; leave out one of them")
    if path.is_dir():
        raise ValueError(f"{told}it is a folder; likely the file's name is missing; add one")
    if not path.parent.is_dir():
        raise ValueError(f"{told}there is no folder {path.parent}; likely it is misspelt; make it")


def run_of(engine: Any, remarks: Output) -> Run | None:
    """What the engine did last; None where that cannot be told."""
    try:
        return recorded.run_of(engine)
    except Exception as error:
        note(remarks, [f"no trace was left, of an engine that cannot tell what it did: {error}"])
        return None


def trace(remarks: Output, file: str | None, run: Run | None) -> None:
    """Leaves a file for `offload report`."""
    if run is None or not run.stepped:
        return
    path = Path(file) if file else runs.last_path()
    try:
        runs.save(run, path)
    except OSError as error:
        told = f"no trace was left at {path}: {error.strerror}; try --trace-file, or --no-trace"
        note(remarks, [told])
        return
    named = f" {path}" if file else ""
    note(remarks, [f"offload report{named} shows where the time went"])


def drawing(
    remarks: Output,
    file: str | None,
    draw: Callable[..., None],
    losses: Sequence[float],
    held_out_loss: float | None,
    title: str,
) -> None:
    """Leaves a picture of the loss."""
    try:
        draw(losses, live.smoothed(losses), held_out_loss, title)
    except OSError as error:
        told = f"no drawing was left at {file}: {error.strerror}; try --plot in another folder"
        note(remarks, [told])
