"""Where text for people goes: sentences, notes and progress, and the machine in words."""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
from rich import progress
from rich.console import Console
from rich.table import Table

from offload.cli import in_flags

if TYPE_CHECKING:
    from typing_extensions import Self

Returned = TypeVar("Returned")

DRAWN_INTERVAL_S = 0.2
"""Least time between two drawings on a terminal: drawing takes time from what is under way."""

BUSY_PERCENT = 15
"""Of all processors' time: others may take as much before it is remarked on."""


class Output(Console):
    """A console that leaves it to the caller what a reader that has gone means."""

    def on_broken_pipe(self) -> None:
        """Called while the error is handled: it goes on."""
        raise

    def sentence(self, text: str, style: str | None = None) -> None:
        """A sentence: broken between words on a terminal, in one line elsewhere."""
        wrap = not self.is_terminal
        self.print(text, style=style, highlight=False, markup=False, soft_wrap=wrap)

    def notes(self, notices: Sequence[str]) -> None:
        """Each in a line of its own, once."""
        for notice in dict.fromkeys(notices):
            self.sentence(f"note: {in_flags(notice)}")


def emit(record: Mapping[str, Any]) -> None:
    """Writes an object of JSON to standard output, in a line."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def table(title: str, first: str, *numbers: str) -> Table:
    """An empty table: a column of names, and columns of numbers."""
    made = Table(title=title, title_justify="left")
    made.add_column(first, no_wrap=True)
    for name in numbers:
        made.add_column(name, justify="right", no_wrap=True)
    return made


class Progress:
    """What is under way: a bar on a terminal, else a plain line now and then. Entered meanwhile."""

    def __init__(self, console: Output, interval_s: float = 0.0) -> None:
        """`interval_s`: the least time between two lines where there is no terminal."""
        self._console = console
        self._interval_s = DRAWN_INTERVAL_S if console.is_terminal else interval_s
        self._spoken = -math.inf
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[told]}"),
            console=console,
            auto_refresh=False,
            disable=not console.is_terminal,
            expand=True,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # Else what goes to a file would come here.
        )
        self._task = self._bar.add_task("", total=1.0, told="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    def show(self, head: str, share: float, told: str = "") -> None:
        """Shows that so much of `head` is done; what is done wholly is always shown."""
        now = time.monotonic()
        if share < 1 and now - self._spoken < self._interval_s:
            return
        self._spoken = -math.inf if share == 1 else now
        self._bar.update(self._task, description=head, completed=share, told=told)
        self._bar.refresh()
        if not self._console.is_terminal:
            self._console.print(f"{head}  {told}".rstrip(), highlight=False, soft_wrap=True)


def warnings_of(call: Callable[[], Returned]) -> tuple[Returned, list[str]]:
    """What a call returns, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        returned = call()
    return returned, [str(one.message) for one in caught]


def others_percent() -> int:
    """Of all processors' time, what other programs take; 0 where it is too little to matter."""
    percent = psutil.cpu_percent(interval=0.2)
    return round(percent) if percent > BUSY_PERCENT else 0
