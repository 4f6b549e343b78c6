"""One order of collectives on all ranks, agreed as they go or known from before.

[Note: Order of collectives]
Ranks that begin collectives in different orders wait for each other forever, and which ones a rank
needs may depend on its data: which experts are used, how long a generation is. So before each
collective all ranks exchange one small message: a *round*, in which each says what it needs next.
Every gather that any rank asked for is done. Where none was, one exchange is: that of the last unit
in the model's order, to whose backward all come first. So a rank that has a gradient waits until
the others have come as far, and each gives what it has of it: sums keep their order. A rank that
has ended its pass says so, and does what others ask until all have said it; at the end of a
backward also while others end forwards, of which they may call more before theirs.

An order in which all ranks have asked for the same things is kept by what the slots held when it
began. When a pass begins alike on all ranks the next time, nobody asks. A rank whose use differs
then does the rest of the order for the others first, and asks from there on: the others hear it
when they are through. So a difference costs time, and no rank waits for one that waits for it.

A meeting (`step()`, a look at values of all ranks) is a round that all ranks say the same in.
Where they say different things, and nobody is inside a pass, that is an error on all of them.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import reduce
from operator import or_
from typing import NoReturn

from offload.parallel.group import Message
from offload.runtime.entry import EngineError


class Topic(IntEnum):
    """What a rank says in a round."""

    GATHER = 0
    """It needs the weights of a unit."""
    EXCHANGE = 1
    """It has the gradient of a unit."""
    OPEN = 2
    """A pass begins."""
    END = 3
    """It needs nothing more of its pass; the unit is 1 where that is a backward."""
    STEP = 4
    """`optimizer.step()`, with a digest of what it does."""
    VALUES = 5
    """A value is asked for that lies on all ranks."""
    SAVE = 6
    """All ranks save, load, sleep or wake, with whether this one has failed."""


ORDERS_MAX = 64
"""Orders that are kept: there is no end of them where they depend on the data."""

_ASKS = {Topic.GATHER, Topic.EXCHANGE}
_IN_PASS = _ASKS | {Topic.OPEN}
_FORWARD, _BACKWARD = (Topic.END, 0), (Topic.END, 1)

TEXTS = {
    Topic.END: "was at the end of a pass",
    Topic.STEP: "called step()",
    Topic.VALUES: "asked for values (a norm, offload.gathered())",
    Topic.SAVE: "saves, loads, commits, sleeps or wakes (offload.save, load_state_dict, sleep...)",
}


def union(said: Sequence[Message], kind: Topic) -> int:
    """The members of all messages of a kind."""
    return reduce(or_, (one.members for one in said if one.kind == kind), 0)


class Order:
    """What is agreed, and what is under way, see [Note: Order of collectives]."""

    def __init__(
        self, all_messages: Callable[[Message], list[Message]], serve: Callable[[Message], None]
    ) -> None:
        """`all_messages` is a round, and gives what each rank says in it; `serve` does for other
        ranks what this one did not ask for."""
        self._all_messages, self._serve = all_messages, serve
        self._known: OrderedDict[object, tuple[Message, ...]] = OrderedDict()
        self._key: object = None
        self._queue: deque[Message] | None = None
        """What is left of the known order; None where ranks ask."""
        self._done: list[Message] = []
        """What was asked for in the pass under way."""
        self._alike = self._doubts = False
        """Whether all ranks asked for the same so far in this pass, and this one kept to what was
        known. Whether ranks differed in the last pass: then all ask in this one, whatever is known,
        as a backward that left an order would sum gradients in another."""

    @property
    def next(self) -> Message | None:
        """What all ranks do next, where that is known."""
        return self._queue[0] if self._queue else None

    def lacks(self, unit: int) -> bool:
        """Whether the rest of the pass is known, and nothing of this unit is in it."""
        return self._queue is not None and all(one.unit != unit for one in self._queue)

    def open(self, key: object, changed: int = 0) -> None:
        """A pass begins; `key` is what its order depends on. All are told which units have
        `changed`, a bit each, since the one before."""
        known = None if self._doubts else self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)  # Those that come again are kept longest.
        mark = zlib.crc32(repr((key, known)).encode())
        said = self._all_messages(Message(Topic.OPEN, known is not None, mark, changed))
        same = all(one[:3] == said[0][:3] for one in said)
        self._key, self._done = key, []
        self._alike = same
        self._queue = deque(known) if same and known is not None else None

    def request(self, one: Message, begin: Callable[[], None], *, sooner: bool = False) -> None:
        """Do a collective, by `begin`, in its turn: where the order is known, before the exchange
        that it was asked for behind, if it could be done `sooner`."""
        if self._queue is not None:
            if self.next == one:
                self._queue.popleft()
                begin()
                return
            self._leave()
        while one not in self._round(one, begin)[1]:
            pass
        if sooner and [at.kind for at in self._done[-2:]] == [Topic.EXCHANGE, Topic.GATHER]:
            self._done[-2:] = reversed(self._done[-2:])

    def close(self, members: int, *, backward: bool) -> int:
        """The pass ends; returns the union of the ranks' `members`."""
        asked = self._queue is None
        if self._queue:
            self._leave()
        said = self._until(Message(Topic.END, backward, not self._alike, members))
        differ = any(one.payload for one in said if one.kind == Topic.END)
        self._doubts = differ or not self._alike
        if self._doubts:
            self._known.pop(self._key, None)
        elif asked:
            self._known[self._key] = tuple(self._done)
            if len(self._known) > ORDERS_MAX:
                self._known.popitem(last=False)
        self._queue = None
        return union(said, Topic.END)

    def meet(self, kind: Topic, unit: int = 0, payload: int = 0) -> list[Message]:
        """Meet all other ranks, which come for the same."""
        if self._queue:
            self._leave()
        said = self._until(Message(kind, unit, payload))
        if kind == Topic.VALUES and any(one != said[0] for one in said):
            self._differ(said, "for different ones")
        return said

    def _leave(self) -> None:
        """Do the rest of the known order for the other ranks."""
        rest, self._queue, self._alike = self._queue or (), None, False
        for one in rest:
            self._serve(one)

    def _round(
        self, message: Message, begin: Callable[[], None] | None = None
    ) -> tuple[list[Message], list[Message]]:
        """Say something, and do what is asked for: by `begin` what the message does. Gives what was
        said, and what is done."""
        said = self._all_messages(message)
        asked = sorted({one for one in said if one.kind in _ASKS})
        wanted = [one for one in asked if one.kind == Topic.GATHER]
        if not wanted and not any(one.kind == Topic.OPEN or one[:2] == _FORWARD for one in said):
            wanted = asked[-1:]  # Nobody is yet to come to a backward.
        for one in wanted:
            if begin is not None and one == message:
                begin()
            else:
                self._serve(one)
        self._alike &= all(one[:2] == said[0][:2] for one in said) or not wanted
        self._done += wanted
        return said, wanted

    def _until(self, message: Message) -> list[Message]:
        """Serve the other ranks until they are where this one is."""
        while True:
            said, _ = self._round(message)
            kinds = {one.kind for one in said}
            busy = _IN_PASS if message[:2] != _FORWARD else {Topic.GATHER, Topic.OPEN}
            earlier = message[:2] == _BACKWARD and any(one[:2] == _FORWARD for one in said)
            if earlier or not kinds.isdisjoint(busy):
                continue
            if message.kind == Topic.END or kinds == {message.kind}:
                return said
            if Topic.END not in kinds:
                self._differ(said)

    @staticmethod
    def _differ(said: list[Message], how: str = "") -> NoReturn:
        told = "; ".join(f"rank {at} {TEXTS[Topic(one.kind)]}" for at, one in enumerate(said))
        raise EngineError(
            f"the ranks are at different places: {told} {how}".rstrip()
            + ". All ranks take the same steps, and ask "
            "for values together: take the call out of `if rank == 0`, or skip it on all ranks"
        )
