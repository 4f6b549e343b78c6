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
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from offload.config import BUDGETS, Config
from offload.planning.planner import BudgetError
from offload.planning.tiers import TIERS, Tier, format_bytes, parse_bytes

Share = Callable[[Mapping[Tier, int]], None]
"""Takes the bytes of each tier that an engine wants to hold from now on, or raises BudgetError."""


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
        self._taken: dict[object, Mapping[Tier, int]] = {}
        self._lock = threading.RLock()

    def left(self, tier: Tier, but: object = None) -> int | None:
        """Bytes of a tier that no engine has taken, `but` one; None if the tier is not shared."""
        with self._lock:
            if tier not in self._most:
                return None
            taken = (held.get(tier, 0) for share, held in self._taken.items() if share is not but)
            return self._most[tier] - sum(taken)

    def narrowed(self, config: Config) -> Config:
        """`config` with the budget of each tier limited to what is left."""
        changes: dict[str, int] = {}
        for tier in TIERS:
            left, field = self.left(tier), BUDGETS[tier]
            own = config.bytes_of(field)
            if left is not None:
                changes[field] = left if own is None else min(left, own)
        return replace(config, **changes)  # type: ignore[arg-type]

    def share(self) -> Share:
        """What one engine calls to set its share; an empty mapping returns it."""
        return partial(self._set, object())

    def _set(self, share: object, wanted: Mapping[Tier, int]) -> None:
        with self._lock:
            for tier, most in self._most.items():
                left = self.left(tier, share) or 0
                if wanted.get(tier, 0) > left:
                    raise BudgetError(
                        f"asked for {format_bytes(wanted[tier], up=True)} of the {tier} tier, of "
                        f"which {format_bytes(left)} are left of a shared {BUDGETS[tier]} of "
                        f"{format_bytes(most)}: likely other engines have taken it; let one of "
                        "them sleep or close first"
                    )
            self._taken[share] = dict(wanted)
