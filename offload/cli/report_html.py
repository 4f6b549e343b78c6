"""A run as one page that needs nothing else: numbers, a bar of the step, lanes over time."""

from __future__ import annotations

import html
import json
from importlib import resources
from pathlib import Path

from offload.breakdown import ENGINE, MODEL, OTHER, Breakdown, title_of, verdict
from offload.cli import report_list, report_timeline
from offload.config import format_bytes
from offload.runs import Run


def page(run: Run, found: Breakdown, path: Path) -> str:
    """The page as HTML."""
    data = {
        "rows": report_timeline.in_rows(run),
        "steps": [[number, round(at, 6)] for number, at, _ in run.stepped],
        "since": found.since,
        "until": found.until,
        "step": found.step_s,
    }
    # Within a script element what begins with < could end it, or keep it from ending.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    filled = {
        "VERDICT": " ".join(html.escape(line) for line in verdict(run, found)),
        "CARDS": _cards(run, found),
        "PARTS": _parts(run, found),
        "LANES": _lanes(run, found),
        "HOMES": _homes(run),
        "WAYS": _ways(found),
        "WHAT_IF": _what_if(run),
        "ABOUT": _about(run, path),
        "TITLE": html.escape(run.made.replace("T", " ")),
        "DATA": embedded,
    }
    text = resources.files("offload.cli").joinpath("report.html").read_text("utf-8")
    for name, content in filled.items():
        text = text.replace(f"<!--{name}-->", content)
    return text


def _about(run: Run, path: Path) -> str:
    # Its age is that of the page as soon as somebody opens it again.
    rows = [(name, told) for name, told in report_list.about(run, path, aged=False)]
    return "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(told)}</dd>" for name, told in rows
    )


def _cards(run: Run, found: Breakdown) -> str:
    cards = [("a step", f"{found.step_s:.3f} s")]
    if run.prediction is not None:
        cards.append(("predicted", f"{run.prediction.step_s:.3f} s"))
    cards += [
        (title_of(MODEL, run), f"{found.parts.get(MODEL, 0) / found.step_s:.0%}"),
        ("steps looked at", str(found.steps)),
        ("misses in them", str(found.misses)),
    ]
    return "".join(
        f"<div class=card><b>{value}</b><span>{name}</span></div>" for name, value in cards
    )


def _parts(run: Run, found: Breakdown) -> str:
    bars, legend = [], []
    for name, seconds in found.parts.items():
        share = seconds / found.step_s
        kind = name if name in (MODEL, ENGINE, OTHER) else "wait"
        told = f"{html.escape(title_of(name, run))}: {seconds:.3f} s ({share:.1%})"
        bars.append(f'<i class="{kind}" style="width:{100 * share:.2f}%" title="{told}"></i>')
        legend.append(f'<span><i class="{kind}"></i>{told}</span>')
    return f"<div class=bar>{''.join(bars)}</div><div class=legend>{''.join(legend)}</div>"


def _table(titles: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _lanes(run: Run, found: Breakdown) -> str:
    predicted = run.prediction.busy if run.prediction else {}
    rows = []
    for lane, busy in found.busy.items():
        moved = found.bytes.get(lane, 0.0)
        rows.append(
            [
                lane,
                f"{busy:.3f} s",
                f"{predicted[lane]:.3f} s" if lane in predicted else "-",
                f"{found.parts.get(lane, 0.0):.3f} s",
                format_bytes(round(moved)) if moved else "-",
                f"{moved / busy / 1e9:.2f} GB/s" if moved and busy else "-",
            ]
        )
    titles = ["lane", "busy", "predicted busy", "training waited", "moved", "speed"]
    return _table(titles, rows)


def _homes(run: Run) -> str:
    tiers = list(run.tiers)
    kinds = list(dict.fromkeys(kind for kind, _, _ in run.homes))
    sizes = {(kind, tier): size for kind, tier, size in run.homes}
    rows = [
        [f"{kind}s", *(_amount(sizes.get((kind, tier), 0)) for tier in tiers)] for kind in kinds
    ]
    at_home = {tier: sum(sizes.get((kind, tier), 0) for kind in kinds) for tier in tiers}
    beside = [_amount(max(0, run.tiers[tier][0] - at_home[tier])) for tier in tiers]
    rows.append(["slots and headers", *beside])
    rows.append(["in all", *(_amount(run.tiers[tier][0]) for tier in tiers)])
    rows.append(["budget", *(_amount(run.tiers[tier][1]) for tier in tiers)])
    return _table(["", *tiers], rows)


def _amount(size: int) -> str:
    return format_bytes(size) if size else "-"


def _ways(found: Breakdown) -> str:
    if not found.ways:
        return "<p>None: all of them live where they are used.</p>"
    return _table(
        ["from > to", "bytes in a step"],
        [[way, format_bytes(round(size))] for way, size in sorted(found.ways.items())],
    )


def _what_if(run: Run) -> str:
    if run.prediction is None:
        return f"<p>It was not asked: {html.escape(run.unpredicted)}.</p>"
    base = run.prediction.step_s
    rows = [
        [f"{name} twice as fast", f"{seconds:.3f} s", _change(seconds / base - 1)]
        for name, seconds in sorted(run.prediction.what_if.items(), key=lambda item: item[1])
    ]
    return _table(["if", "a step takes", "change"], [["as it is", f"{base:.3f} s", ""], *rows])


def _change(share: float) -> str:
    """A change with its sign, where there is any."""
    return f"{share:+.0%}" if round(abs(share), 2) else "0%"
