"""Which run a report is about, and which there are."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from offload import runs
from offload.breakdown import breakdown
from offload.cli.console import Output
from offload.runs import Run

_AGES = (("day", 86400), ("hour", 3600), ("minute", 60))


def about(run: Run, path: Path, *, aged: bool = True) -> Iterator[tuple[str, str]]:
    """What was run, of what, on what, and when: a word for each, and the sentence."""
    if run.command:
        yield "command", shlex.join(run.command)
    versions = ", ".join(f"{name} {number}" for name, number in run.versions.items())
    yield "model", run.model
    yield "on", f"{run.device}, with {versions}"
    made = run.made.replace("T", " ")
    yield "left", f"{made}{f', {age(run.made)} ago' if aged else ''}, as {path}"


def age(made: str) -> str:
    """How long ago a time in ISO 8601 was."""
    moment = datetime.fromisoformat(made)
    seconds = max(0.0, (datetime.now(moment.tzinfo) - moment).total_seconds())
    for name, size in _AGES:
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {name}{'s' * (count > 1)}"
    return "less than a minute"


def show(paths: Sequence[Path], *, as_json: bool) -> None:
    """The runs, the last one first: as a table, or as lines of JSON."""
    console = Output()
    if not paths and not as_json:
        console.sentence(f"{runs.folder()} holds no run; try: offload train")
        return
    table = Table(title=f"Runs in {runs.folder()}", title_justify="left")
    table.add_column("RUN", no_wrap=True)
    table.add_column("steps", justify="right")
    table.add_column("a step", justify="right", no_wrap=True)
    table.add_column("command", overflow="fold")
    for path in paths:
        row = _row(path)
        if as_json:
            sys.stdout.write(json.dumps({"run": str(path), **row}) + "\n")
            continue
        step_s = row.get("step_s")
        table.add_row(
            path.stem,
            str(row.get("steps", "-")),
            f"{step_s:.3f} s" if isinstance(step_s, float) else "-",
            Text(str(row.get("error") or shlex.join(row["command"]))),
        )
    if not as_json:
        console.print(table)


def _row(path: Path) -> dict[str, Any]:
    """What a list says of a run, or why it cannot be read."""
    try:
        run = runs.load(path)
    except (OSError, ValueError) as error:
        return {"error": str(error)}
    try:
        step_s = breakdown(run).step_s
    except ValueError:  # It was too short.
        step_s = None
    return {"made": run.made, "steps": run.steps, "step_s": step_s, "command": list(run.command)}
