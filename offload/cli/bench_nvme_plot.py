"""Heat maps of what `offload bench nvme` found. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

from aio.figures import MODES, Cell, Found, Mode
from offload.cli.bench_nvme_report import block_size

LIGHT_FROM = 0.55
"""Share of the fastest from which on a cell is so dark that its text must be light."""


def draw(found: Sequence[Found], path: str) -> None:
    """A row for each drive, a panel for each mode: GB/s by block size and depth."""
    canvas = Canvas(figsize=(14, 0.6 + 3.6 * len(found)), dpi=120, layout="constrained")
    axes = canvas.subplots(len(found), len(MODES), squeeze=False)
    for row, one in zip(axes, found):
        settings = [cell.setting for cell in one.cells]
        settings += [figure.setting for figure in one.figures]
        blocks = sorted({setting.block_bytes for setting in settings})
        depths = sorted({setting.depth for setting in settings})
        for axis, mode in zip(row, MODES):
            _panel(axis, one, mode, blocks, depths)
    canvas.suptitle("GB/s by block size and depth (framed: chosen; empty: left out)", fontsize=10)
    canvas.savefig(path)


def _panel(axis: Any, found: Found, mode: Mode, blocks: list[int], depths: list[int]) -> None:
    backend, cells = _shown(found, mode)
    axis.set_title(f"{mode}, {backend}, {found.path}", fontsize=10)
    if not cells:
        axis.set_axis_off()
        return
    rates: list[list[float]] = [[float("nan")] * len(depths) for _ in blocks]
    for cell in cells:
        at = blocks.index(cell.setting.block_bytes), depths.index(cell.setting.depth)
        rates[at[0]][at[1]] = cell.bytes_per_s / 1e9
    fastest = max(cell.bytes_per_s for cell in cells) / 1e9
    axis.imshow(rates, cmap="Blues", vmin=0, vmax=fastest, aspect="auto", origin="lower")
    for y, line in enumerate(rates):
        for x, rate in enumerate(line):
            if rate == rate:
                colour = "white" if rate > LIGHT_FROM * fastest else "black"
                axis.text(x, y, f"{rate:.2f}", ha="center", va="center", fontsize=8, color=colour)
    figure = found.figure(mode)
    if figure is not None:
        x, y = depths.index(figure.setting.depth), blocks.index(figure.setting.block_bytes)
        frame: Any = {"fill": False, "edgecolor": "#d98032", "linewidth": 2.5, "clip_on": False}
        axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, zorder=3, **frame))
    axis.set_xticks(range(len(depths)), [str(depth) for depth in depths], fontsize=8)
    axis.set_yticks(range(len(blocks)), [block_size(block) for block in blocks], fontsize=8)
    axis.set_xlabel("depth", fontsize=9)
    axis.tick_params(length=0)


def _shown(found: Found, mode: Mode) -> tuple[str, list[Cell]]:
    """The backend that was chosen, or else tried in most settings, and its cells."""
    cells = [cell for cell in found.cells if cell.mode == mode]
    names = [cell.setting.backend for cell in cells]
    figure = found.figure(mode)
    most = figure.setting.backend if figure else max(names, key=names.count, default="")
    return most, [cell for cell in cells if cell.setting.backend == most]
