"""What `offload train` shows people: tables of memory and lanes, and progress while it runs."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from offload.config import TIERS, Tier, format_bytes
from offload.ledger import LaneUse
from offload.rows import Row, TierUse

NARROW_COLUMNS = 72
"""Below it, lines leave out what is not needed."""

TABLE_COLUMNS = 80
"""Below it, tables of figures break names and headings."""

_LANES = {
    "compute": "updates and sums on the device",
    "h2d": "copies to the device",
    "d2h": "copies from the device",
    "cpu": "updates and sums in CPU memory",
    "disk": "reads and writes of the nvme tier",
}
"""What the lanes do."""

HINT = (
    "everything fits on the device; to see it move, try\n"
    "--params cpu --gradients cpu --optimizer nvme"
)


def is_narrow(columns: int) -> bool:
    """Whether a table of figures is to break names and headings, not to lose columns."""
    return columns < TABLE_COLUMNS


def homes(rows: Iterable[Row], uses: Sequence[TierUse], *, device_is_cpu: bool) -> Table:
    """What lives where in bytes, kinds down and tiers across, with the budget of each tier."""
    table = Table(title="What lives where", title_justify="left")
    table.add_column("")
    for tier in TIERS:
        table.add_column(_title(tier, device_is_cpu), justify="right")
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        tiers = found.setdefault(row.kind, dict.fromkeys(TIERS, 0))
        tiers[row.tier] += row.bytes
    for kind, tiers in found.items():
        table.add_row(f"{kind}s", *(_amount(tiers[tier]) for tier in TIERS))
    use = {use.tier: use for use in uses}
    table.add_row("slots and headers", *(_amount(use[tier].staging_bytes) for tier in TIERS))
    table.add_section()
    table.add_row("in all", *(_amount(taken(use[tier])) for tier in TIERS))
    table.add_row("budget", *(_amount(use[tier].budget_bytes) for tier in TIERS))
    return table


def lanes(uses: Mapping[str, LaneUse]) -> Table:
    """How long each lane was busy, and how long training waited for it."""
    table = Table(title="Lanes", title_justify="left")
    table.add_column("lane")
    for name in ("busy", "exposed", "operations", "moved"):
        table.add_column(name, justify="right")
    for name, use in uses.items():
        if not use.operations:
            continue
        table.add_row(
            name,
            f"{use.busy_s:.2f} s",
            f"{use.exposed_s:.2f} s",
            str(use.operations),
            _amount(use.bytes),
        )
    return table


def lanes_caption(uses: Mapping[str, LaneUse]) -> str:
    """What the table of lanes says, and what the lanes in it do."""
    seen = [f"{name}: {_LANES[name]}" for name, use in uses.items() if use.operations]
    told = ["busy: working; exposed: training had to wait for it (evaluation is left out)"]
    return "\n".join([*told, *("; ".join(seen[k : k + 2]) for k in range(0, len(seen), 2))])


def peak_rss_bytes() -> int:
    """The most memory that this process has had in use so far, whoever took it."""
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        return int(fields["VmHWM"].split()[0]) << 10
    except (OSError, KeyError):
        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return found if sys.platform == "darwin" else found << 10


def taken(use: TierUse) -> int:
    """All bytes that the engine holds of a tier: fixed before the first step, so also the peak."""
    return use.resident_bytes + use.staging_bytes


def _title(tier: Tier, device_is_cpu: bool) -> str:
    return "device (CPU)" if tier == "device" and device_is_cpu else tier


def _amount(count: int) -> str:
    return format_bytes(count) if count else "-"
