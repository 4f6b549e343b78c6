"""Several transfers that are one to their caller: done when all are, failed when one is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from aio.ticket import Ticket

if TYPE_CHECKING:
    from threading import Event as Waiter
else:
    try:  # what both kinds of tickets can set: those of the engine know no Event
        from aio._native import Signal as Waiter
    except ImportError:
        from threading import Event as Waiter


class JointTicket(Ticket):
    """The ticket of a transfer whose parts have tickets of their own, of any backends.

    Args:
        what: the whole transfer, for messages.
        parts: in the order in which failures count; none is a transfer of nothing.
    """

    __slots__ = ("_parts",)

    def __init__(self, what: str, parts: Sequence[Ticket]) -> None:
        super().__init__(what)
        self._parts = tuple(parts)

    def done(self) -> bool:
        """Whether every part is over, well or not."""
        return self.unfinished() is None

    def wait(self, timeout: float | None = None) -> None:
        """See Ticket.wait. Of several parts that failed the first is reported."""
        end = None if timeout is None else time.monotonic() + timeout
        failure: OSError | None = None
        for part in self._parts:
            try:
                part.wait(None if end is None else max(0.0, end - time.monotonic()))
            except OSError as error:
                if not part.done():
                    raise TimeoutError(
                        f"{self.what}: not finished within {timeout} s, waiting for {part.what}; "
                        "the drive is slower than that or hangs; wait longer, or look at `dmesg`"
                    ) from None
                failure = failure or error
        if failure is not None:
            raise failure

    def unfinished(self) -> Ticket | None:
        """The first part that is still under way."""
        return next((part for part in self._parts if not part.done()), None)


def wait_any(tickets: Iterable[Ticket], timeout: float | None = None) -> Ticket:
    """The first of `tickets` (of any files, volumes and backends, in the order given) that is done.

    It does not look at how the transfer ended: `wait()` on the answer raises its error.

    Raises:
        ValueError: no tickets are given.
        TimeoutError: none was done within `timeout` seconds.
        RuntimeError: called in a forked child.
    """
    asked = tuple(tickets)
    if not asked:
        raise ValueError("wait_any: asked to wait for no tickets, which would never end")
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        for ticket in asked:
            if ticket.done():
                return ticket
        left = None if end is None else max(0.0, end - time.monotonic())
        if not _wait_for_a_part(asked, left):
            raise TimeoutError(
                f"none of {len(asked)} transfers finished within {timeout} s, the first being "
                f"{asked[0].what}; the drive is slower than that or hangs; wait longer, or look "
                "at `dmesg`"
            )


def _wait_for_a_part(tickets: Sequence[Ticket], timeout: float | None) -> bool:
    """Whether, of what some of them wait for, something ended in time."""
    waiter = Waiter()
    watched = [_awaited(ticket) for ticket in tickets]
    try:
        for part in watched:
            if not part.done():
                part._check_process()
            part._watch(waiter)
        return waiter.wait(timeout)
    finally:
        for part in watched:
            part._unwatch(waiter)


def wait_all(tickets: Iterable[Ticket]) -> None:
    """Returns when every ticket is done, however it ended: their buffers are the caller's again."""
    for ticket in tickets:
        if not ticket.done():
            wait_any([ticket])


def _awaited(ticket: Ticket) -> Ticket:
    """What must end before `ticket` can: it, or a part of it."""
    part = ticket.unfinished() if isinstance(ticket, JointTicket) else None
    return ticket if part is None else part
