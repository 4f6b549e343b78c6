"""What lives where, for people: lines of a plan that say in bytes what a tier holds."""

from __future__ import annotations

from dataclasses import dataclass

from offload.config import Tier, format_bytes
from offload.records import Kind


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table of what lives where."""

    kind: Kind
    tier: Tier
    units: int
    bytes: int

    def __str__(self) -> str:
        units = "1 unit" if self.units == 1 else f"{self.units} units"
        return f"{self.kind:8} on {self.tier:6} {format_bytes(self.bytes):>10} of {units}"


@dataclass(frozen=True, slots=True)
class TierUse:
    """What a plan takes of one tier, against the budget."""

    tier: Tier
    resident_bytes: int
    staging_bytes: int
    budget_bytes: int

    def __str__(self) -> str:
        taken = format_bytes(self.resident_bytes + self.staging_bytes)
        return f"{self.tier:8} {taken:>10} of {format_bytes(self.budget_bytes)}"
