"""The compiled engine: buffers in, requests out. See src/module.cpp."""

from aio.file import File
from aio.transfer import Part

VERSION: int
"""Of what the module offers; see `backends`."""

KINDS: tuple[str, ...]
"""Names of the kinds of queues, in the order of the numbers by which `Engine` knows them."""

class Request:
    """A transfer under way."""

    def done(self) -> bool:
        """Whether it is over, with its buffers given back."""

    def wait(self) -> None:
        """Return when it is `done`, without the GIL until then."""

    def failure(self) -> tuple[int, int, int, int, int] | None:
        """What failed, once done: errno, cause, offset, bytes, last errno.

        Cause is 0 where the kernel refused, 1 at the end of the file, 2 without progress, 3 where
        the kernel refuses the calls of the queue (last errno).
        """

class Engine:
    """One thread that submits and reaps. OSError, with the call, where its queue cannot be had."""

    def __init__(self, kind: int, depth: int, piece_bytes: int) -> None: ...
    def address(self) -> int:
        """Where it lies, for other extensions here; as long as it lives."""

    def submit(
        self, file: File, writing: bool, align: int, parts: tuple[Part, ...]
    ) -> Request | None:
        """Start a transfer that holds `file` and the buffers until it is over.

        None where the file or the engine is closed.
        """

    def drain(self, fd: int) -> None:
        """Return when no transfer of `fd` is under way."""

    def fail(self, number: int, code: int) -> int:
        """For tests: of the transfers that end from now on the `number`-th fails with `code`. How
        many were to come to the one that was asked for before."""

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
