"""What an engine has done, in all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload.config import format_bytes
from offload.ledger import LaneUse
from offload.rows import TierUse


@dataclass(frozen=True, slots=True)
class Report:
    """What an engine has done since it was attached."""

    steps: int
    misses: int
    """Uses of a unit that the compiled order did not foresee."""
    lanes: Mapping[str, LaneUse]
    tiers: tuple[TierUse, ...]
    wall_s: float
    """Seconds since the engine was attached."""
    compute_s: float
    """Those seconds less the time in which the user's thread waited for a lane."""

    def __str__(self) -> str:
        lines = [
            f"{self.steps} steps; {self.wall_s:.2f} s since attach, "
            f"{self.wall_s - self.compute_s:.2f} s of them waiting for lanes; "
            f"{self.misses} misses (units used in another order than the one seen before)",
            f"{'lane':8} {'busy':>10} {'exposed':>10} {'moved':>10}",
        ]
        for name, use in self.lanes.items():
            if use.operations:
                seconds = f"{use.busy_s:8.2f} s {use.exposed_s:8.2f} s"
                lines.append(f"{name:8} {seconds} {format_bytes(use.bytes):>10}")
        return "\n".join([*lines, f"{'tier':8} {'taken':>10} of", *map(str, self.tiers)])
