"""A budget that the engines of a process share: what one of them takes, the others do not get.

[Note: Shared budget]
A policy and its reference model live on one device. Each is attached with the same `SharedBudget`,
in turn: a plan may take what is left of every tier, or less where its own Config says so. Closing
or detaching an engine gives its share back, sleeping that of the tiers it leaves; waking takes it
again, or is refused where others have taken it meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

from offload.config import BUDGETS, TIERS, Config, Tier, format_bytes, parse_bytes
from offload.plan import BudgetError


class SharedBudget:
    """Most bytes of each tier that all engines attached with it take together."""

    def __init__(
        self,
        *,
        device_memory: int | str | None = None,
        cpu_memory: int | str | None = None,
        nvme_space: int | str | None = None,
    ):
        """Sizes as in `Config`; of a tier left out every engine takes what its own Config says.

        Raises:
            ValueError: what is given is no size.
        """
        given = (device_memory, cpu_memory, nvme_space)
        self._most = {
            tier: parse_bytes(size) for tier, size in zip(TIERS, given) if size is not None
        }
        self._taken: dict[Share, Mapping[Tier, int]] = {}
        self._lock = threading.Lock()

    def left(self, tier: Tier) -> int | None:
        """Bytes of a tier that nobody has taken; None where it is not shared."""
        with self._lock:
            return self._left(tier)

    def _left(self, tier: Tier) -> int | None:
        if tier not in self._most:
            return None
        return self._most[tier] - sum(one.get(tier, 0) for one in self._taken.values())

    def narrowed(self, config: Config) -> Config:
        """`config` with no more of any tier than is left."""
        changes: dict[str, int] = {}
        for tier in TIERS:
            left, field = self.left(tier), BUDGETS[tier]
            own = config.bytes_of(field)
            if left is not None:
                changes[field] = left if own is None else min(left, own)
        return replace(config, **changes)  # type: ignore[arg-type]

    def change(self, share: Share, wanted: Mapping[Tier, int]) -> None:
        """Let `share` hold `wanted` bytes of each tier, in place of what it held.

        Raises:
            BudgetError: more than is left.
        """
        with self._lock:
            before = self._taken.pop(share, {})
            for tier in self._most:
                left = self._left(tier)
                if left is not None and wanted.get(tier, 0) > max(left, before.get(tier, 0)):
                    if before:
                        self._taken[share] = before
                    raise BudgetError(
                        f"asked for {format_bytes(wanted[tier], up=True)} of the {tier} tier, of "
                        f"which {format_bytes(max(0, left))} are left of a shared "
                        f"{BUDGETS[tier]} of {format_bytes(self._most[tier])}: likely other "
                        "engines have taken it; let one of them sleep or close first"
                    )
            if any(wanted.values()):
                self._taken[share] = dict(wanted)


class Share:
    """What one engine holds of a shared budget."""

    def __init__(self, budget: SharedBudget, taken: Mapping[Tier, int]):
        """Take `taken` bytes of each tier of `budget`.

        Raises:
            BudgetError: more than is left.
        """
        self._budget = budget
        self.change(taken)

    def change(self, wanted: Mapping[Tier, int]) -> None:
        """Hold `wanted` bytes of each tier instead.

        Raises:
            BudgetError: more than is left; all stays as it was.
        """
        self._budget.change(self, wanted)

    def give_back(self) -> None:
        """Hold nothing more."""
        self.change({})
