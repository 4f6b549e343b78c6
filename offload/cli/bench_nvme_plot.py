"""Heat maps of what `offload bench nvme` found. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

from aio.figures import MODES, Cell, Found, Mode

LIGHT_FROM = 0.55
"""Share of the fastest from which on a cell is so dark that its text must be light."""


def draw(found: Sequence[Found], path: str) -> None:
    """A row for each drive, a panel for each mode: GB/s by block size and depth."""
    canvas = Canvas(figsize=(14, 0.6 + 3.6 * len(found)), dpi=120, layout="constrained")
    axes = canvas.subplots(len(found), len(MODES), squeeze=False)
    for row, one in zip(axes, found):
        for axis, mode in zip(row, MODES):
            _panel(axis, one, mode)
    canvas.suptitle("GB/s by block size and depth (framed: chosen; empty: left out)", fontsize=10)
    canvas.savefig(path)


def _panel(axis: Any, found: Found, mode: Mode) -> None:
    axis.set_title(f"{mode}, {found.path}", fontsize=10)
    cells = _preferred(found, mode)
    if not cells:
        axis.set_axis_off()
        return
    blocks = sorted({cell.setting.block_bytes for cell in cells})
    depths = sorted({cell.setting.depth for cell in cells})
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
    if figure is not None and figure.setting.depth in depths:
        x, y = depths.index(figure.setting.depth), blocks.index(figure.setting.block_bytes)
        frame: Any = {"fill": False, "edgecolor": "#d98032", "linewidth": 2.5}
        axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **frame))
    axis.set_xticks(range(len(depths)), [str(depth) for depth in depths], fontsize=8)
    axis.set_yticks(range(len(blocks)), [f"{block / 2**20:g} MiB" for block in blocks], fontsize=8)
    axis.set_xlabel("depth", fontsize=9)
    axis.tick_params(length=0)


def _preferred(found: Found, mode: Mode) -> list[Cell]:
    """The cells of the backend that was tried in most settings."""
    cells = [cell for cell in found.cells if cell.mode == mode]
    names = [cell.setting.backend for cell in cells]
    most = max(names, key=names.count, default="")
    return [cell for cell in cells if cell.setting.backend == most]
