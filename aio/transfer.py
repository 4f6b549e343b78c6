"""A transfer: its parts, and the ticket by which to wait for it and learn how it failed."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple


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


class Ticket(ABC):
    """A transfer under way. Made by a backend, waited for by anyone, any number of times.

    The buffer belongs to the transfer until `done()`: neither a failure nor a Ctrl-C gives it back
    earlier. A ticket itself keeps no buffer alive.
    """

    __slots__ = ("__weakref__", "_pid", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self._pid = os.getpid()

    @abstractmethod
    def done(self) -> bool:
        """Whether the transfer is over, well or not."""

    def wait(self) -> None:
        """Returns when every byte is transferred.

        Raises:
            OSError: a piece failed; with errno, path, offset, length, the first by offset (of
                several drives: one of them).
            RuntimeError: called in a forked child, where the transfer cannot end.
        """
        self.wait_for_end()
        failure = self.failure()
        if failure is not None:
            # A new exception for each waiter: one shared by threads would share its traceback.
            raise OSError(*failure.args, failure.filename)

    def wait_for_end(self) -> None:
        """Returns when it is over, well or not."""
        if not self.done():
            check_process(self._pid, self.what)
            self._wait()

    @abstractmethod
    def _wait(self) -> None:
        """Returns when it is over. Not in a forked child."""

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

    def _wait(self) -> None:
        for part in self._parts:
            part.wait_for_end()

    def failure(self) -> OSError | None:
        """See Ticket.failure. That of the first part that has failed."""
        return next((found for part in self._parts if (found := part.failure())), None)


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
