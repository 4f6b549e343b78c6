"""The receipt of one transfer: ask whether it is done, wait for it, learn how it failed."""

from __future__ import annotations

import os
import threading
from typing import Protocol


class Settable(Protocol):
    """What a ticket that is watched sets when it is done."""

    def set(self) -> None:
        """It is done."""


class Ticket:
    """A transfer under way. Made by a backend, waited for by anyone, any number of times.

    The buffer belongs to the transfer until `done()`: neither a failure nor a timeout gives it
    back earlier. A ticket itself keeps no buffer alive.
    """

    __slots__ = ("_done", "_failure", "_lock", "_pid", "_waiters", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._waiters: list[Settable] = []
        self._failure: OSError | None = None

    def done(self) -> bool:
        """Whether the transfer is over, well or not."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Returns when every byte is transferred.

        Args:
            timeout: seconds to wait at most; None waits without limit.

        Raises:
            OSError: a piece failed; with errno, path, offset, length, the first by offset.
            TimeoutError: not over within `timeout`; the transfer goes on.
            RuntimeError: called in a forked child, where the transfer cannot end.
        """
        if not self.done():
            self._check_process()
            if not self._wait(timeout):
                raise TimeoutError(
                    f"{self.what}: not finished within {timeout} s; the drive is slower than that "
                    "or hangs; wait longer, or look at `dmesg`"
                )
        failure = self._failed()
        if failure is not None:
            # A new exception for each waiter: one shared by threads would share its traceback.
            raise OSError(*failure.args, failure.filename)

    def finish(self, failure: OSError | None = None) -> None:
        """For backends, once: the transfer is over and its buffer free."""
        with self._lock:
            assert not self._done.is_set(), f"{self.what}: finished twice"
            self._failure = failure
            self._done.set()
            for waiter in self._waiters:
                waiter.set()
            self._waiters.clear()

    def _wait(self, timeout: float | None) -> bool:
        return self._done.wait(timeout)

    def _failed(self) -> OSError | None:
        return self._failure

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self.what}: asked for in process {self._pid}, waited for in its child "
                f"{os.getpid()}; threads do not survive a fork; wait before forking"
            )

    def _watch(self, waiter: Settable) -> None:
        with self._lock:
            if self._done.is_set():
                waiter.set()
            else:
                self._waiters.append(waiter)

    def _unwatch(self, waiter: Settable) -> None:
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
