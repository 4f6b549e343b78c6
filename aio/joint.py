"""Several transfers that are one to their caller: done when all are, failed when one is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from aio.built import require_version
from aio.region import ENGINE_VERSION
from aio.ticket import SLEEP_S_MAX, LockSignal, Signal, Ticket

if TYPE_CHECKING:
    CommonSignal = LockSignal
else:
    try:  # what both kinds of tickets can set: those of the engine know no other
        from aio import _native

        require_version(_native, ENGINE_VERSION)
        CommonSignal = _native.Signal
    except ImportError:
        CommonSignal = LockSignal


class JointTicket(Ticket):
    """The ticket of a transfer whose parts have tickets of their own, of any backends.

    Args:
        what: the whole transfer, for messages.
        parts: none is a transfer of nothing.
        place: of the number of a part that failed, and where in its file it did, where in the
            whole that is: the first failure is told. By default that of the first part.
    """

    __slots__ = ("_parts", "_place")

    def __init__(
        self,
        what: str,
        parts: Sequence[Ticket],
        place: Callable[[int, int], int] = lambda number, offset: number,
    ) -> None:
        super().__init__(what)
        self._parts = tuple(parts)
        self._place = place

    def done(self) -> bool:
        """Whether every part is over, well or not."""
        return self.unfinished() is None

    def unfinished(self) -> Ticket | None:
        """See Ticket.unfinished. The first part that is still under way."""
        return next((late for part in self._parts if (late := part.unfinished())), None)

    def watch(self, signal: Signal) -> None:
        """Not to be called: its parts are watched, one after the other."""
        raise AssertionError("a joint ticket is watched by its parts")

    unwatch = watch

    def _wait(self, timeout: float | None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        return all(
            part.done() or part._wait(None if end is None else max(0.0, end - time.monotonic()))
            for part in self._parts
        )

    def _failed(self) -> OSError | None:
        failed = [
            (self._place(number, part._failed_at()), found)
            for number, part in enumerate(self._parts)
            if (found := part._failed())
        ]
        return min(failed, key=lambda one: one[0])[1] if failed else None


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
        late = []
        for ticket in asked:
            part = ticket.unfinished()
            if part is None:
                return ticket
            late.append(part)
        left = SLEEP_S_MAX if end is None else max(0.0, end - time.monotonic())
        if not _one_ends(late, min(left, SLEEP_S_MAX)) and left < SLEEP_S_MAX:
            raise TimeoutError(
                f"none of {len(asked)} transfers finished within {timeout} s, the first being "
                f"{asked[0].what}; the drive is slower than that or hangs; wait longer, or look "
                "at `dmesg`"
            )


def wait_all(tickets: Iterable[Ticket]) -> None:
    """Returns when every ticket is done, however it ended: their buffers are the caller's again.

    That holds where a signal handler raises (Ctrl-C), too: its exception comes when all are done.
    Who does not want to wait for that (a drive that hangs) presses Ctrl-C again: a second one ends
    the wait at once.

    Raises:
        RuntimeError: called in a forked child, where what is under way never ends, or by a
            finaliser whose end one of them waits for.
    """
    asked = tuple(tickets)
    try:
        _wait_all(asked)
    except BaseException:
        _wait_all(asked)
        raise


def _wait_all(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.wait_for_end()


def _one_ends(tickets: Sequence[Ticket], timeout: float | None) -> bool:
    """Whether one of `tickets`, none of them joint, is done within so many seconds."""
    for ticket in tickets:
        ticket.check_process()  # before anything is touched: a child may have inherited locks
    signal = CommonSignal()
    watched = []
    try:
        for ticket in tickets:
            ticket.watch(signal)
            watched.append(ticket)
        return signal.wait(timeout)
    finally:
        for ticket in watched:
            ticket.unwatch(signal)
