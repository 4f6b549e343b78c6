"""A transfer: its parts, and the ticket by which to wait for it and learn how it failed."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol


class Part(NamedTuple):
    """A stretch of memory, not empty, and where in the file it belongs."""

    view: memoryview
    offset: int


def verb(writing: bool) -> str:
    """What is done with the file, for messages."""
    return "write" if writing else "read"


def asked(writing: bool, parts: Sequence[Part]) -> str:
    """A transfer in words, for messages that name the path elsewhere."""
    count = sum(part.view.nbytes for part in parts)
    stretches = f" in {len(parts)} stretches" if len(parts) > 1 else ""
    offset = min((part.offset for part in parts), default=0)
    return f"{verb(writing)} of {count} bytes{stretches} at offset {offset}"


def check_process(pid: int, what: str) -> None:
    """Raises RuntimeError in a fork of process `pid`.

    [Note: What a forked child may touch]
    Threads do not survive a fork, and a lock held at that moment stays held in the child for ever.
    So a look at the process id precedes every lock: in a child, closing does nothing, and a
    transfer or a wait raises RuntimeError. Descriptors that the child inherited go with the child.
    """
    if os.getpid() != pid:
        raise RuntimeError(
            f"{what}: asked for in process {os.getpid()}, a fork of {pid} which owns the threads; "
            "they do not survive a fork; wait before forking, and open a backend in the child"
        )


class Signal(Protocol):
    """Something that happens once, for one thread to wait for."""

    def set(self) -> None:
        """It has happened; once more is fine."""

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has happened, after at most so many seconds."""


class Ticket(ABC):
    """A transfer under way. Made by a backend, waited for by anyone, any number of times.

    The buffer belongs to the transfer until `done()`: neither a failure nor a timeout nor a Ctrl-C
    gives it back earlier. A ticket itself keeps no buffer alive.
    """

    __slots__ = ("__weakref__", "_pid", "what")

    signal: type[Any] = threading.Event
    """The kind of Signal that it can be watched with."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._pid = os.getpid()

    @abstractmethod
    def done(self) -> bool:
        """Whether the transfer is over, well or not."""

    def wait(self, timeout: float | None = None) -> None:
        """Returns when every byte is transferred.

        Args:
            timeout: seconds to wait at most; None waits without limit.

        Raises:
            OSError: a piece failed; with errno, path, offset, length, the first by offset (of
                several drives: one of them). Never a TimeoutError: a drive that timed out is EIO.
            TimeoutError: not over within `timeout`; the transfer goes on.
            RuntimeError: called in a forked child, where the transfer cannot end.
        """
        if not self.wait_for_end(timeout):
            raise TimeoutError(
                f"{self.what}: not finished within {timeout} s; the drive is slower than that or "
                "hangs; wait longer, or look at `dmesg`"
            )
        failure = self.failure()
        if failure is not None:
            # A new exception for each waiter: one shared by threads would share its traceback.
            raise OSError(*failure.args, failure.filename)

    def wait_for_end(self, timeout: float | None = None) -> bool:
        """Whether it is over, well or not, after at most `timeout` seconds."""
        if self.done():
            return True
        check_process(self._pid, self.what)
        return self._wait(timeout)

    def unfinished(self) -> Ticket | None:
        """What must end before this can, and can be watched: this or a part; None if done."""
        return None if self.done() else self

    @abstractmethod
    def watch(self, signal: Any) -> None:
        """Sets a Signal when it is done, now if it is."""

    @abstractmethod
    def unwatch(self, signal: Any) -> None:
        """Forgets a Signal."""

    @abstractmethod
    def _wait(self, timeout: float | None) -> bool:
        """Whether it was done within so many seconds."""

    @abstractmethod
    def failure(self) -> OSError | None:
        """How it failed. Only asked once it is done."""


class JointTicket(Ticket):
    """The ticket of a transfer whose parts have tickets of their own: done when all are, failed
    when one is. None is a transfer of nothing."""

    __slots__ = ("_parts",)

    def __init__(self, what: str, parts: Sequence[Ticket]) -> None:
        super().__init__(what)
        self._parts = tuple(parts)

    def done(self) -> bool:
        """Whether every part is over, well or not."""
        return all(part.done() for part in self._parts)

    def unfinished(self) -> Ticket | None:
        """See Ticket.unfinished. The first part that is still under way."""
        return next((part for part in self._parts if not part.done()), None)

    def watch(self, signal: Any) -> None:
        """Not to be called: its parts are watched, one after the other."""
        raise AssertionError("a joint ticket is watched by its parts")

    unwatch = watch

    def _wait(self, timeout: float | None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        return all(
            part.wait_for_end(None if end is None else max(0.0, end - time.monotonic()))
            for part in self._parts
        )

    def failure(self) -> OSError | None:
        """See Ticket.failure. That of the first part that has failed."""
        return next((found for part in self._parts if (found := part.failure())), None)


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
        left = None if end is None else max(0.0, end - time.monotonic())
        if not _one_ends(late, left):
            raise TimeoutError(
                f"none of {len(asked)} transfers finished within {timeout} s, the first being "
                f"{asked[0].what}; the drive is slower than that or hangs; wait longer, or look "
                "at `dmesg`"
            )


def wait_all(tickets: Iterable[Ticket]) -> None:
    """Returns when every ticket is done, however it ended: their buffers are the caller's again.

    That holds for Ctrl-C, too: its exception comes when all are done. Who does not want to wait for
    that (a drive that hangs) presses Ctrl-C again: a second one ends the wait at once.

    Raises:
        RuntimeError: called in a forked child, where what is under way never ends.
    """
    asked = tuple(tickets)
    try:
        for ticket in asked:
            ticket.wait_for_end()
    except BaseException:
        for ticket in asked:
            ticket.wait_for_end()
        raise


def _one_ends(tickets: Sequence[Ticket], timeout: float | None) -> bool:
    """Whether one of `tickets`, none of them joint, is done within so many seconds."""
    for ticket in tickets:
        check_process(ticket._pid, ticket.what)
    kinds = {ticket.signal for ticket in tickets}  # Threads of Python can set either.
    signal: Signal = max(kinds, key=lambda kind: kind is not threading.Event)()
    try:
        for ticket in tickets:
            ticket.watch(signal)
        return signal.wait(timeout)
    finally:
        for ticket in tickets:
            ticket.unwatch(signal)
