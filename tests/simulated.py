"""A file system with faults, for tests: the same seed meets the same faults in the same places."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from aio.system import ALIGN_BYTES, IO


class MemoryIO(IO):
    """An IO over memory, for tests: files are bytearrays, and O_DIRECT is checked strictly.

    Args:
        capacity_bytes: room for all files together; None is without limit.
        kind: what `file_system` answers.
    """

    def __init__(self, capacity_bytes: int | None = None, kind: str = "simulated") -> None:
        self.capacity_bytes = capacity_bytes
        self.kind = kind
        self.names: set[str] = set()
        self.files: dict[int, bytearray] = {}
        self.direct: set[int] = set()
        self._next = 1_000_000  # never a real descriptor
        self._lock = threading.RLock()

    def open(self, path: str, flags: int, mode: int) -> int:
        """See IO.open."""
        unnamed = getattr(os, "O_TMPFILE", 0)
        with self._lock:
            if not unnamed or flags & unnamed != unnamed:
                if path in self.names:
                    raise _error(errno.EEXIST)
                self.names.add(path)
            self._next += 1
            self.files[self._next] = bytearray()
            return self._next

    def close(self, fd: int) -> None:
        """See IO.close."""
        with self._lock:
            if self.files.pop(fd, None) is None:
                raise _error(errno.EBADF)
            self.direct.discard(fd)

    def unlink(self, path: str) -> None:
        """See IO.unlink."""
        self.names.remove(path)

    def set_direct(self, fd: int, direct: bool) -> None:
        """See IO.set_direct."""
        (self.direct.add if direct else self.direct.discard)(fd)

    def file_system(self, fd: int) -> str:
        """See IO.file_system."""
        return self.kind

    def direct_alignment(self, fd: int) -> tuple[int, int] | None:
        """See IO.direct_alignment. Not told, so that ALIGN_BYTES is what is kept to."""
        return None

    def write_in_place(self, fd: int) -> None:
        """See IO.write_in_place."""
        if self.kind != "btrfs":
            raise _error(errno.EOPNOTSUPP)

    def fallocate(self, fd: int, offset: int, count: int) -> None:
        """See IO.fallocate."""
        self._grow(fd, offset + count)

    def free_bytes(self, target: int | str) -> int | None:
        """See IO.free_bytes."""
        if self.capacity_bytes is None:
            return None
        return max(0, self.capacity_bytes - sum(map(len, list(self.files.values()))))

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """See IO.preadv."""
        (view,) = views
        self._check(fd, view, offset)
        data = self.files[fd][offset : offset + view.nbytes]
        view[: len(data)] = data
        return len(data)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """See IO.pwritev."""
        (view,) = views
        self._check(fd, view, offset)
        self._grow(fd, offset + view.nbytes)
        self.files[fd][offset : offset + view.nbytes] = view
        return view.nbytes

    def _grow(self, fd: int, size: int) -> None:
        with self._lock:
            more = max(0, size - len(self.files[fd]))
            free = self.free_bytes(fd)
            if free is not None and more > free:
                raise _error(errno.ENOSPC)
            self.files[fd].extend(bytes(more))

    def _check(self, fd: int, view: memoryview, offset: int) -> None:
        if fd not in self.files:
            raise _error(errno.EBADF)
        if fd in self.direct:
            address = 0
            if not view.readonly:
                address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            if address % ALIGN_BYTES or view.nbytes % ALIGN_BYTES or offset % ALIGN_BYTES:
                raise _error(errno.EINVAL)


class SimulatedIO(IO):
    """Another IO with faults put in. All rates are probabilities per call, by default 0.

    What happens to a call depends on the seed, the kind of call, its offset and how often that
    was asked before, never on the order in which threads arrive. Transfers are reordered by
    delays of differing length. With one thread in the pool the numbers of calls are fixed too.

    Args:
        seed: of all choices.
        inner: where the bytes go; by default a MemoryIO without limit.
        errors: errno by number of the call (all calls count, from 1, but `close`,
            `file_system`, `direct_alignment` and `free_bytes`); the call then does nothing.
        shorts: numbers of the transfers' calls that move only a part.
        short_rate: how often a transfer moves only a part, not aligned.
        retry_rate: how often a transfer fails with EINTR or EAGAIN.
        flip_rate: how often one bit of what was read is flipped.
        delay_s_max: transfers are delayed by up to so many seconds.
    """

    def __init__(
        self,
        seed: int,
        inner: IO | None = None,
        *,
        errors: Mapping[int, int] | None = None,
        shorts: Collection[int] = (),
        short_rate: float = 0.0,
        retry_rate: float = 0.0,
        flip_rate: float = 0.0,
        delay_s_max: float = 0.0,
    ) -> None:
        self.seed = seed
        self.inner: IO = MemoryIO() if inner is None else inner
        self.errors = dict(errors or {})
        self.shorts = shorts
        self.short_rate = short_rate
        self.retry_rate = retry_rate
        self.flip_rate = flip_rate
        self.delay_s_max = delay_s_max
        self.calls: list[str] = []
        self._seen: Counter[tuple[str, int]] = Counter()
        self._lock = threading.RLock()

    def open(self, path: str, flags: int, mode: int) -> int:
        """See IO.open."""
        self._enter("open", 0)
        return self.inner.open(path, flags, mode)

    def close(self, fd: int) -> None:
        """See IO.close."""
        self.inner.close(fd)

    def unlink(self, path: str) -> None:
        """See IO.unlink."""
        self._enter("unlink", 0)
        self.inner.unlink(path)

    def set_direct(self, fd: int, direct: bool) -> None:
        """See IO.set_direct."""
        self._enter("set_direct", 0)
        self.inner.set_direct(fd, direct)

    def file_system(self, fd: int) -> str:
        """See IO.file_system."""
        return self.inner.file_system(fd)

    def direct_alignment(self, fd: int) -> tuple[int, int] | None:
        """See IO.direct_alignment."""
        return self.inner.direct_alignment(fd)

    def write_in_place(self, fd: int) -> None:
        """See IO.write_in_place."""
        self._enter("write_in_place", 0)
        self.inner.write_in_place(fd)

    def fallocate(self, fd: int, offset: int, count: int) -> None:
        """See IO.fallocate."""
        self._enter("fallocate", offset)
        self.inner.fallocate(fd, offset, count)

    def free_bytes(self, target: int | str) -> int | None:
        """See IO.free_bytes."""
        return self.inner.free_bytes(target)

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """See IO.preadv."""
        (view,) = views
        choice, number = self._enter("preadv", offset)
        cut, told = self._begin(choice, number, view)
        count = min(self.inner.preadv(fd, [cut], offset), told)
        if count and choice.random() < self.flip_rate:
            view[choice.randrange(count)] ^= 1 << choice.randrange(8)
        return count

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """See IO.pwritev."""
        (view,) = views
        choice, number = self._enter("pwritev", offset)
        cut, told = self._begin(choice, number, view)
        return min(self.inner.pwritev(fd, [cut], offset), told)

    def _enter(self, name: str, offset: int) -> tuple[random.Random, int]:
        with self._lock:
            self.calls.append(name)
            number = len(self.calls)
            self._seen[name, offset] += 1
            attempt = self._seen[name, offset]
        if number in self.errors:
            raise _error(self.errors[number])
        return random.Random(f"{self.seed} {name} {offset} {attempt}"), number

    def _begin(
        self, choice: random.Random, number: int, view: memoryview
    ) -> tuple[memoryview, int]:
        """Delays, fails or shortens a transfer: the bytes to really move, and how many to tell."""
        if self.delay_s_max:
            time.sleep(choice.random() * self.delay_s_max)
        if choice.random() < self.retry_rate:
            raise _error(choice.choice((errno.EINTR, errno.EAGAIN)))
        if view.nbytes > 1 and (number in self.shorts or choice.random() < self.short_rate):
            told = choice.randrange(1, view.nbytes)
            blocks = -(-told // ALIGN_BYTES) * ALIGN_BYTES  # the inner one may be O_DIRECT
            return view[: min(blocks, view.nbytes)], told
        return view, view.nbytes


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))
