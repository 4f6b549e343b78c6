"""Where the values of a sleeping engine lie: in CPU memory, or in a file of their own on nvme."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from offload.arena import host_tensor
from offload.bounce import Copy
from offload.config import BUDGETS, TIERS, Tier, format_bytes
from offload.device import Device
from offload.layout import Plan
from offload.machine import measured_speeds
from offload.plan import BudgetError
from offload.program import Value
from offload.records import KINDS
from offload.shared import Share
from offload.sizes import Placement, file_layout
from offload.store import Store


class Bed:
    """Room for the values of a plan whose homes are in tiers that are given back."""

    def __init__(
        self,
        plan: Plan,
        given: tuple[Tier, ...],
        directories: tuple[str, ...],
        share: Share | None,
        device: Device,
    ):
        """Make room for what lives in the tiers `given`: in `directories`, or in CPU memory.

        Raises:
            BudgetError: there is no budget for it, of the plan or of those that share one.
            OSError, MemoryError: there is no room for it.
        """
        self.given = given
        self._plan = plan
        self._share = share
        self._device = device
        self._tier: Tier = "nvme" if directories else "cpu"
        self._memory: dict[Value, torch.Tensor] = {}
        self._store: Store | None = None
        sizes = {value: plan.bytes_of(value.kind, value.unit) for value in self.values()}
        self.bytes = sum(sizes.values())
        self.largest = max(sizes.values(), default=0)
        """Bytes of the largest value."""
        layout = file_layout(plan.profile, self._placements(), plan.states)
        if directories and sizes:
            self.bytes = layout.bytes
        self._check()
        self._hold({**self._awake(), self._tier: plan.taken_bytes(self._tier) + self.bytes})
        try:
            if directories and sizes:
                self._store = Store(directories, layout, speeds=measured_speeds(directories))
            else:
                self._memory = {value: host_tensor(size) for value, size in sizes.items()}
        except BaseException:
            self._hold(self._awake())
            raise

    def values(self) -> Iterator[Value]:
        """The values whose home is in a tier that is given back."""
        for kind, unit in self._plan.homes:
            if self._plan.home(kind, unit).tier in self.given and self._plan.bytes_of(kind, unit):
                yield Value(kind, unit)

    def _placements(self) -> list[Placement]:
        """All that sleeps on nvme, and nothing else there."""
        asleep = set(self.values())
        return [
            Placement(*("nvme" if Value(kind, unit) in asleep else "device" for kind in KINDS))
            for unit in range(len(self._plan.placements))
        ]

    def _check(self) -> None:
        """Whether the plan's own budget has room.

        Raises:
            BudgetError: it has none.
        """
        kept, budget = self._plan.taken_bytes(self._tier), self._plan.budgets[self._tier]
        if kept + self.bytes > budget:
            field = BUDGETS[self._tier]
            other = ", or let it sleep on nvme" if self._tier == "cpu" else ""
            raise BudgetError(
                f"sleeping in the {self._tier} tier takes {format_bytes(self.bytes, up=True)} of "
                f"it beside the {format_bytes(kept)} that are taken, and {field} is "
                f"{format_bytes(budget)}: attach with {field} of "
                f"{format_bytes(kept + self.bytes, up=True)} or more{other}"
            )

    # -- what others get of a shared budget ----------------------------------------------------

    def _awake(self) -> dict[Tier, int]:
        return {tier: self._plan.taken_bytes(tier) for tier in TIERS}

    def _hold(self, wanted: Mapping[Tier, int]) -> None:
        if self._share is not None:
            self._share.change(wanted)

    def asleep(self) -> None:
        """The memory of the tiers is given back."""
        held = {tier: 0 if tier in self.given else size for tier, size in self._awake().items()}
        self._hold({**held, self._tier: held[self._tier] + self.bytes})

    def wakes(self) -> None:
        """The memory of the tiers is about to be taken again.

        Raises:
            BudgetError: others have it.
        """
        self._hold({**self._awake(), self._tier: self._plan.taken_bytes(self._tier) + self.bytes})

    # -- the values ----------------------------------------------------------------------------

    def put(self, value: Value, content: torch.Tensor, step: int, copy: Copy) -> None:
        """Keep the bytes of a value; `copy` brings them from where they are."""
        if self._store is None:
            copy(self._memory[value], content)
            return
        source = content
        if self._device.holds(content):
            source = host_tensor(len(content))
            copy(source, content)
        self._store.write(value.kind, self._plan.profile.units[value.unit].name, source, step)

    def get(self, value: Value, into: torch.Tensor, copy: Copy) -> None:
        """Fill `into` with the bytes of a value."""
        if self._store is None:
            copy(into, self._memory[value])
            return
        target = host_tensor(len(into)) if self._device.holds(into) else into
        self._store.read(value.kind, self._plan.profile.units[value.unit].name, target)
        if target is not into:
            copy(into, target)

    def close(self) -> None:
        """Let go of what it holds, which nobody needs any more."""
        self._memory = {}
        if self._store is not None:
            self._store.close()

    def left(self) -> None:
        """The engine is awake: it holds what its plan says, and nothing here."""
        self.close()
        self._hold(self._awake())
