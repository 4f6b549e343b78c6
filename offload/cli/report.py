"""`offload report`: where the time of a run went."""

from __future__ import annotations

import html
import io
import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated

import tyro
from rich.progress_bar import ProgressBar
from rich.table import Table

from offload import reporting
from offload.cli import BadInput, bad_input
from offload.cli.breakdown import Breakdown, breakdown, title_of, verdict
from offload.cli.console import Output, emit, table
from offload.cli.flags import AsJson, parse_flags
from offload.planning.machine import replace_file
from offload.planning.tiers import format_bytes
from offload.reporting import LANES, Run, Span

_BAR_COLUMNS = 24
_ORDER = (*LANES[:2], "waiting", *LANES[2:])
"""Lanes on the page from top to bottom."""

_Run = tyro.conf.arg(
    metavar="[RUN]",
    help_behavior_hint="",
    help="A file that a run has left. Default: that of the last offload train.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(AsJson):
    """Show where the time of a step went, what bounds it and what would help most; write a page to
    look at (lanes over time, waits in red).
    """

    run: tyro.conf.Positional[Annotated[tuple[str, ...], _Run]] = ()

    def __post_init__(self) -> None:
        if len(self.run) > 1:
            raise ValueError(f"RUN {' '.join(self.run)}: expected one file")


def command(arguments: Sequence[str]) -> None:
    """Shows a run and writes its page."""
    asked = parse_flags(Report, "offload report", arguments)
    with bad_input():
        path = Path(asked.run[0]) if asked.run else reporting.last()
        if not path.exists():
            raise BadInput(
                f"{path}: there is no such run; likely it is misspelt, or nothing was trained yet, "
                "or it could not be left there; try: offload train, then offload report"
            )
        run = reporting.load(path)
        found = breakdown(run)
    if asked.json:
        names = ("made", "command", "model", "device", "device_is_host", "versions")
        told = {"run": str(path), **{name: getattr(run, name) for name in names}}
        told |= {**asdict(found), "verdict": verdict(run, found)}
        told["prediction"] = run.prediction and asdict(run.prediction)
        told["unpredicted"] = run.unpredicted
        emit(told)
        return
    console = Output()
    show(console, run, found, path)
    file = path.with_name(f"{path.name.removesuffix('.json')}.html")
    try:
        replace_file(file, page(run, found, _text(run, found, path)))
    except OSError as error:
        raise BadInput(
            f"{file}: {error.strerror}: it cannot be written; likely the folder is another "
            "user's, or its drive full; copy the run to a folder of yours"
        ) from error
    console.sentence(f"left {file}")


def _text(run: Run, found: Breakdown, path: Path) -> str:
    """What is shown, as plain text."""
    console = Output(file=io.StringIO(), width=100, record=True, force_terminal=False)
    show(console, run, found, path)
    return console.export_text()


def show(console: Output, run: Run, found: Breakdown, path: Path) -> None:
    """Which run it is, the breakdown of a step, the lanes, and what bounds it."""
    if run.command:
        console.sentence(shlex.join(run.command))
    versions = ", ".join(f"{name} {number}" for name, number in run.versions.items())
    console.sentence(f"{run.model}\non {run.device}, with {versions}")
    console.sentence(f"left {run.made.replace('T', ' ')} as {path}")
    last = run.stepped[-1][0]
    steps = "one step" if found.steps == 1 else f"{found.steps} steps"
    console.sentence(f"\na step took {found.step_s:.3f} s (mean of {steps}, to step {last})")
    if (foretold := run.prediction) is not None:
        console.sentence(
            f"predicted: {foretold.step_seconds:.3f} s, of which {foretold.exposed_seconds:.3f} s "
            f"waiting (it waited {found.waited_s:.3f} s)"
        )
    console.print(_parts(run, found))
    if any(found.busy.values()):
        console.print(_lanes(run, found))
    for tier in run.tiers:
        if here := [f"{kind}s {format_bytes(size)}" for kind, at, size in run.homes if at == tier]:
            console.sentence(f"on {tier}: {', '.join(here)}")
    if found.misses:
        told = f"{found.misses} uses of a unit out of the order foreseen, in {steps}: each waited"
        console.sentence(told)
    for line in verdict(run, found):
        console.sentence(line, style="bold")


def _parts(run: Run, found: Breakdown) -> Table:
    made = table("A step", "", "seconds", "share")
    made.add_column("", width=_BAR_COLUMNS)
    for name, seconds in found.parts.items():
        share = seconds / found.step_s
        style = "red" if name in found.busy and share >= 0.05 else ""
        bar = ProgressBar(total=1.0, completed=min(1.0, share), width=_BAR_COLUMNS)
        made.add_row(title_of(name, run), f"{seconds:.3f}", f"{share:.0%}", bar, style=style)
    return made


def _lanes(run: Run, found: Breakdown) -> Table:
    titles = ("busy", "of step", "predicted", "moved", "speed")
    made = table("Lanes, in a step", "lane", *titles)
    predicted = run.prediction.busy if run.prediction else {}
    for lane, busy in found.busy.items():
        if not busy:
            continue
        moved = found.bytes.get(lane, 0.0)
        foretold = f"{predicted[lane]:.3f} s" if lane in predicted else "-"
        made.add_row(
            lane,
            f"{busy:.3f} s",
            f"{busy / found.step_s:.0%}",
            foretold,
            format_bytes(round(moved)) if moved else "-",
            f"{moved / busy / 1e9:.2f} GB/s" if moved else "-",
        )
    return made


def _rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans of one lane in as few rows as can be, none of which overlap in a row."""
    found: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.stop)):
        row = next((row for row in found if row[-1].stop <= span.start), None)
        if row is None:
            found.append(row := [])
        row.append(span)
    return found


def _titled(run: Run) -> list[tuple[str, list[Span]]]:
    """Title and spans of every row, from top to bottom; waits are a lane of their own."""
    waits = [Span("waiting", f"for {w.lane}", "", w.start, w.stop, 0) for w in run.waits]
    found: dict[str, list[Span]] = {}
    for span in (*run.spans, *waits):
        found.setdefault(span.lane, []).append(span)
    names = sorted(found, key=_ORDER.index)
    titled = []
    for name in names:
        parts = _rows(found[name])
        titled += [(name if len(parts) == 1 else f"{name} {k + 1}", p) for k, p in enumerate(parts)]
    return titled


def page(run: Run, found: Breakdown, text: str) -> str:
    """The page as HTML: `text`, and the lanes over time."""
    spans = [
        [
            title,
            [[round(s.start, 6), round(s.stop - s.start, 6), s.name, s.unit, s.bytes] for s in row],
        ]
        for title, row in _titled(run)
    ]
    steps = [[number, round(at, 6)] for number, at, _ in run.stepped]
    data = {"rows": spans, "steps": steps, "since": found.since, "until": found.until}
    data |= {"step": found.step_s}
    # Within a script element what begins with < could end it, or keep it from ending.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    whole = resources.files("offload.cli").joinpath("report.html").read_text("utf-8")
    return whole.replace("<!--TEXT-->", html.escape(text)).replace("<!--DATA-->", embedded)
