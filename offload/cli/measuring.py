"""What all benchmarks show and tell: progress, drawings, and the machine they ran on."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from offload.cli.console import Output

BUSY_PERCENT = 15
"""Of all processors' time: others may take as much before it is remarked on."""


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
        shown.add(what)  # What is measured in turns comes again and again.
        shown_as.update(task, completed=share, description=what)

    with shown_as:
        yield told


def drawing(path: str, module: str) -> Callable[..., str]:
    """`draw` of a module that needs matplotlib, for the file at `path`, which it takes last.

    What is returned draws and says what came of it: a drawing that fails is no reason to lose what
    was to be drawn.

    Raises:
        ValueError: matplotlib is missing, or knows no such kind of file.
        OSError: the file cannot be written.
    """
    try:
        _check_kind(path)
        check_place(path)
        draw = importlib.import_module(module).draw
    except ImportError as error:
        raise ValueError(
            f"asked for a drawing by --plot {path}; found no matplotlib ({error}); likely cause: "
            f"it is an extra of this package; try: {sys.executable} -m pip install "
            "'offload-engine[plot]'"
        ) from error

    def drawn(*shown: Any) -> str:
        try:
            draw(*shown, path)
        except OSError as error:
            return (
                f"nothing was drawn to {path}: {error.strerror or error}; likely its disk is "
                "full, or it is a device; try --plot with a file on another disk"
            )
        return f"drawn to {path}"

    return drawn


def _check_kind(path: str) -> None:
    """Refuses a name that is no picture's."""
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    ending = Path(path).suffix.lstrip(".").lower()
    if ending not in known:
        raise ValueError(
            f"asked for a drawing by --plot {path}; found no kind of picture in its name; likely "
            f"cause: the ending is missing or misspelt; try: {path.rstrip('.')}.png"
        )


def check_place(path: str) -> None:
    """Refuses a file that could not be written at the end.

    Raises:
        OSError: it is a folder, or this user may not write it, or there is none to write it in.
    """
    folder, exists = os.path.dirname(path) or os.curdir, os.path.exists(path)
    if os.path.isdir(path):
        raise IsADirectoryError(0, "it is a folder; give the name of a file in it", path)
    if not os.path.isdir(folder):
        raise FileNotFoundError(0, "there is no such folder; make it, or mend its name", folder)
    # Devices and pipes are written to, and not made.
    made = not exists or os.path.isfile(path)
    for place in ([path] if exists else []) + ([folder] if made else []):
        if not os.access(place, os.W_OK):
            raise PermissionError(0, "this user may not write there; give one of your own", place)


def once(found: Sequence[Any]) -> tuple[Any, ...]:
    """Without what is there already."""
    return tuple(dict.fromkeys(found))


def others_percent() -> int:
    """Of all processors' time, what other programs take; 0 where it is too little to matter."""
    percent = psutil.cpu_percent(interval=0.2)
    return round(percent) if percent > BUSY_PERCENT else 0


def busy(percent: int | None = None) -> str | None:
    """A remark where other programs take so much that figures say little."""
    percent = others_percent() if percent is None else percent
    told = f"other programs keep {percent}% of the processors busy: all figures suffer"
    return told if percent else None


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """Its name, as Linux tells it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
