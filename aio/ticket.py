"""The receipt of one transfer: ask whether it is done, wait for it, learn how it failed."""

from __future__ import annotations

import errno
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Protocol

from aio.errors import os_error

NO_MEMORY = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
"""How a transfer failed where there is no memory left to say more of it."""


class _Thread(threading.local):
    serves = False


THIS_THREAD = _Thread()
"""`serves`: whether it moves the bytes of transfers, so that it must not wait for any."""


def check_thread(what: str) -> None:
    """Raises RuntimeError in a thread that serves transfers, where only finalisers ask for any."""
    if THIS_THREAD.serves:
        raise RuntimeError(
            f"{what}: asked for in a thread of aio, which would wait for itself; likely by a "
            "finaliser (`__del__`, a weakref's callback) of memory that a transfer held last; hold "
            "it until the ticket is done"
        )


def by_a_handler(error: BaseException) -> bool:
    """Of what is caught round one call of C: whether a signal's handler has raised it, as that may
    come before the next step of Python."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is not None


def taken_out(things: list[Any] | deque[Any], one: object) -> bool:
    """Removes `one`, in one step; whether it was there."""
    try:
        things.remove(one)
    except ValueError as error:
        if by_a_handler(error):
            raise
        return False
    return True


SLEEP_S_MAX = 1.0
"""A wake gets lost without memory, where something else closed a pipe, or a handler raises."""


class Signal(Protocol):
    """Something that happens once, for one thread to wait for."""

    def set(self) -> None:
        """It has happened; once more is fine."""

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has happened, after at most so many seconds."""


class LockSignal:
    """A Signal of Python.

    Not a threading.Event: a signal handler that raises in the midst of one of those, which are
    written in Python, leaves its lock held for ever, and whoever sets it next hangs.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """See Signal.set."""
        try:  # and no `contextlib.suppress`, which takes memory
            self._lock.release()
        except RuntimeError as error:
            if by_a_handler(error):
                raise

    def wait(self, timeout: float | None = None) -> bool:
        """See Signal.wait."""
        return self._lock.acquire(
            timeout=-1 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
        )


def set_all(signals: list[Signal]) -> None:
    """Sets, and takes off the list, whatever is on it. It takes no memory of its own."""
    while signals:
        try:
            signals.pop().set()
        except IndexError:  # taken back in this moment
            return
        except MemoryError:  # who waits for that looks by himself, after SLEEP_S_MAX
            pass


class Ticket(ABC):
    """A transfer under way. Made by a backend, waited for by anyone, any number of times.

    The buffer belongs to the transfer until `done()`: neither a failure nor a timeout gives it
    back earlier. A ticket itself keeps no buffer alive.
    """

    __slots__ = ("__weakref__", "_pid", "what")

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
            OSError: a piece failed; with errno, path, offset, length, the first by offset (of a
                volume: the first in the volume, told as its drive's file counts). Never a
                TimeoutError: a drive that timed out is EIO.
            TimeoutError: not over within `timeout`; the transfer goes on.
            RuntimeError: called in a forked child, where the transfer cannot end, or by a
                finaliser in a thread that would have to end it.
        """
        if timeout is None:
            self.wait_for_end()
        elif not self.done():
            self.check_process()
            if not self._wait(timeout):
                late = self.unfinished()
                part = "" if late in (self, None) else f", waiting for {late.what}"
                raise TimeoutError(
                    f"{self.what}: not finished within {timeout} s{part}; the drive is slower "
                    "than that or hangs; wait longer, or look at `dmesg`"
                )
        failure = self._failed()
        if failure is not None:
            # A new exception for each waiter: one shared by threads would share its traceback.
            raise OSError(*failure.args, failure.filename)

    def wait_for_end(self) -> None:
        """Returns when it is over, well or not. RuntimeError where that would be never."""
        if self.done():
            return
        self.check_process()
        if not self._wait(None):
            raise RuntimeError(
                f"{self.what}: waited for by a finaliser of its own memory, whose end it "
                "waits for; wait for it elsewhere"
            )

    def unfinished(self) -> Ticket | None:
        """What must end before this can, and can be watched: this or a part; None if done."""
        return None if self.done() else self

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child, where what is under way never ends."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self.what}: asked for in process {self._pid}, waited for in its child "
                f"{os.getpid()}; threads do not survive a fork; wait before forking"
            )

    @abstractmethod
    def watch(self, signal: Signal) -> None:
        """Sets `signal` when it is done, now if it is."""

    @abstractmethod
    def unwatch(self, signal: Signal) -> None:
        """Forgets `signal`."""

    @abstractmethod
    def _wait(self, timeout: float | None) -> bool:
        """Whether it was done within so many seconds."""

    @abstractmethod
    def _failed(self) -> OSError | None:
        """How it failed. Only asked once it is done."""

    def _failed_at(self) -> int:
        """Where in the file. Only asked where it failed."""
        return 0


class QueuedTicket(Ticket):
    """The ticket of a transfer by threads of Python.

    It has no lock, as a signal handler may wait for it, or a finaliser watch it, in the midst of
    any call. Watching is to put a signal on the list and then to look whether it is done; the end
    is to say so and then to look at the list: one of the two sees the other.
    """

    __slots__ = ("_done", "_failure", "_failure_offset", "_path", "_watchers")

    def __init__(self, what: str, path: str) -> None:
        super().__init__(what)
        self._path = path
        self._done = False
        self._watchers: list[Signal] = []
        self._failure: OSError | None = None
        self._failure_offset = 0

    def done(self) -> bool:
        """Whether the transfer is over, well or not."""
        return self._done

    def finish(self, failure: OSError | None = None, offset: int = 0) -> None:
        """The transfer is over and its buffers free. It takes no memory of its own.

        Once more is fine and changes nothing: a handler may come, and finish it, in the midst.
        """
        if not self._done:
            self._failure, self._failure_offset = failure, offset
            self._done = True
        set_all(self._watchers)

    def watch(self, signal: Signal) -> None:
        """See Ticket.watch."""
        self._watchers.append(signal)
        if self._done:
            signal.set()

    def unwatch(self, signal: Signal) -> None:
        """See Ticket.unwatch."""
        taken_out(self._watchers, signal)

    def check_process(self) -> None:
        """See Ticket.check_process; the same for what waits for itself."""
        super().check_process()
        check_thread(f"a wait for the {self.what}")

    def _wait(self, timeout: float | None) -> bool:
        check_thread(f"a wait for the {self.what}")  # again: a joint ticket comes here directly
        signal, end = LockSignal(), None if timeout is None else time.monotonic() + timeout
        try:
            self.watch(signal)
            while not self._done:
                left = SLEEP_S_MAX if end is None else max(end - time.monotonic(), 0.0)
                if not signal.wait(min(left, SLEEP_S_MAX)) and left < SLEEP_S_MAX:
                    return self._done
            return True
        finally:
            self.unwatch(signal)

    def _failed(self) -> OSError | None:
        if self._failure is NO_MEMORY:
            return os_error(errno.ENOMEM, self.what, self._path)
        return self._failure

    def _failed_at(self) -> int:
        return self._failure_offset
