"""What `offload train` leaves behind: remarks and a trace. What is in its way is told, no more.

By then a run has its result, or an error of its own, which nothing here may take the place of.
"""

from __future__ import annotations

import contextlib
import shlex
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from offload import recorded, runs
from offload.cli import in_flags, measuring
from offload.cli.console import Output
from offload.cli.settings import Train
from offload.runs import Run

_Returned = TypeVar("_Returned")

SLOW_SECONDS = 2.0
"""So long a person waits before it seems to hang."""


def note(remarks: Output, notices: Sequence[str]) -> None:
    """Tells each in a line of its own, once."""
    for notice in dict.fromkeys(notices):
        remarks.sentence(f"note: {in_flags(notice)}")


def warnings_of(call: Callable[[], _Returned]) -> tuple[_Returned, list[str]]:
    """What a call returns, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        returned = call()
    return returned, [str(one.message) for one in caught]


@contextlib.contextmanager
def told_if_slow(remarks: Output, what: str) -> Iterator[None]:
    """Tells what is being done, where that takes longer than people wait without a word."""
    telling = threading.Timer(SLOW_SECONDS, remarks.sentence, [what])
    telling.daemon = True
    telling.start()
    try:
        yield
    finally:
        telling.cancel()


def check(settings: Train) -> None:
    """Refuses a place for the trace in which it could not be left at the end.

    Raises:
        ValueError: no trace is asked for.
        OSError: see `measuring.check_place`.
    """
    if settings.trace_file is None:
        return
    if not settings.placing.trace:
        raise ValueError(
            f"--trace-file {settings.trace_file} contradicts --no-trace: leave out one of the two"
        )
    measuring.check_place(settings.trace_file)


def run_of(engine: Any, remarks: Output, command: Sequence[str]) -> Run | None:
    """What the engine did last; None where that cannot be told."""
    try:
        return recorded.run_of(engine, command)
    except Exception as error:
        note(remarks, [f"no trace was left, of an engine that cannot tell what it did: {error}"])
        return None


def trace(remarks: Output, file: str | None, run: Run | None) -> None:
    """Leaves a file for `offload report`."""
    if run is None or not run.stepped:
        return
    try:
        if file:
            runs.save(run, file)
        else:
            runs.keep(run)
    except OSError as error:
        told = f"no trace was left at {file or error.filename}: {error.strerror}; "
        note(remarks, [told + "try --trace-file FILE, then offload report FILE; or --no-trace"])
        return
    named = f" {shlex.quote(file)}" if file else ""
    note(remarks, [f"offload report{named} shows where the time went"])
