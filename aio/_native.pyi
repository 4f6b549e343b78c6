"""The compiled engine: buffers in, requests out. See src/module.cpp."""

from collections.abc import Mapping

from aio.file import File
from aio.part import Part

VERSION: int
"""Of what the module offers; see `built`."""

KINDS: tuple[str, ...]
"""Names of the kinds of queues, in the order of the numbers by which `Engine` knows them."""

def address_of(memory: memoryview) -> int:
    """Where the bytes of contiguous memory are."""

class Signal:
    """Something that happens once."""

    def __init__(self) -> None: ...
    def set(self) -> None:
        """It has happened."""

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has happened, after at most `timeout` seconds, without the GIL."""

class Request:
    """A transfer under way."""

    def done(self) -> bool:
        """Whether it is over, with its buffers given back, and counted in its file.

        False in the midst of giving them back, where that runs code that asks.
        """

    def wait(self, timeout: float | None = None) -> bool:
        """`done`, after waiting for it at most `timeout` seconds without the GIL."""

    def failure(self) -> tuple[int, int, int, int, int, int, int] | None:
        """What failed, once done: errno, cause, offset, bytes, tries, last errno, bytes free.

        Cause is 0 where the kernel refused, 1 at the end of the file, 2 without progress, 3 where
        the kernel refuses the calls of the queue (last errno).
        """

    def watch(self, signal: Signal) -> None:
        """Set `signal` too when this is done."""

    def unwatch(self, signal: Signal) -> None:
        """No longer."""

class Engine:
    """One thread that submits and reaps. OSError, with the call, where its queue cannot be had."""

    def __init__(
        self,
        kind: int,
        depth: int,
        piece_bytes: int,
        inflight_bytes_max: int,
        errors: Mapping[int, int],
        seed: int,
        short_rate: float,
        retry_rate: float,
        refusal_rate: float,
        broken_at: int,
    ) -> None: ...
    def submit(
        self, file: File, writing: bool, align: int, parts: tuple[Part, ...]
    ) -> Request | None:
        """Start a transfer that holds `file` and the buffers until it is over.

        None where the file or the engine is closed.
        """

    def drain(self, fd: int) -> None:
        """Return when no transfer of `fd` is under way."""

    def forget(self, fd: int) -> None:
        """To be called before `fd` is closed."""

    def register_buffer(self, address: int, bytes: int) -> int:
        """Have memory known to the kernel: 0, or the errno."""

    def unregister_buffer(self, address: int, bytes: int) -> None:
        """No longer, as it was registered."""

    def counters(self) -> tuple[int, int, int, int, int, tuple[int, ...], float]:
        """The fields of `Counters`, in its order."""

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
