"""What `offload train` shows while it runs: a view that moves on a terminal, else plain lines."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from offload.cli import display
from offload.cli.curve import curve
from offload.config import format_bytes

SMOOTHING = 0.9
"""Share that the smoothed loss keeps of its old value at each step."""

PLAIN_INTERVAL_S = 10.0
"""Least time between two lines of progress where there is no terminal."""

DRAWN_INTERVAL_S = 0.2
"""Least time between two drawings on a terminal: drawing takes time from training."""

WINDOW_S = 5.0
"""Loads are shares of about the last so many seconds, and speeds are means over them, but over some
steps at least."""

_RECENT_STEPS = 10

WIDE_COLUMNS = 96
"""From here on the curve stands beside the lanes, not above."""

SHORT_LINES = 18
"""Terminals with fewer lines show the first line and what bounds the step only."""

_TINY_COLUMNS = 56
"""Below it, the first line leaves out the speed."""

_CURVE_ROWS = 7
_BAR_COLUMNS = 16
_EDGE_COLUMNS = 6
_NAME_COLUMNS = 13
_RIGHT_COLUMNS = 58
"""Of lanes and memory, and what stands between."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a lane did in a stretch of time."""

    name: str
    busy: float
    """Share of the time in which it worked."""
    exposed: float
    """Share of the time in which training waited for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """All that a drawing shows."""

    step: int
    steps: int
    losses: Sequence[float]
    """Smoothed, of each step."""
    tokens_per_s: float
    left_s: float
    loads: Sequence[Load] = ()
    """The model's own compute first, named `model`."""
    memory: Sequence[tuple[str, int, int]] = ()
    """Name of a tier, bytes taken, budget."""


def bounded_by(loads: Sequence[Load]) -> str:
    """What bounds the step, in a line: what is waited for, or none of the lanes."""
    waits = [load for load in loads if load.name != "model"]
    worst = max(waits, key=lambda load: load.exposed, default=None)
    waiting = sum(load.exposed for load in waits)
    if worst is None or worst.exposed < max(0.01, 1 - waiting):
        most = f", for {worst.name} most" if worst and worst.exposed >= 0.01 else ""
        return f"bound by no lane: training waits {waiting:.0%}{most}"
    return f"bound by {worst.name}: training waits for it {worst.exposed:.0%} of the time"


def loads_between(before: Any, now: Any) -> list[Load]:
    """Loads of the lanes between two looks, each `(wall_s, {lane: (busy_s, exposed_s)})`."""
    (since, old), (until, new) = before, now
    passed = max(until - since, 1e-9)
    found = []
    for name, (busy, exposed) in new.items():
        busy_before, exposed_before = old.get(name, (0.0, 0.0))
        if busy > 0 or exposed > 0:
            load = Load(
                name,
                min(1.0, (busy - busy_before) / passed),
                min(1.0, (exposed - exposed_before) / passed),
            )
            found.append(load)
    model = max(0.0, 1 - sum(load.exposed for load in found))
    return [Load("model", model, 0.0), *found]


def screen(shown: Shown, columns: int, lines: int, *, ascii_only: bool = False) -> RenderableType:
    """A drawing for a terminal of so many columns and lines."""
    head = _head(shown, columns)
    verdict = Text(bounded_by(shown.loads), style="bold")
    if lines < SHORT_LINES:
        return Group(head, verdict)
    bar = _BAR_COLUMNS if columns >= _TINY_COLUMNS else _BAR_COLUMNS // 2
    lanes, memory = _lanes(shown.loads, bar), _memory(shown.memory, bar)
    if columns < WIDE_COLUMNS:
        drawn = loss_curve(shown.losses, columns, ascii_only=ascii_only)
        return Group(head, drawn, lanes, memory, verdict)
    both = Table.grid(padding=(0, 3))
    drawn = loss_curve(shown.losses, columns - _RIGHT_COLUMNS, ascii_only=ascii_only)
    both.add_row(drawn, Group(lanes, Text(), memory))
    return Group(head, both, verdict)


def _head(shown: Shown, columns: int) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in range(2):
        grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right")
    loss = f"smoothed loss {shown.losses[-1]:.3f}" if shown.losses else ""
    told = loss
    if columns >= _TINY_COLUMNS:
        told += f"  {shown.tokens_per_s:,.0f} tokens/s"
    if columns >= display.NARROW_COLUMNS:
        told += f"  {_clock(shown.left_s)} left"
    bar = ProgressBar(total=shown.steps, completed=shown.step)
    grid.columns[1].ratio = 1
    grid.add_row(f"step {shown.step}/{shown.steps}", bar, told)
    return grid


def _clock(seconds: float) -> str:
    minutes, rest = divmod(math.ceil(round(seconds, 1)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def loss_curve(
    losses: Sequence[float], columns: int, rows: int = _CURVE_ROWS, *, ascii_only: bool = False
) -> Table:
    """The losses as a curve with its highest and lowest value beside it, `columns` in all."""
    drawn = curve(losses, max(8, columns - _EDGE_COLUMNS - 2), rows, ascii_only=ascii_only)
    high, low = (f"{edge(losses):.3f}" if losses else "" for edge in (max, min))
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", style="dim", no_wrap=True, min_width=_EDGE_COLUMNS)
    grid.add_column(no_wrap=True, style="cyan", min_width=len(drawn[0]))
    for number, line in enumerate(drawn):
        grid.add_row(high if number == 0 else low if number == rows - 1 else "", line)
    return grid


def _lanes(loads: Sequence[Load], width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, min_width=_NAME_COLUMNS)
    grid.add_column(width=width)
    for _ in range(2):
        grid.add_column(no_wrap=True, justify="right", min_width=8)
    grid.add_row("", "", "busy", "waited", style="dim")
    for load in loads:
        waited = "" if load.name == "model" else f"{load.exposed:.0%}"
        bar = ProgressBar(total=1.0, completed=load.busy, width=width)
        style = "red" if load.exposed >= 0.1 else ""
        grid.add_row(load.name, bar, f"{load.busy:.0%}", Text(waited, style=style))
    return grid


def _memory(tiers: Sequence[tuple[str, int, int]], width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, min_width=_NAME_COLUMNS)
    grid.add_column(width=width)
    grid.add_column(no_wrap=True)
    for name, taken, budget in tiers:
        if budget:
            bar = ProgressBar(total=budget, completed=taken, width=width)
            title = f"{name} {'space' if name == 'nvme' else 'memory'}"  # Lanes have its name, too.
            grid.add_row(title, bar, f"{format_bytes(taken)} of {format_bytes(budget)}")
    return grid


class _Mean:
    """A mean in which what is long ago counts less and less."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def of(self, value: float) -> float:
        """The mean with one more value."""
        self._sum = SMOOTHING * self._sum + (1 - SMOOTHING) * value
        self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        return self._sum / self._weight


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean after each loss, in which what is long ago counts less."""
    mean = _Mean()
    return [mean.of(loss) for loss in losses]


def _live(console: Console) -> Live:
    """Lines that are drawn again in place, and gone in the end."""
    return Live(
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # Else what goes to a file would come here.
        redirect_stderr=console.is_terminal,
    )


class Progress:
    """Loss, speed and time left, and on a terminal what the lanes do: entered while it runs."""

    def __init__(self, console: Console, steps: int, report: Callable[[], Any] | None = None):
        """`report` gives an engine's `Report` at any time."""
        self._console = console
        self._steps = steps
        self._report = report
        self._mean = _Mean()
        self._losses: list[float] = []
        self._spoken = time.monotonic()
        self._ends = deque([self._spoken])
        """When the last steps ended, behind the moment when the first of them began."""
        self._looks: list[tuple[float, Mapping[str, tuple[float, float]]]] = []
        self._live = _live(console)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()

    def update(self, step: int, loss: float, tokens: int) -> None:
        """Shows that `step` (from 1), of so many tokens, is done."""
        self._losses.append(self._mean.of(loss))
        now = time.monotonic()
        self._ends.append(now)
        while len(self._ends) > _RECENT_STEPS + 1 and now - self._ends[1] > WINDOW_S:
            self._ends.popleft()
        interval = DRAWN_INTERVAL_S if self._console.is_terminal else PLAIN_INTERVAL_S
        if step not in (1, self._steps) and now - self._spoken < interval:
            return
        self._spoken = now
        mean_s = max(now - self._ends[0], 1e-9) / (len(self._ends) - 1)
        tokens_per_s, left = tokens / mean_s, mean_s * (self._steps - step)
        if self._console.is_terminal:
            self._draw(step, tokens_per_s, left)
            return
        self._console.print(
            f"step {step}/{self._steps}  smoothed loss {self._losses[-1]:.3f}  "
            f"{tokens_per_s:,.0f} tokens/s  {_clock(left)} left",
            highlight=False,
            soft_wrap=True,
        )

    def _draw(self, step: int, tokens_per_s: float, left: float) -> None:
        loads: list[Load] = []
        memory: list[tuple[str, int, int]] = []
        if self._report is not None:
            report = self._report()
            used = {name: (use.busy_s, use.exposed_s) for name, use in report.lanes.items()}
            self._looks.append((report.wall_s, used))
            while len(self._looks) > 2 and report.wall_s - self._looks[1][0] > WINDOW_S:
                self._looks.pop(0)
            first = self._looks[0] if len(self._looks) > 1 else (0.0, {})
            loads = loads_between(first, self._looks[-1])
            memory = [(use.tier, display.taken(use), use.budget_bytes) for use in report.tiers]
        shown = Shown(
            step=step,
            steps=self._steps,
            losses=self._losses,
            tokens_per_s=tokens_per_s,
            left_s=left,
            loads=loads,
            memory=memory,
        )
        size, ascii_only = self._console.size, self._console.options.ascii_only
        drawn = screen(shown, size.width, size.height, ascii_only=ascii_only)
        self._live.update(drawn, refresh=True)


class Evaluating:
    """How far the look at held-out text has come, after the last step: entered while it runs."""

    def __init__(self, console: Console):
        self._console = console
        self._spoken = -math.inf
        self._live = _live(console)

    def __enter__(self) -> Evaluating:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()

    def update(self, number: int, count: int) -> None:
        """Shows that forward `number` (from 1) of `count` begins."""
        now, terminal = time.monotonic(), self._console.is_terminal
        if now - self._spoken < (DRAWN_INTERVAL_S if terminal else PLAIN_INTERVAL_S):
            return
        self._spoken, told = now, f"evaluating {number}/{count}"
        if terminal:
            grid = Table.grid(expand=True, padding=(0, 1))
            grid.add_column(no_wrap=True)
            grid.add_column(ratio=1)
            grid.add_row(told, ProgressBar(total=count, completed=number - 1))
            self._live.update(grid, refresh=True)
        else:
            self._console.print(f"{told} on held-out text", highlight=False, soft_wrap=True)
