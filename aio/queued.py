"""What callers see of a backend whose threads are of Python: transfers start, files drain, it ends.

See the notes in request.py: what a forked child may touch, what a signal handler may interrupt, and
lifetimes.
"""

from __future__ import annotations

import atexit
import errno
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aio.counters import Counters
from aio.file import File
from aio.part import Part, asked
from aio.request import Request, Requests
from aio.system import IO
from aio.ticket import SLEEP_S_MAX, THIS_THREAD, Ticket, check_thread

if TYPE_CHECKING:
    from typing_extensions import Self


class Queued:
    """A backend whose threads are of Python.

    Args:
        requests: what it shares with its threads.
        work: what each thread does; it returns when `requests.closing` is set and nothing is left
            to do.
        names: of the threads.

    Raises:
        OSError: a thread cannot be started (ENOMEM).
    """

    def __init__(self, requests: Requests, work: Callable[[], None], names: Sequence[str]) -> None:
        self.io: IO = requests.io
        self._requests = requests
        self._threads = tuple(
            threading.Thread(target=requests.serve, args=(work,), name=name, daemon=True)
            for name in names
        )
        weakref.finalize(self, _tell_to_end, requests).atexit = False
        handled = sys.exc_info()[1]  # by who opens it: the context of whatever is raised here
        try:
            for thread in self._threads:
                requests.serving += 1
                thread.start()
        except RuntimeError as error:
            _tell_to_end(requests)
            met = error.__context__
            if met is not None and met is not handled:  # of a handler, as Python waits for a thread
                raise met from None
            requests.release()
            raise OSError(errno.ENOMEM, f"no thread for file I/O: {error}") from error
        _BACKENDS.add(self)

    def submit(self, file: File, writing: bool, parts: Sequence[Part]) -> Ticket:
        """Queues a transfer of all `parts`; File has checked bounds and alignment.

        Raises:
            ValueError: the backend or the file is closed.
            RuntimeError: called in a forked child, or by a finaliser in a thread that serves.
        """
        self.check_process()
        check_thread(f"a {asked(writing, parts)} of {file.path}")
        request = Request(file, writing, parts)
        if parts:
            self._requests.add(request)
        else:
            request.ticket.finish()
        return request.ticket

    def drain(self, file: File) -> None:
        """Returns when no transfer of `file` is queued or running.

        RuntimeError where one is, and a finaliser asks in a thread that serves.
        """
        requests = self._requests
        if requests.has(file):
            check_thread(f"the end of transfers of {file.path}")
            requests.wake()  # whoever queued something may have been interrupted before that

            def over() -> bool:
                requests.abandon()
                return not requests.has(file)

            requests.wait_until(over)

    def counters(self) -> Counters:
        """Totals so far."""
        self.check_process()
        return self._requests.counters()

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child ([Note: What a forked child may touch])."""
        if os.getpid() != self._requests.pid:
            raise RuntimeError(
                f"file I/O asked for in process {os.getpid()}, a fork of {self._requests.pid} "
                "which owns the threads; they do not survive a fork; open a backend in the child"
            )

    def close(self) -> None:
        """Finishes what is queued, then ends and joins the threads. Closing twice is fine.

        A finaliser in a thread that serves tells them to end and does not wait for that.
        """
        requests = self._requests
        if os.getpid() != requests.pid:
            return
        _tell_to_end(requests)
        if THIS_THREAD.serves:
            return
        requests.wait_until(lambda: requests.serving == 0)
        for thread in self._threads:
            thread.join(SLEEP_S_MAX)  # over, but not gone; a join within a join would not end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_BACKENDS: weakref.WeakSet[Queued] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for backend in list(_BACKENDS):
        backend.close()


def _tell_to_end(requests: Requests) -> None:
    if os.getpid() != requests.pid:
        return
    requests.closing = True
    requests.wake()
