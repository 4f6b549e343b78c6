"""The receipt of one transfer: ask whether it is done, wait for it, learn how it failed."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from typing import Protocol


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
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """See Signal.wait."""
        return self._lock.acquire(
            timeout=-1 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
        )


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
                volume: on the first drive of those that failed, as its file counts). Never a
                TimeoutError: a drive that timed out is EIO.
            TimeoutError: not over within `timeout`; the transfer goes on.
            RuntimeError: called in a forked child, where the transfer cannot end.
        """
        if not self.done():
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


class QueuedTicket(Ticket):
    """The ticket of a transfer by threads of Python."""

    __slots__ = ("_done", "_failure", "_lock", "_watchers")

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self._lock = threading.Lock()
        self._done = False
        self._watchers: list[Signal] = []
        self._failure: OSError | None = None

    def done(self) -> bool:
        """Whether the transfer is over, well or not."""
        return self._done

    def finish(self, failure: OSError | None = None) -> None:
        """Once: the transfer is over and its buffers free."""
        with self._lock:
            assert not self._done, f"{self.what}: finished twice"
            self._failure = failure
            self._done = True
            for signal in self._watchers:
                signal.set()
            self._watchers.clear()

    def watch(self, signal: Signal) -> None:
        """See Ticket.watch."""
        with self._lock:
            if self._done:
                signal.set()
            else:
                self._watchers.append(signal)

    def unwatch(self, signal: Signal) -> None:
        """See Ticket.unwatch."""
        with self._lock:
            if signal in self._watchers:
                self._watchers.remove(signal)

    def _wait(self, timeout: float | None) -> bool:
        signal = LockSignal()
        try:
            self.watch(signal)
            return signal.wait(timeout)
        finally:
            self.unwatch(signal)

    def _failed(self) -> OSError | None:
        return self._failure
