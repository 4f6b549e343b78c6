"""What `offload train` shows people: tables of memory and lanes, and progress."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from rich.table import Table

from offload.cli.console import Output, Progress, table
from offload.planning.layout import Row, TierUse
from offload.planning.tiers import TIERS, format_bytes
from offload.runtime.stats import LaneUse

SMOOTHING = 0.9
"""Share that the smoothed loss keeps of its old value at each step."""

PLAIN_INTERVAL_S = 10.0
"""Least time between two lines of progress where there is no terminal."""

RECENT_STEPS = 10
"""Speed and time left are means over so many steps."""

LANES_CAPTION = """\
busy: working; exposed: training had to wait for it (evaluation is left out)
compute: updates on the device; h2d, d2h: copies to and from the device
cpu: updates in CPU memory; disk: reads and writes of the nvme tier"""

HINT = (
    "everything fits on the device; to see it move, try\n"
    "--params cpu --gradients cpu --optimizer nvme"
)


def homes(rows: Iterable[Row], uses: Sequence[TierUse], *, device_is_cpu: bool) -> Table:
    """What lives where in bytes, kinds down and tiers across, with the budget of each tier."""
    titles = ("device (CPU)" if device_is_cpu else "device", *TIERS[1:])
    made = table("What lives where", "", *titles)
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        tiers = found.setdefault(row.kind, dict.fromkeys(TIERS, 0))
        tiers[row.tier] += row.bytes
    for kind, tiers in found.items():
        made.add_row(f"{kind}s", *(_amount(tiers[tier]) for tier in TIERS))
    use = {use.tier: use for use in uses}
    made.add_row("slots and headers", *(_amount(use[tier].staging_bytes) for tier in TIERS))
    made.add_section()
    made.add_row("in all", *(_amount(taken(use[tier])) for tier in TIERS))
    made.add_row("budget", *(_amount(use[tier].budget_bytes) for tier in TIERS))
    return made


def lanes(uses: Mapping[str, LaneUse]) -> Table:
    """How long each lane was busy, and how long training waited for it."""
    made = table("Lanes", "lane", "busy", "exposed", "operations", "moved")
    for name, use in uses.items():
        if use.operations:
            busy, exposed = f"{use.busy_s:.2f} s", f"{use.exposed_s:.2f} s"
            made.add_row(name, busy, exposed, str(use.operations), _amount(use.bytes))
    return made


def peak_rss_bytes() -> int:
    """The most memory that this process has had in use so far, whoever took it."""
    with open("/proc/self/status", encoding="utf-8") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return int(fields["VmHWM"].split()[0]) << 10


def taken(use: TierUse) -> int:
    """All bytes that the engine holds of a tier: fixed before the first step, so also the peak."""
    return use.resident_bytes + use.staging_bytes


def _amount(count: int) -> str:
    return format_bytes(count) if count else "-"


class TrainingProgress(Progress):
    """Steps, loss, speed and time left."""

    def __init__(self, console: Output, steps: int) -> None:
        super().__init__(console, PLAIN_INTERVAL_S)
        self._steps = steps
        self._loss: float | None = None
        self._ends = deque([time.monotonic()], maxlen=RECENT_STEPS + 1)
        """When the last steps ended, behind the moment when the first of them began."""

    def update(self, step: int, loss: float, tokens: int) -> None:
        """Shows that `step` (from 1), of so many tokens, is done."""
        before = loss if self._loss is None else self._loss
        self._loss = SMOOTHING * before + (1 - SMOOTHING) * loss
        self._ends.append(time.monotonic())
        mean_s = max(self._ends[-1] - self._ends[0], 1e-9) / (len(self._ends) - 1)
        left = timedelta(seconds=round(mean_s * (self._steps - step)))
        told = f"smoothed loss {self._loss:.3f}  {tokens / mean_s:,.0f} tokens/s  {left} left"
        self.show(f"step {step}/{self._steps}", step / self._steps, told)

    def evaluating(self, number: int, count: int) -> None:
        """Shows that forward `number` (from 1) of `count` on held-out text begins."""
        self.show(f"evaluating {number}/{count}", (number - 1) / count, "on held-out text")
