"""A file system that loses power: what was not synced is lost, kept or torn, by seed.

[Note: What a crash leaves]
After `fsync` returns, all that was written to that file before is durable. A write since then is,
each for itself, kept, lost or torn; a torn one leaves any of its sectors of 512 bytes as they were.
Drives reorder what is in their caches, so where writes overlap any of them may come last. A file
that was never synced may be gone, and its space reserved may read as zeros. Removing a name is
durable at once: no more is lost by that than by a crash a moment later.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Mapping, Sequence

from aio.simulated import MemoryIO

SECTOR_BYTES = 512
"""Written whole or not at all by every drive."""


class CrashIO(MemoryIO):
    """Files in memory that keep their names, and lose what was not synced when the power fails.

    Args:
        seed: of what a crash leaves.
        crash_at: number of the call at which the power fails (opens, unlinks, reservations,
            transfers and syncs count, from 1); None: never by itself. A write at which it fails
            has been under way.
        contents: files that are there, durable, by path.
    """

    def __init__(
        self,
        seed: int,
        crash_at: int | None = None,
        contents: Mapping[str, bytes] | None = None,
    ) -> None:
        super().__init__()
        self.crash_at = crash_at
        self.calls = 0
        self.crashed = False
        self._choice = random.Random(f"{seed} crash")
        self._seed = seed
        self._durable = dict(contents or {})
        self._now = {path: bytearray(data) for path, data in self._durable.items()}
        self._unsynced: dict[str, list[tuple[int, bytes]]] = {path: [] for path in self._now}
        self._paths: dict[int, str] = {}
        self.names.update(self._now)

    def open(self, path: str, flags: int, mode: int) -> int:
        """See IO.open. A file that is there is opened, unless O_EXCL says that it must not be."""
        self._count()
        unnamed = getattr(os, "O_TMPFILE", 0)
        temporary = bool(unnamed) and flags & unnamed == unnamed
        if not temporary and path in self.names and not flags & os.O_EXCL:
            self.names.discard(path)  # As MemoryIO makes only new ones.
        elif not temporary and path not in self.names and not flags & os.O_CREAT:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        fd = super().open(path, flags, mode)
        if not temporary:
            self.files[fd] = self._now.setdefault(path, bytearray())
            self._unsynced.setdefault(path, [])
            self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        """See IO.close."""
        super().close(fd)
        self._paths.pop(fd, None)

    def unlink(self, path: str) -> None:
        """See IO.unlink."""
        self._count()
        super().unlink(path)
        for known in (self._now, self._durable, self._unsynced):
            known.pop(path, None)
        self._paths = {fd: name for fd, name in self._paths.items() if name != path}

    def fallocate(self, fd: int, offset: int, count: int) -> None:
        """See IO.fallocate."""
        self._count()
        super().fallocate(fd, offset, count)

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """See IO.preadv."""
        self._count()
        return super().preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """See IO.pwritev."""
        path = self._paths.get(fd)
        if path is not None and not self.crashed:
            self._unsynced[path] += [(offset, bytes(view)) for view in views]
        self._count()
        return super().pwritev(fd, views, offset)

    def fsync(self, fd: int) -> None:
        """See IO.fsync."""
        self._count()
        super().fsync(fd)
        path = self._paths.get(fd)
        if path is not None:
            self._durable[path] = bytes(self._now[path])
            self._unsynced[path].clear()

    def crash(self) -> None:
        """The power fails: from now on every call but `close` is EIO."""
        self.crashed = True

    def after(self) -> CrashIO:
        """What the machine finds when it is on again, seeded: see [Note: What a crash leaves]."""
        self.crashed = True
        return CrashIO(self._seed + 1, contents=dict(self._left()))

    def _left(self) -> dict[str, bytes]:
        left = {}
        for path in sorted(self._now):
            writes = list(self._unsynced[path])
            if path not in self._durable and self._choice.random() < 0.5:
                continue
            data = bytearray(self._durable.get(path, b""))
            data.extend(bytes(len(self._now[path]) - len(data)))
            self._choice.shuffle(writes)
            for offset, written in writes:
                self._leave(data, offset, written)
            left[path] = bytes(data)
        return left

    def _leave(self, data: bytearray, offset: int, written: bytes) -> None:
        """What the crash leaves of one write."""
        fate = self._choice.choice(("kept", "lost", "torn"))
        data.extend(bytes(max(0, offset + len(written) - len(data))))
        at = 0
        while at < len(written):
            stop = min(len(written), at + SECTOR_BYTES - (offset + at) % SECTOR_BYTES)
            if fate == "kept" or (fate == "torn" and self._choice.random() < 0.5):
                data[offset + at : offset + stop] = written[at:stop]
            at = stop

    def _count(self) -> None:
        with self._lock:
            self.calls += 1
            self.crashed = self.crashed or self.calls == self.crash_at
        if self.crashed:
            raise OSError(errno.EIO, "the power failed")
