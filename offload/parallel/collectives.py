"""What all ranks do at one time in passes and steps: weights gathered, gradients exchanged.

[Note: Ranks]
Each rank has its shard of every unit in its own tiers, and all that moves and updates values knows
shards only ([Note: Shards] of `planning.profile`). Here a unit is made of its shards before it is
used, and `gradients` sends its gradient to the owners after it has come. Both are ops of the pass,
which wait for slots and are waited for like any other; the user's thread begins them in the order
of `order`.

Where the order is known, the weights of the next unit are gathered while one computes, and a
gradient is on its way while the next one is made. So a gather goes ahead of the exchange of the
gradient that is made meanwhile, and a use waits for its own gather, not for the exchange before.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from offload.model.early_updates import Step
from offload.model.engine import Engine
from offload.model.passes import Entry
from offload.parallel.group import Group, Handles, Message
from offload.parallel.order import Order, Topic, union
from offload.planning.layout import Place
from offload.planning.profile import ITEM_BYTES
from offload.program.ops import Use, Value, Verb
from offload.runtime.entry import EngineError
from offload.runtime.runner import Task


class _Collective(NamedTuple):
    """One that has begun."""

    request: Message
    """What asked for it."""
    works: Handles
    over: Callable[[], None]
    """What to do when it is over."""


class Collectives:
    """The collectives of the units of one engine, see [Note: Ranks]."""

    def __init__(self, group: Group, engine: Engine, gradients: Any):
        """Over the ranks of `group`, which have attached the same model; `gradients` are its
        `SummedGradients`, which stand above."""
        self.group, self._gradients = group, gradients
        self._runner, self._passes = engine.runner, engine.passes
        self._active, self._early = engine.active, engine.early
        self._plan, self.profile = engine.plan, engine.plan.profile
        self._order = Order(self._all_messages, self._serve)
        self._in_flight: deque[_Collective] = deque()
        """In order, at most one of them an exchange."""
        self._in_columns: set[int] = set()
        """Units of which the device has what its column does; the same ones on all ranks."""
        self._changed: set[int] = set()
        """Units of which weights here have, since a pass began."""
        self._busy: set[Place | None] = set()
        """Where the weights were that were in use at the last exchange."""
        self._trains, self._forwards = False, 0
        """Whether the forward under way does, and a digest of what such ones have used since the
        last backward, which has their gradients."""
        self._backwards = 0
        """Since the last step."""
        self.sends = not self.profile.sharding.late
        """Whether gradients go to their owners as they come: with `Config(shard=1)` in a backward
        that is the last on some rank."""
        engine.runner.on_failure = group.fail
        engine.passes.collectives = self

    # -- passes ----------------------------------------------------------------------------------

    def opened(self, verb: Verb, in_slots: Mapping[Place, int]) -> None:
        """A pass begins, on all ranks."""
        gathered = sorted((at.number, u) for at, u in in_slots.items() if at.use == "full_weight")
        changed, self._changed = sum(1 << unit for unit in self._changed), set()
        last = not self.sends and verb is Verb.BACKWARD and self._early.said_last
        self._trains = verb is Verb.FORWARD and torch.is_grad_enabled()
        used = self._forwards if verb is Verb.BACKWARD else 0
        self._order.open((verb.value, tuple(gathered), last, used), changed << 1 | last)

    def _all_messages(self, mine: Message) -> list[Message]:
        """A round. What weights changed on any rank is kept on none."""
        said = self.group.all_messages(mine)
        opened = union(said, Topic.OPEN)
        changed, self.sends = opened >> 1, self.sends or bool(opened & 1)
        for unit in range(changed.bit_length()):
            if changed >> unit & 1:
                self._passes.pause()
                self._passes.invalidate(unit)
                self._in_columns.discard(unit)
        return said

    def changes(self, unit: int) -> None:
        """Weights of this rank change; all ranks hear it when its next pass begins."""
        self._changed.add(unit)
        keeps = self.profile.sharding.keeps or unit in self._in_columns
        if keeps and self._passes.verb is not None:
            with self._runner.once():
                raise RuntimeError(
                    f"{self.profile.full[unit].name} was changed inside a forward or backward, for "
                    "which other ranks keep what they have gathered of it: change weights between "
                    "them, or give Config(shard=3), without a mesh of two dimensions"
                )

    def forget(self) -> None:
        """Memory of all ranks is given back, and what columns hold with it."""
        self._in_columns.clear()

    def closed(self) -> None:
        """The pass is over: what other ranks still need of it is done first."""
        self._busy = set()
        backward = self._passes.verb is Verb.BACKWARD
        if backward:
            self._forwards = 0
        elif self._trains:
            self._forwards = zlib.crc32(repr(self._passes.used).encode(), self._forwards)
        self._backwards += backward
        members = self._order.close(self._gradients.came() if backward else 0, backward=backward)
        self._land()
        if backward:  # At the end of a forward some ranks may have given up theirs.
            self._gradients.also_came(members)
            self.sends = not self.profile.sharding.late

    def _land(self, last: Message | None = None) -> None:
        """Wait for the collectives that have begun: for all, or up to the `last`."""
        if last is not None and all(one.request != last for one in self._in_flight):
            return
        while self._in_flight:
            request, works, over = self._in_flight.popleft()
            with self.group.comm_stream():
                self.group.wait(works)
                over()
            if request == last:
                return

    def _serve(self, one: Message) -> None:
        """Take part in what other ranks need and this one does not, now."""
        with self._runner.once():
            self._early.require_open(one.unit, "another use")
        self._land()
        with self.group.comm_stream():
            if one.kind == Topic.GATHER:
                reserve = Use(Place("device", "reserve"), Value("weight", one.unit))
                self._gather_home(one.unit, self._runner.memory.at(reserve))
            else:
                self._gradients.serve(one.unit)
        self._land()

    # -- weights ---------------------------------------------------------------------------------

    def gather(self, entry: Entry) -> None:
        """The weights of a unit, which is used now; begin with those of the next."""
        if (task := entry.gather) is not None and not task.begun:
            self._land()
            self._request(entry.unit, task)
        self._land(Message(Topic.GATHER, entry.unit))
        self._ahead()

    def _ahead(self, *, wait: bool = False) -> None:
        """Begin to gather what is used next, if it is known and its slot is free; `wait` for lanes,
        but not for a unit that is in use."""
        entry = self._passes.following()
        if entry is None or self._order.next != Message(Topic.GATHER, entry.unit):
            return
        if (task := entry.gather) is None or task.begun:
            return
        if wait and self._plan.full_weight[entry.unit] not in self._busy:
            self._land()
        elif not self._runner.begins(task):
            return
        self._request(entry.unit, task)

    def _request(self, unit: int, task: Task) -> None:
        """Gather a unit in its slot, by the op `task`, when all ranks do."""
        self._order.request(
            Message(Topic.GATHER, unit),
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
        over = partial(self._runner.finish, task)
        self._in_flight.append(_Collective(Message(Topic.GATHER, unit), works, over))

    def gather_into(self, unit: int, into: torch.Tensor) -> None:
        """The weights of a unit in other memory than its slot."""
        self._land()
        self._order.request(Message(Topic.GATHER, unit), partial(self._gather_home, unit, into))

    def _gather_home(self, unit: int, into: torch.Tensor) -> None:
        size = self._plan.bytes_of("weight", unit)
        here = self._runner.device.empty((size,), torch.uint8)
        self._runner.read_weights(unit, here)
        self._runner.drain()  # No op of the home's has it.
        self.group.wait(self._gathered(unit, here, into))

    def _gathered(self, unit: int, here: torch.Tensor, into: torch.Tensor) -> Handles:
        """Begin to gather the weights of a full unit from its shards, of which one is here."""
        works, kept = Handles(), None
        ranks, in_column = self.profile.sharding.column, unit in self._in_columns
        if ranks:
            column = Use(Place("device", "column", unit), Value("weight", unit))
            kept = self._runner.memory.at(column)
            self._in_columns.add(unit)
        for full, part in zip(self.profile.full[unit].segments, self.profile.units[unit].segments):
            at, size = part.weight_offset, part.elements * ITEM_BYTES[part.dtype]
            of_column = None if kept is None else kept[ranks * at :][: ranks * size]
            whole = into[full.weight_offset :][: full.elements * ITEM_BYTES[full.dtype]]
            works.extend(self.group.gather(whole, here[at:][:size], of_column, in_column))
        return works

    # -- gradients -------------------------------------------------------------------------------

    def exchange(self, unit: int, begin: Callable[[], None]) -> None:
        """Let `begin` exchange the gradient of a unit when all ranks do."""
        self.end_exchange()
        self._busy = {self._plan.full_weight[one.index] for one in self._active.units}
        self._ahead(wait=True)  # The order has it first, and it may not have begun so far.
        self._order.request(Message(Topic.EXCHANGE, unit), begin)
        self._ahead()

    def exchange_began(self, unit: int, works: Handles, over: Callable[[], None]) -> None:
        """`begin` has begun; `over` is to be called at the end."""
        self._in_flight.append(_Collective(Message(Topic.EXCHANGE, unit), works, over))

    @property
    def exchanging(self) -> int | None:
        """The unit whose gradient is on its way; None where none is."""
        requests = (one.request for one in self._in_flight)
        return next((one.unit for one in requests if one.kind == Topic.EXCHANGE), None)

    def end_exchange(self) -> None:
        """Wait for the gradient that is on its way."""
        if (unit := self.exchanging) is not None:
            self._land(Message(Topic.EXCHANGE, unit))

    def is_through(self, unit: int) -> bool:
        """Whether all ranks have sent their gradients of a unit, and none sends another in this
        pass, or uses it, as far as the order is known."""
        over = self._passes.verb is None or self._order.lacks(unit)
        return over and self.exchanging != unit

    # -- steps and other meetings ----------------------------------------------------------------

    def meet(self, kind: Topic, unit: int = 0, payload: int = 0) -> list[Message]:
        """Meet all other ranks, which come for the same; what each of them says."""
        self._land()
        return self._order.meet(kind, unit, payload)

    def agree(self, step: Step, commits: bool) -> bool:
        """Meet in `step()`, and see that all ranks take the same one; whether each `commits` it."""
        mine = sorted((unit, *of) for unit, of in step.items())
        rows = sorted({repr(one) for of in step.values() for one in of.values()})
        text = repr((self._backwards, mine, rows))
        said = self.meet(Topic.STEP, 0, zlib.crc32(text.encode()) << 1 | commits)
        self._in_columns.clear()
        backwards, self._backwards = self._backwards, 0
        if all(one.payload >> 1 == said[0].payload >> 1 for one in said):
            self.group.step += 1
            return all(one.payload & 1 for one in said)
        told = self.group.all_objects(_fields_of(step, backwards))
        raise EngineError(
            f"the ranks take different steps after step {self.group.step}: {differences(told)}"
            ". Let all ranks take as many micro-batches, skip the same steps, and build the "
            "optimizer and its scheduler alike"
        )


def _fields_of(step: Step, backwards: int) -> dict[str, str]:
    """What a step does, by name; of a hyper-parameter all values that groups of parameters have."""
    every, found = [one for of in step.values() for one in of.values()], dict[str, set[str]]()
    for one in set(every):
        named = {at.name: getattr(one.hyper, at.name) for at in fields(one.hyper)}
        for name, value in {"rule": one.hyper.rule, "step": one.number, **named}.items():
            found.setdefault(name, set()).add(str(value))
    shown = {name: " and ".join(sorted(values)) for name, values in found.items()}
    return {"backwards": str(backwards), "parameters": str(len(every)), **shown}


def differences(told: Sequence[Mapping[str, str]]) -> str:
    """What ranks say by name, as far as it differs; those that say the same together."""
    said = {name: {one[name] for one in told if name in one} for name in chain(*told)}
    names, groups = [name for name in said if len(said[name]) > 1], dict[str, list[str]]()
    for rank, one in enumerate(told):
        text = ", ".join(f"{name}={one[name]}" for name in names if name in one)
        groups.setdefault(text or "the same values for other parameters", []).append(str(rank))
    return "; ".join(f"rank{'s' * (len(at) > 1)} {', '.join(at)}: {t}" for t, at in groups.items())
