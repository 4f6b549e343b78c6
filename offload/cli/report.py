"""`offload report`: where the time of a run went, as a table, a page and a timeline."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.progress_bar import ProgressBar
from rich.table import Table

from offload import runs
from offload.breakdown import Breakdown, breakdown, title_of, verdict
from offload.cli import BadInput, bad_input, report_html, report_list, report_timeline
from offload.cli.console import Output
from offload.cli.flags import Flags
from offload.cli.report_list import about
from offload.config import format_bytes
from offload.kept import write_whole
from offload.runs import Run

_BAR_COLUMNS = 24

ROOM_LEAST_BYTES = 1 << 20
"""With less on the disk a run is not left there."""

NARROW_COLUMNS = 68
"""On narrower terminals bars and shares are left out."""

_Run = tyro.conf.arg(
    metavar="[RUN]",
    help_behavior_hint="",
    help="A file that a run has left, or the name of one in --list.",
)
_Optional = tyro.conf.arg(metavar="FILE", help_behavior_hint="")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Show where the time of a step went, what bounds it and what would help most; write a page to
    look at (lanes over time, waits in red) and a timeline for ui.perfetto.dev or chrome://tracing.
    Without RUN it is about the last run of offload train that has left one.
    """

    run: tyro.conf.Positional[Annotated[tuple[str, ...], _Run]] = ()

    html: Annotated[str | None, _Optional] = None
    """File for the page. Default: beside the run, ending in .html."""

    timeline: Annotated[str | None, _Optional] = None
    """File for the timeline. Default: beside the run, ending in .trace.json."""

    list: bool = False
    """List the runs that are kept, instead of showing one."""

    json: bool = False
    """One JSON object on standard output, nothing else there; no files."""

    def __post_init__(self) -> None:
        if len(self.run) > 1:
            raise ValueError(f"RUN {' '.join(self.run)}: expected one file")
        if self.list and self.run:
            raise ValueError(f"RUN {self.run[0]} contradicts --list: leave out one of the two")


FLAGS = Flags(
    kind=Report,
    command="offload report",
    known=tuple(field.name for field in dataclasses.fields(Report) if field.name != "run"),
)
"""The flags of `offload report`."""


def command(arguments: Sequence[str]) -> None:
    """Shows a run and writes its page and timeline.

    Raises:
        BadInput: the arguments, the run cannot be read or holds no whole step, or a file cannot be
            written.
    """
    asked = FLAGS.parse(arguments)
    if asked.list:
        with bad_input():
            report_list.show(runs.kept(), as_json=asked.json)
        return
    path = _path(asked.run)
    with bad_input():
        run = runs.load(path)
        found = breakdown(run)
    if asked.json:
        names = ("made", "command", "model", "device", "device_is_host", "versions")
        told = {"run": str(path), **{name: getattr(run, name) for name in names}}
        told |= {**asdict(found), "verdict": verdict(run, found)}
        told["prediction"] = run.prediction and asdict(run.prediction)
        told["unpredicted"] = run.unpredicted
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return
    console = Output()
    show(console, run, found, path)
    stem = path.with_name(path.name.removesuffix(".json"))
    page = Path(asked.html or f"{stem}.html")
    timeline = Path(asked.timeline or f"{stem}.trace.json")
    if len({os.path.realpath(one) for one in (path, page, timeline)}) < 3:
        raise BadInput(
            f"run {path}, page {page} and timeline {timeline}: two of them are one file; likely a "
            "name was given twice; give --html and --timeline others"
        )
    _write(page, report_html.page(run, found, path), "--html")
    _write(timeline, json.dumps(report_timeline.timeline(run)), "--timeline")
    for what, where in (("page", page), ("timeline, for ui.perfetto.dev", timeline)):
        console.sentence(f"{what}: {where}")


def _none_left(folder: Path) -> str:
    """That no run is there, and why."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.is_dir())
    if not os.access(there, os.W_OK | os.X_OK):
        return (
            f"{folder} holds no run; likely none could be left, as this user may not write to "
            f"{there}; try: offload train --trace-file FILE, then offload report FILE"
        )
    if shutil.disk_usage(there).free < ROOM_LEAST_BYTES:
        return (
            f"{folder} holds no run; likely none could be left, as the disk is full; free some "
            "space, or try: offload train --trace-file FILE, then offload report FILE"
        )
    return (
        f"{folder} holds no run; likely nothing was trained yet, or with --no-trace; try: offload "
        "train"
    )


def _path(asked: Sequence[str]) -> Path:
    """The file of the run that is asked for.

    Raises:
        BadInput: there is none.
    """
    with bad_input():
        if not asked:
            if kept := runs.kept():
                return kept[0]
            raise BadInput(_none_left(runs.folder()))
        path = Path(asked[0])
        if path.name == asked[0] and not path.exists():
            path = runs.folder() / f"{asked[0].removesuffix('.json')}.json"
        if not path.exists():
            raise BadInput(
                f"{asked[0]}: there is no such run; likely it is misspelt; try: offload report "
                "--list"
            )
    return path


def _write(path: Path, text: str, option: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise BadInput(
            f"{path}: {error.strerror}: it cannot be written; likely the folder is another "
            f"user's, or its drive full; try {option} FILE in a folder of yours"
        ) from error


def show(console: Output, run: Run, found: Breakdown, path: Path) -> None:
    """Which run it is, the breakdown of a step, the lanes, and what bounds it."""
    for word, told in about(run, path):
        console.sentence(f"{word} {told}" if word in ("on", "left") else told)
    last = run.stepped[-1][0]
    steps = "one step" if found.steps == 1 else f"{found.steps} steps"
    console.sentence(f"\na step took {found.step_s:.3f} s (mean of {steps}, to step {last})")
    if run.prediction is not None:
        console.sentence(
            f"predicted: {run.prediction.step_s:.3f} s, of which {run.prediction.exposed_s:.3f} s "
            f"waiting (it waited {found.waited_s:.3f} s)"
        )
    narrow = console.width < NARROW_COLUMNS
    console.print(_parts(run, found, bars=not narrow))
    if any(found.busy.values()):
        console.print(_lanes(run, found, shares=not narrow))
    for tier in run.tiers:
        if here := [f"{kind}s {format_bytes(size)}" for kind, at, size in run.homes if at == tier]:
            console.sentence(f"on {tier}: {', '.join(here)}")
    if found.misses:
        console.sentence(f"{found.misses} uses of a unit out of the order foreseen, in {steps}")
    for line in verdict(run, found):
        console.sentence(line, style="bold")


def _parts(run: Run, found: Breakdown, *, bars: bool) -> Table:
    table = Table(title="A step", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    if bars:
        table.add_column("", width=_BAR_COLUMNS)
    for name, seconds in found.parts.items():
        share = seconds / found.step_s
        style = "red" if name in found.busy and share >= 0.05 else ""
        bar = [ProgressBar(total=1.0, completed=min(1.0, share), width=_BAR_COLUMNS)] * bars
        table.add_row(title_of(name, run), f"{seconds:.3f}", f"{share:.0%}", *bar, style=style)
    return table


def _lanes(run: Run, found: Breakdown, *, shares: bool) -> Table:
    table = Table(title="Lanes, in a step", title_justify="left")
    table.add_column("lane")
    for title in ("busy", *["of step", "predicted"] * shares, "moved", "speed"):
        table.add_column(title, justify="right", no_wrap=True)
    predicted = run.prediction.busy if run.prediction else {}
    for lane, busy in found.busy.items():
        if not busy:
            continue
        moved = found.bytes.get(lane, 0.0)
        foretold = f"{predicted[lane]:.3f} s" if lane in predicted else "-"
        table.add_row(
            lane,
            f"{busy:.3f} s",
            *[f"{busy / found.step_s:.0%}", foretold] * shares,
            format_bytes(round(moved)) if moved else "-",
            f"{moved / busy / 1e9:.2f} GB/s" if moved else "-",
        )
    return table
