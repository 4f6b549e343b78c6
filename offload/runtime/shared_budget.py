"""A budget that several engines of a process share.

[Note: Shared budget]
A policy and its reference model, for example, share one device. Each is attached with the same
`SharedBudget`, one after the other: its plan may take what the others left of each tier, or less if
its own Config says so. An engine returns its share when it is closed or detached, and when it
sleeps that of the tiers it leaves. Waking takes the share again, and is refused if another engine
has taken it meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

from offload.config import BUDGETS, Config
from offload.planning.planner import BudgetError
from offload.planning.tiers import TIERS, Tier, format_bytes, parse_bytes


class SharedBudget:
    """The budget of each tier for all engines together that are attached with it."""

    def __init__(
        self,
        *,
        device_memory: int | str | None = None,
        cpu_memory: int | str | None = None,
        nvme_space: int | str | None = None,
    ):
        """Sizes as in `Config`; tiers without one are not shared.

        Raises:
            ValueError: a size is malformed.
        """
        given = (device_memory, cpu_memory, nvme_space)
        self._most = {
            tier: parse_bytes(size) for tier, size in zip(TIERS, given) if size is not None
        }
        self._taken: dict[Share, Mapping[Tier, int]] = {}
        self._lock = threading.Lock()

    def left(self, tier: Tier) -> int | None:
        """Bytes of a tier that no engine has taken; None if the tier is not shared."""
        with self._lock:
            return self._left(tier)

    def _left(self, tier: Tier) -> int | None:
        if tier not in self._most:
            return None
        return self._most[tier] - sum(one.get(tier, 0) for one in self._taken.values())

    def narrowed(self, config: Config) -> Config:
        """`config` with the budget of each tier limited to what is left."""
        changes: dict[str, int] = {}
        for tier in TIERS:
            left, field = self.left(tier), BUDGETS[tier]
            own = config.bytes_of(field)
            if left is not None:
                changes[field] = left if own is None else min(left, own)
        return replace(config, **changes)  # type: ignore[arg-type]

    def change(self, share: Share, wanted: Mapping[Tier, int]) -> None:
        """Set `share` to `wanted` bytes of each tier.

        Raises:
            BudgetError: more than is left; the share stays as it was.
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
    """What one engine has taken of a shared budget: `taken` bytes of each tier.

    Raises:
        BudgetError: more than is left.
    """

    def __init__(self, budget: SharedBudget, taken: Mapping[Tier, int]):
        self._budget = budget
        self.change(taken)

    def change(self, wanted: Mapping[Tier, int]) -> None:
        """Take `wanted` bytes of each tier instead.

        Raises:
            BudgetError: more than is left; the share stays as it was.
        """
        self._budget.change(self, wanted)

    def give_back(self) -> None:
        """Return everything."""
        self.change({})
