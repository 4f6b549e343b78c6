"""Values of a model that is cut over ranks: what this rank has of them, and how all are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from offload.model.parameter import OffloadedParameter
from offload.model.snapshots import Key, Snapshots
from offload.parallel.collectives import Collectives
from offload.parallel.flat_shard import FlatShard
from offload.parallel.order import Topic
from offload.planning.profile import Sharding, shard_of
from offload.planning.tiers import format_bytes

_VALUES: Any = torch.Tensor.detach, torch.Tensor.data.__get__  # type: ignore[attr-defined]
_LIKE: Any = torch.zeros_like, torch.empty_like


class Ranks:
    """What an engine asks of other ranks, and what it shows where they have the rest."""

    def __init__(self, collectives: Collectives, snapshots: Snapshots):
        """Of values that `snapshots` show as far as they are here."""
        self.collectives, self.group = collectives, collectives.group
        self._snapshots, self._profile = snapshots, collectives.profile
        self._shown: dict[tuple[int, int], torch.Tensor] = {}
        """What `gathered` shows, by unit and parameter."""
        self._states_whole = False
        """Whether it shows states, too."""

    def __str__(self) -> str:
        group, how = self.group, self._profile.sharding
        zero = 1 if how.late else 2 if how.keeps else 3
        first = ", those of a rank's own backwards first" * how.late
        if group.folds < group.ranks:
            first += f", those of each row of {group.ranks // group.folds} first"
        return (
            f"rank {group.rank} of {group.ranks}, as ZeRO-{zero}: gradients are added in the order "
            f"of ranks{first}; {format_bytes(group.sent_bytes)} sent, exact"
        )

    def without_others(
        self, unit: int, index: int, function: Any, args: Any, kwargs: Any
    ) -> Callable[[], Any] | None:
        """How to call a function of a parameter at rest; None where that needs other ranks."""
        key, resting = Key("weight", unit, index), [isinstance(x, OffloadedParameter) for x in args]
        if (unit, index) in self._shown:
            return None
        if function is torch.Tensor.copy_ and resting[:2] == [True, False]:
            return partial(_copy, *args[:2])
        if function in _VALUES:
            return lambda: self.shard(*key, self._snapshots.read(key))
        if function in _LIKE:
            form = {name: kwargs[name] for name in ("dtype", "device") if name in kwargs}
            return lambda: self._shard(*key, torch.zeros_like(self._snapshots.read(key), **form))
        return None

    def shard(self, kind: str, unit: int, index: int, here: torch.Tensor) -> torch.Tensor:
        """A value of a parameter as the user has it."""
        if self._states_whole and kind not in ("weight", "gradient"):
            return self.assembled(unit, index, here)
        found = self._shard(kind, unit, index, here)
        found.is_copy = kind != "gradient"
        return found

    def _shard(self, kind: str, unit: int, index: int, here: torch.Tensor) -> FlatShard:
        one, first = self._profile.full[unit].parameters[index], self.local(unit, index).start
        how = f"{kind} of {one.name}", self._norms, one.part
        return FlatShard(here.view(-1), one.shape, first, *how)

    def shown(self, unit: int, index: int) -> torch.Tensor:
        """A parameter inside `gathered`, and what is here of a DTensor elsewhere."""
        key = Key("weight", unit, index)
        if (unit, index) in self._shown:
            return self._shown[unit, index]
        if self._profile.full[unit].parameters[index].part is None:
            self._shard(*key, self._snapshots.read(key))._refuse("a value")
        return self._shard(*key, self._snapshots.tensor(key))

    def _norms(self, parts: Sequence[torch.Tensor], order: float) -> torch.Tensor:
        """The norms of tensors of which each rank has a part: the same floats on all of them."""
        self.collectives.meet(Topic.VALUES, len(parts), int(order) if order == order // 1 else 0)
        largest = order == float("inf")
        mine = [
            (one.abs().max() if largest else one.double().abs().pow(order).sum())
            if one.numel()
            else one.new_zeros(())
            for one in parts
        ]
        table = torch.stack([one.double() for one in mine])
        rows = torch.stack(self.group.all_tensors(table))
        return rows.amax(0) if largest else rows.sum(0).pow(1 / order)

    def meet(self, told: bool = False) -> bool:
        """Let all ranks come here, in a save, load, sleep or wake; what any of them tells."""
        return any(one.payload for one in self.collectives.meet(Topic.SAVE, 0, told))

    @contextmanager
    def gathered(
        self, places: Sequence[tuple[int, int]], source: int | None, states: bool
    ) -> Iterator[None]:
        """See `parallel.gathered`; `states` too are whole, as copies."""
        outer, before = self._states_whole, dict[tuple[int, int], torch.Tensor]()
        try:
            for at in places:
                if at not in self._shown:  # Else by a context around this one.
                    found = self.assembled(*at, self._snapshots.read(Key("weight", *at)))
                    before[at] = self.part(*at, found).clone()
                    self._shown[at] = found
            self._states_whole = states or outer
            yield
            if source is not None:
                for at in places:
                    self.group.broadcast(self._shown[at], source)
        finally:
            self._states_whole = outer
            for at, value in before.items():
                mine = self.part(*at, self._shown.pop(at))
                if not torch.equal(_bits(mine), _bits(value)):
                    self._snapshots.put(Key("weight", *at), mine)

    def assembled(self, unit: int, parameter: int, here: torch.Tensor) -> torch.Tensor:
        """A value of a parameter, in its shape, of which each rank gives what it has."""
        self.collectives.meet(Topic.VALUES, unit, parameter)
        full, ranks = self._profile.full[unit], self.group.ranks
        shards = (shard_of(full, Sharding(at, ranks)) for at in range(ranks))
        counts = [one.parameters[parameter].elements for one in shards]
        padded = here.new_zeros(max(*counts, 1))
        padded[: here.numel()] = here.reshape(-1)
        rows = self.group.all_tensors(padded)
        found = torch.cat([rows[rank][:n] for rank, n in zip(self.group.order, counts)])
        return found.view(full.parameters[parameter].shape)

    def part(self, unit: int, parameter: int, value: torch.Tensor) -> torch.Tensor:
        """As much of a value, full or a shard, as is here, flat."""
        one, here = self._profile.full[unit].parameters[parameter], self.local(unit, parameter)
        if value.shape == one.shape:
            if not isinstance(value, FlatShard):
                return value.reshape(-1)[here]
            elements, found = value.local()
            if elements == range(here.start, here.stop):
                return found
        raise ValueError(
            f"to {one.name}, of shape {one.shape}, was given a value of {tuple(value.shape)}, or a "
            "part that another rank has: give all of it, or a shard of this parameter"
        )

    def local(self, unit: int, parameter: int) -> slice:
        """Which elements of a parameter this rank has."""
        one = self._profile.units[unit].parameters[parameter]
        return slice(one.first, one.first + one.elements)


def _copy(parameter: Any, source: torch.Tensor) -> Any:
    """Give a parameter values that all ranks have, or a shard."""
    source = source.to(parameter.dtype)
    if not isinstance(source, FlatShard):
        source = source.expand(parameter.shape).contiguous()
    parameter._offload_access.set_data(source)
    return parameter


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
