"""What an engine has done, in all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload.lanes import LaneUse
from offload.layout import TierUse


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
