"""Where text for people goes: sentences, notes and progress, and the machine in words."""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Callable, Iterator, Sequence

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from offload.cli import in_flags

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


def table(title: str, first: str, *numbers: str) -> Table:
    """An empty table: a column of names, and columns of numbers."""
    made = Table(title=title, title_justify="left")
    made.add_column(first, no_wrap=True)
    for name in numbers:
        made.add_column(name, justify="right", no_wrap=True)
    return made


@contextlib.contextmanager
def bar(console: Output) -> Iterator[Callable[[float, str], None]]:
    """Progress as a bar on a terminal, elsewhere as a line for each thing that is measured."""
    shown_as = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        redirect_stdout=sys.stdout.isatty(),  # Else what goes to a file would come here.
        expand=True,
        transient=True,
    )
    task, shown = shown_as.add_task("preparing", total=1.0), set[str]()

    def told(share: float, what: str) -> None:
        if what not in shown and not console.is_terminal:
            console.sentence(f"measuring {what}")
        shown.add(what)
        shown_as.update(task, completed=share, description=what)

    with shown_as:
        yield told


def others_percent() -> int:
    """Of all processors' time, what other programs take; 0 where it is too little to matter."""
    percent = psutil.cpu_percent(interval=0.2)
    return round(percent) if percent > BUSY_PERCENT else 0


def processor() -> str:
    """Its name, as Linux tells it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
