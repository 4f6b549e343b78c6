"""A run as a timeline in the Trace Event Format, which Perfetto and Chrome's tracing open.

The format: "Trace Event Format", Google, 2016. Complete events (`X`) of one thread must nest, so
what overlaps without nesting (units in use together) stands in rows of its own.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from offload.runs import LANES, Run, Span

ORDER = (*LANES[:2], "waiting", *LANES[2:])
"""Lanes from top to bottom."""

_PROCESS = 1
_STEPS = 2
"""The row of moments, above those of the lanes; that of the process's number is its main thread."""


def rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans of one lane in as few rows as can be, none of which overlap in a row."""
    found: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.stop)):
        row = next((row for row in found if row[-1].stop <= span.start), None)
        if row is None:
            found.append(row := [])
        row.append(span)
    return found


def lanes(run: Run) -> list[tuple[str, list[Span]]]:
    """Title and spans of every row, from top to bottom; waits are a lane of their own."""
    waits = [Span("waiting", f"for {w.lane}", "", w.start, w.stop, 0) for w in run.waits]
    found: dict[str, list[Span]] = {}
    for span in (*run.spans, *waits):
        found.setdefault(span.lane, []).append(span)
    names = sorted(found, key=ORDER.index)
    titled = []
    for name in names:
        parts = rows(found[name])
        titled += [(name if len(parts) == 1 else f"{name} {k + 1}", p) for k, p in enumerate(parts)]
    return titled


def timeline(run: Run) -> dict[str, Any]:
    """The JSON object of the format. Times there are in microseconds."""
    events: list[dict[str, Any]] = [_meta("process_name", 0, name="offload")]
    for thread, (title, spans) in enumerate([("steps", []), *lanes(run)], start=_STEPS):
        events.append(_meta("thread_name", thread, name=title))
        events.append(_meta("thread_sort_index", thread, sort_index=thread))
        events += [_event(span, thread) for span in spans]
    moment = {"ph": "i", "s": "t", "pid": _PROCESS, "tid": _STEPS}
    events += [
        {**moment, "name": f"step {number}", "ts": _nanoseconds(at) / 1e3}
        for number, at, _ in run.stepped
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"made": run.made, "command": shlex.join(run.command), "model": run.model},
    }


def _meta(kind: str, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "args": arguments}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _event(span: Span, thread: int) -> dict[str, Any]:
    start = _nanoseconds(span.start)
    event = {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "ts": start / 1e3,
        "dur": (_nanoseconds(span.stop) - start) / 1e3,
        "pid": _PROCESS,
        "tid": thread,
        "args": {"unit": span.unit, "bytes": span.bytes},
    }
    return event | ({"cname": "terrible"} if span.lane == "waiting" else {})


def in_rows(run: Run) -> Sequence[tuple[str, list[list[Any]]]]:
    """Rows as short lists, for a page: start, seconds, name, unit, bytes."""
    return [
        (
            title,
            [
                [round(s.start, 6), round(s.stop - s.start, 6), s.name, s.unit, s.bytes]
                for s in spans
            ],
        )
        for title, spans in lanes(run)
    ]
