"""What an engine does together with those of other ranks: weights, gradients, norm, values.

[Note: Ranks]
Each rank has its shard of every unit in its own tiers, and all that moves and updates values knows
shards only ([Note: Shards] of `planning.profile`). Here a unit is made of its shards before it is
used, and its gradient is sent to the owners after it has come. Both are ops of the pass, which wait
for slots and are waited for like any other; the user's thread begins them in the order of `order`.

Where the order is known, the weights of the next unit are gathered while one computes, and a
gradient is on its way while the next one is made. So a gather goes ahead of the exchange of the
gradient that is made meanwhile, and a use waits for its own gather, not for the exchange before.

[Note: Sums over ranks]
An owner gets the gradients of all ranks and adds them to what it keeps one after the other, in the
order of ranks, by the rounding of a micro-batch. So N ranks with A micro-batches each sum as one
process does that takes the N * A in turn. Over two levels what comes are sums already, see [Note:
Two levels]. Where a parameter got no gradient on a rank, that rank sends -0.0, which added to any
number is that number.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from offload.model.early_updates import Step
from offload.model.parameter import OffloadedParameter
from offload.model.passes import Entry, Passes
from offload.model.snapshots import Key, Snapshots
from offload.parallel.flat_shard import FlatShard
from offload.parallel.group import Group, Message
from offload.parallel.order import Kind, Order, union
from offload.planning.layout import Place
from offload.planning.profile import ITEM_BYTES, Sharding, shard_of
from offload.program.compile import collected, exchange
from offload.program.ops import Use, Value, Verb
from offload.runtime.entry import EngineError
from offload.runtime.memory import typed
from offload.runtime.runner import Runner, Task

_ALONE: Any = (
    torch.Tensor.detach,
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
    torch.zeros_like,
    torch.empty_like,
)
"""What gives a shard of a parameter, and needs no other rank."""


class Ranks:
    """The part of an engine that other ranks take part in."""

    def __init__(self, group: Group, runner: Runner, passes: Passes, snapshots: Snapshots):
        """Over the ranks of `group`, which have attached the same model."""
        self._snapshots = snapshots
        self._shown: dict[tuple[int, int], torch.Tensor] = {}
        """What `gathered` shows, by unit and parameter."""
        self._states_whole = False
        """Whether it shows states, too."""
        self.group, self._runner, self._passes = group, runner, passes
        self._plan, self._full = runner.plan, runner.plan.profile.full
        self._order = Order(self._all_messages, self._serve)
        self._in_columns: set[int] = set()
        """Units of which the device has what its column does; the same ones on all ranks."""
        self._changed: set[int] = set()
        """Units of which weights here have, since a pass began."""
        self._flying: deque[tuple[Task | None, list[Any], Callable[[], None]]] = deque()
        """Collectives that have begun, of which op, and what to do when they are over."""
        self.active: Any = None
        """`ActiveUnits`."""
        self._busy: set[Place | None] = set()
        """Where the weights were that were in use at the last exchange."""
        self._sent: tuple[int, Task | None] = (-1, None)
        """The last unit whose gradient was exchanged, and by which op."""
        self.gradients: Any = None
        """`SummedGradients`."""
        self._backwards = 0
        """Since the last step."""
        runner.on_failure = group.fail
        self._exchanged = Place("device", "exchange")
        passes.ranks = self

    # -- passes ----------------------------------------------------------------------------------

    def opened(self, verb: Verb, held: Mapping[Place, int]) -> None:
        """A pass begins, on all ranks."""
        gathered = sorted((at.number, u) for at, u in held.items() if at.use == "full_weight")
        changed, self._changed = sum(1 << unit for unit in self._changed), set()
        self._order.open((verb.value, tuple(gathered)), changed)

    def _all_messages(self, mine: Message) -> list[Message]:
        """A round. What weights changed on any rank is kept on none."""
        said = self.group.all_messages(mine)
        changed = union(said, Kind.OPEN)
        for unit in range(changed.bit_length()):
            if changed >> unit & 1:
                self._passes.pause()
                self._passes.invalidate(unit)
                self._in_columns.discard(unit)
        return said

    def changes(self, unit: int) -> None:
        """Weights of this rank change; all ranks hear it when its next pass begins.

        Raises:
            RuntimeError: other ranks would use the old ones in this pass, which they keep.
        """
        self._changed.add(unit)
        keeps = self._plan.profile.sharding.keeps or unit in self._in_columns
        if keeps and self._passes.verb is not None:
            with self._runner.once():
                raise RuntimeError(
                    f"{self._full[unit].name} was changed inside a forward or backward, for which "
                    "other ranks keep what they have gathered of it: change weights between them, "
                    "or give Config(shard=3), without a mesh of two dimensions"
                )

    def closed(self) -> None:
        """The pass is over: what other ranks still need of it is done first."""
        self._busy, self._sent = set(), (-1, None)
        backward = self._passes.verb is Verb.BACKWARD
        self._backwards += backward
        members = self._order.close(self.gradients.came(), backward=backward)
        self._land()
        self.gradients.also_came(members)

    def gather(self, entry: Entry) -> None:
        """The weights of a unit, which is used now; begin with those of the next."""
        if (task := entry.gather) is not None and not task.begun:
            self._land()
            self._request(entry.unit, task)
        if task is not None:
            self._land(task)
        elif any(one is not self._sent[1] for one, *_ in self._flying):
            self._land()  # The slot may get its weights just now.
        self._ahead()

    def _ahead(self, *, wait: bool = False) -> None:
        """Begin to gather what is used next, if it is known and its slot is free; `wait` for lanes,
        but not for a unit that is in use."""
        entry = self._passes.following()
        if entry is None or self._order.next != Message(Kind.GATHER, entry.unit):
            return
        if (task := entry.gather) is None or task.begun:
            return
        if wait and self._plan.full_weight[entry.unit] not in self._busy:
            self._land()
            with self.group.comm_stream():
                self._runner.begin(task)
        elif not self._runner.begins(task):
            return
        self._request(entry.unit, task)

    def _request(self, unit: int, task: Task) -> None:
        self._order.request(
            Message(Kind.GATHER, unit),
            partial(self._begin_gather, unit, task),
            sooner=self._plan.full_weight[unit] not in self._busy,
        )

    def _begin_gather(self, unit: int, task: Task) -> None:
        home = self._plan.weight_slot[unit] or self._plan.home("weight", unit)
        here = self._runner.memory.at(Use(home, Value("weight", unit)))
        with self.group.comm_stream():
            if not task.begun:
                self._runner.begin(task)
            works = self._gathered(unit, here, self._runner.memory.weights(unit))
        self._flying.append((task, works, partial(self._runner.finish, task)))

    def gather_apart(self, unit: int, into: torch.Tensor) -> None:
        """The weights of a unit in other memory than its slot."""
        self._land()
        self._order.request(Message(Kind.GATHER, unit), partial(self._gather_home, unit, into))
        self._land()

    def _gather_home(self, unit: int, into: torch.Tensor) -> None:
        size = self._plan.bytes_of("weight", unit)
        here = self._runner.device.empty((size,), torch.uint8)
        self._runner.read_weights(unit, here)
        for work in self._gathered(unit, here, into):
            self.group.wait(work)

    def _gathered(self, unit: int, here: torch.Tensor, into: torch.Tensor) -> list[Any]:
        count, there = self._plan.profile.sharding.column, unit in self._in_columns
        if not count:
            return [self.group.gather(into[f], here[p]) for f, p in self._segments(unit)]
        kept = self._runner.memory.at(Use(Place("device", "column", unit), Value("weight", unit)))
        self._in_columns.add(unit)
        return [
            self.group.gather(into[f], here[p], kept[count * p.start : count * p.stop], there)
            for f, p in self._segments(unit)
        ]

    def _segments(self, unit: int) -> Iterator[tuple[slice, slice]]:
        """The bytes of each segment in the weights of a full unit, and in those of its shard."""
        for full, part in zip(self._full[unit].segments, self._plan.profile.units[unit].segments):
            at, mine, item = full.weight_offset, part.weight_offset, ITEM_BYTES[full.dtype]
            yield slice(at, at + full.elements * item), slice(mine, mine + part.elements * item)

    def _land(self, last: Task | None = None) -> None:
        """Wait for the collectives that have begun: for all, or up to that of the op `last`."""
        if last is not None and all(task is not last for task, *_ in self._flying):
            return
        while self._flying:
            task, works, over = self._flying.popleft()
            with self.group.comm_stream():
                for work in works:
                    self.group.wait(work)
                over()
            if last is not None and task is last:
                return

    def land(self, unit: int) -> None:
        """Wait for the gradient of a unit that is on its way, and of one that has its slot."""
        sent, task = self._sent
        slots = self._plan.full_gradient
        if task is not None and (sent == unit or slots[sent] == slots[unit]):
            self._land(task)

    def is_through(self, unit: int) -> bool:
        """Whether all ranks have sent their gradients of a unit, and none sends another in this
        pass, or uses it, as far as the order is known."""
        sent, task = self._sent
        flies = sent == unit and any(one is task for one, *_ in self._flying)
        over = self._passes.verb is None or self._order.lacks(unit)
        return over and not flies

    def _serve(self, one: Message) -> None:
        """Take part in what other ranks need and this one does not, now."""
        with self._runner.once():
            self.gradients.require_open(one.unit)
        self._land()
        with self.group.comm_stream():
            if one.kind == Kind.GATHER:
                reserve = self._runner.memory.at(
                    Use(Place("device", "reserve"), Value("weight", one.unit))
                )
                self._gather_home(one.unit, reserve)
            elif not self.gradients.offer(one.unit):
                self._exchange_nothing(one.unit)
        self._land()

    # -- gradients -------------------------------------------------------------------------------

    def exchange(self, unit: int, new: frozenset[int]) -> None:
        """The gradient of a unit, of which the parameters `new` have come, to its owners."""
        if (task := self._sent[1]) is not None:
            self._land(task)
        self._busy = {self._plan.full_weight[one.index] for one in self.active.units}
        self._ahead(wait=True)  # The order has it first, and it may not have begun so far.
        self._order.request(Message(Kind.EXCHANGE, unit), partial(self.begin_exchange, unit, new))
        self._ahead()

    def begin_exchange(self, unit: int, new: frozenset[int]) -> None:
        """The same, where it is this unit's turn."""
        value, runner = Value("gradient", unit), self._runner
        (task,) = runner.start(
            runner.moves(exchange, unit, self._passes.position + 1), self._passes.number
        )
        with self.group.comm_stream():
            runner.begin(task)
            self.gradients.prepare(unit, new)
            source = runner.memory.at(Use(collected(self._plan, unit).place, value))
            works = self._exchange(unit, source)

        def over() -> None:
            runner.finish(task)
            self._fold(unit)

        self._flying.append((task, works, over))
        self._sent = unit, task

    def _exchange_nothing(self, unit: int) -> None:
        """Take part in the exchange of a gradient of which nothing came here."""
        reserve = Use(Place("device", "reserve"), Value("gradient", unit))
        source = self._runner.memory.at(reserve)
        for segment in self._gradients(unit, source):
            segment.fill_(-0.0)
        self._flying.append((None, self._exchange(unit, source), partial(self._fold, unit)))

    def _exchange(self, unit: int, source: torch.Tensor) -> list[Any]:
        came = self._runner.memory.at(Use(self._exchanged, Value("gradient", unit)))
        pairs = zip(self._gradients(unit, came), self._gradients(unit, source))
        return [self.group.exchange(*pair) for pair in pairs]

    def _gradients(self, unit: int, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """The gradient of each segment that is trained, in that of a full unit."""
        for one in self._full[unit].segments:
            if one.trainable:
                yield typed(flat, one.gradient_dtype, one.gradient_offset, (one.elements,))

    def _fold(self, unit: int) -> None:
        came = self._runner.memory.at(Use(self._exchanged, Value("gradient", unit)))
        every = (one.view(torch.uint8) for one in self._gradients(unit, came))
        parts = [one.view(self.group.ranks, -1) for one in every]

        def part_of(at: int) -> torch.Tensor:
            return torch.cat([part[at] for part in parts]) if parts[1:] else parts[0][at]

        self.gradients.fold(unit, part_of)

    # -- the step --------------------------------------------------------------------------------

    def agree(self, step: Step) -> None:
        """Meet in `step()`, and see that all ranks take the same one.

        Raises:
            EngineError: they do not; on all of them.
        """
        mine = sorted((unit, *of) for unit, of in step.items())
        rows = sorted({repr(one) for of in step.values() for one in of.values()})
        text = repr((self._backwards, mine, rows))
        said = self._order.meet(Kind.STEP, 0, zlib.crc32(text.encode()))
        self._in_columns.clear()
        backwards, self._backwards = self._backwards, 0
        if all(one == said[0] for one in said):
            self.group.step += 1
            return
        of = sum(map(len, step.values()))
        shown = f"{backwards} backwards, then {of} parameters by {', '.join(rows[:2]) or 'nothing'}"
        told = self.group.all_objects(shown)
        raise EngineError(
            f"the ranks take different steps after step {self.group.step}: "
            + "; ".join(f"rank {at}: {one}" for at, one in enumerate(told))
            + ". Let all ranks take as many micro-batches, skip the same steps, and build the "
            "optimizer and its scheduler alike"
        )

    # -- values ----------------------------------------------------------------------------------

    def answers(self, unit: int, index: int, function: Any, args: Any) -> bool:
        """Whether a function of a parameter at rest needs nothing of other ranks; see `answer`."""
        parameter, *others = args or (None,)
        if (unit, index) in self._shown:
            return False
        if function is torch.Tensor.copy_ and isinstance(parameter, OffloadedParameter):
            return not isinstance(others[0], OffloadedParameter)
        return function in _ALONE

    def answer(self, unit: int, index: int, function: Any, args: Any) -> Any:
        """Do a function of a parameter that needs nothing of other ranks."""
        if function is torch.Tensor.copy_:
            source = args[1].to(args[0].dtype)
            if not isinstance(source, FlatShard):
                source = source.expand(args[0].shape).contiguous()
            args[0]._offload_access.set_data(source)
            return args[0]
        here = self._snapshots.read(Key("weight", unit, index))
        if function in (torch.zeros_like, torch.empty_like):
            return self._shard("weight", unit, index, here.zero_())
        return self.shard("weight", unit, index, here)

    def shard(self, kind: str, unit: int, index: int, here: torch.Tensor) -> torch.Tensor:
        """A value of a parameter as the user has it."""
        if self._states_whole and kind not in ("weight", "gradient"):
            return self.assembled(unit, index, here)
        found = self._shard(kind, unit, index, here)
        found.is_copy = kind != "gradient"
        return found

    def _shard(self, kind: str, unit: int, index: int, here: torch.Tensor) -> FlatShard:
        one, first = self._full[unit].parameters[index], self.local(unit, index).start
        how = f"{kind} of {one.name}", self._norms, one.part
        return FlatShard(here.view(-1), one.shape, first, *how)

    def shown(self, unit: int, index: int) -> torch.Tensor:
        """A parameter inside `gathered`, and what is here of a DTensor elsewhere.

        Raises:
            ShardError: it is neither.
        """
        key = Key("weight", unit, index)
        if (found := self._shown.get((unit, index))) is None:
            if self._full[unit].parameters[index].part is not None:
                return self._shard(*key, self._snapshots.tensor(key))
            self._shard(*key, self._snapshots.read(key))._refuse("a value")
        return found

    def _norms(self, parts: Sequence[torch.Tensor], order: float) -> torch.Tensor:
        """The norms of tensors of which each rank has a part: the same floats on all of them."""
        self._land()
        self._order.meet(Kind.VALUES, len(parts), int(order) if order == order // 1 else 0)
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

    def failed(self, mine: bool) -> bool:
        """Meet in a save or load; whether it has failed on any rank."""
        self._land()
        return any(one.payload for one in self._order.meet(Kind.SAVE, 0, mine))

    @contextmanager
    def gathered(
        self, places: Sequence[tuple[int, int]], source: int | None, states: bool
    ) -> Iterator[None]:
        """See `parallel.gathered`; `states` too are whole, as copies."""
        snapshots, self._states_whole = self._snapshots, states
        for unit, index in places:
            here = snapshots.read(Key("weight", unit, index))
            self._shown[unit, index] = self.assembled(unit, index, here)
        before = {at: self.part(*at, self._shown[at]).clone() for at in places}
        try:
            yield
        finally:
            self._states_whole = False
            for unit, index in places:
                found = self._shown.pop((unit, index))
                if source is not None:
                    self.group.broadcast(found, source)
                mine = self.part(unit, index, found)
                if not torch.equal(_bits(mine), _bits(before[unit, index])):
                    snapshots.put(Key("weight", unit, index), mine)

    def assembled(self, unit: int, parameter: int, here: torch.Tensor) -> torch.Tensor:
        """A value of a parameter, in its shape, of which each rank gives what it has.

        Raises:
            EngineError: other ranks do not ask for it.
        """
        self._land()
        self._order.meet(Kind.VALUES, unit, parameter)
        full, ranks = self._full[unit], self.group.ranks
        shards = (shard_of(full, Sharding(at, ranks)) for at in range(ranks))
        counts = [one.parameters[parameter].elements for one in shards]
        padded = here.new_zeros(max(*counts, 1))
        padded[: here.numel()] = here.reshape(-1)
        rows = self.group.all_tensors(padded)
        found = torch.cat([rows[rank][:n] for rank, n in zip(self.group.order, counts)])
        return found.view(full.parameters[parameter].shape)

    def part(self, unit: int, parameter: int, value: torch.Tensor) -> torch.Tensor:
        """As much of a value, full or a shard, as is here, flat.

        Raises:
            ValueError: it is of another parameter.
        """
        one, here = self._full[unit].parameters[parameter], self.local(unit, parameter)
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
        one = self._plan.profile.units[unit].parameters[parameter]
        return slice(one.first, one.first + one.elements)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
