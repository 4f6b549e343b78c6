"""A bar chart of what `offload bench adam` found. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch

from cpu_adam.figures import Group

COLOURS = {"stream": "#b8b8b8", "update": "#2f6db3", "peer": "#d98032"}
NAMES = {"stream": "in-place stream of the same bytes", "update": "this update", "peer": "peers"}

BAR_INCHES = 0.24
GAP_BARS = 1.2
"""Space between two formats, in bars."""


def draw(groups: Sequence[Group], title: str, path: str) -> None:
    """A panel for each number of threads, a bar for each job; its length is parameters/s."""
    threads = list(dict.fromkeys(group.threads for group in groups))
    panels = {count: [group for group in groups if group.threads == count] for count in threads}
    bars = max(sum(len(g.figures) + GAP_BARS for g in panel) for panel in panels.values())
    canvas = Canvas(figsize=(2.0 + 5.2 * len(threads), 1.5 + BAR_INCHES * bars), dpi=120)
    axes = canvas.subplots(1, len(threads), sharex=True, sharey=True, squeeze=False)[0]
    fastest = max(figure.parameters_per_s.median for group in groups for figure in group.figures)
    axes[0].set_xlim(0, 1.3 * fastest / 1e6)
    for axis, (count, panel) in zip(axes, panels.items()):
        _panel(axis, panel)
        axis.set_title("1 thread" if count == 1 else f"{count} threads", fontsize=10)
    handles = [Patch(color=COLOURS[role], label=NAMES[role]) for role in COLOURS]
    canvas.legend(handles=handles, loc="lower center", ncols=3, frameon=False, fontsize=9)
    canvas.suptitle(title, fontsize=10)
    canvas.tight_layout(rect=(0, 0.35 / canvas.get_figheight(), 1, 1))
    canvas.savefig(path)


def _panel(axis: Any, groups: Sequence[Group]) -> None:
    places, names, place = [], [], 0.0
    rates, colours, labels = [], [], []
    for group in groups:
        for figure in group.figures:
            rate = figure.parameters_per_s
            places.append(place)
            names.append(f"{group.format}: {figure.label}")
            rates.append(rate.median / 1e6)
            colours.append(COLOURS[figure.role])
            labels.append(f" {rate.median / 1e6:.0f} ({figure.of_stream.median:.2f})")
            place += 1
        place += GAP_BARS
    axis.barh(places, rates, color=colours, height=0.8)
    for at, length, label in zip(places, rates, labels):
        axis.text(length, at, label, va="center", fontsize=8)
    axis.set_yticks(places, names, fontsize=8)
    axis.set_ylim(max(places) + 0.8, -0.8)
    axis.set_xlabel("million parameters per second (share of the stream)", fontsize=9)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
