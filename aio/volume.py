"""One stretch of bytes over several drives, striped in proportion to their speeds.

[Note: Stripes]
The volume is cut into units. A pattern, a few dozen drive numbers long, says which drive holds
which unit, and repeats: each drive appears in it in proportion to its weight, as evenly spread as
can be. A drive holds its units in order and without gaps, so neighbours in the volume that lie on
one drive are neighbours there, and go in one transfer. On a single drive that is every transfer:
it passes through as it is.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from aio.errors import naming, os_error
from aio.file import Backend, File
from aio.region import Region
from aio.scratch import asked_file, create_file, create_scratch, open_file
from aio.system import ALIGN_BYTES
from aio.transfer import JointTicket, Part, Ticket, asked, wait_all

if TYPE_CHECKING:
    from aio.native import NativeBackend

UNIT_BYTES = 1 << 20
"""Bytes on one drive before the next one's turn, by default."""

PATTERN_UNITS_MAX = 64
"""A drive that would have less than one unit in so many is refused: it only slows the others."""

_NEARLY = 1.01  # a longer pattern must gain more than this

Directory = str | os.PathLike[str]
NativePart: TypeAlias = tuple[int, int, int, int, int, int]
"""Address of an engine, descriptor, alignment, start and size in the memory, offset in the file."""


class Extent(NamedTuple):
    """Bytes [start, stop) of a transfer, which lie from `offset` on in the file of `drive`."""

    drive: int
    offset: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stripes:
    """Where the bytes of a volume lie ([Note: Stripes]).

    `pattern` has the drive of each unit, `unit_bytes` each, and repeats.
    """

    unit_bytes: int
    pattern: tuple[int, ...]
    _before: tuple[int, ...] = field(init=False, repr=False)
    """By unit of the pattern, the units before it on the same drive."""

    def __post_init__(self) -> None:
        before = tuple(self.pattern[:at].count(drive) for at, drive in enumerate(self.pattern))
        object.__setattr__(self, "_before", before)

    def extents(self, offset: int, length: int) -> Iterator[Extent]:
        """The stretches of `length` bytes from `offset` on, in order, as long as can be."""
        extent: Extent | None = None
        at = offset
        while at < offset + length:
            unit, within = divmod(at, self.unit_bytes)
            stop = min(offset + length, at - within + self.unit_bytes)
            turn, place = divmod(unit, len(self.pattern))
            drive = self.pattern[place]
            if extent and extent.drive == drive:
                extent = extent._replace(stop=stop - offset)
            else:
                if extent is not None:
                    yield extent
                units = turn * self.pattern.count(drive) + self._before[place]
                extent = Extent(drive, units * self.unit_bytes + within, at - offset, stop - offset)
            at = stop
        if extent is not None:
            yield extent

    def bytes_on(self, drive: int, bytes: int) -> int:
        """How many of the first `bytes` of the volume lie on `drive`."""
        turns, rest = divmod(bytes, len(self.pattern) * self.unit_bytes)
        whole = turns * self.pattern.count(drive) * self.unit_bytes
        return whole + sum(r.stop - r.start for r in self.extents(0, rest) if r.drive == drive)


def stripes(weights: Sequence[float], unit_bytes: int = UNIT_BYTES) -> Stripes:
    """Stripes in proportion to `weights` (speeds of the drives, in any unit).

    The pattern is the shortest with which the slowest drive ends within a hundredth of the best.

    Raises:
        ValueError: a weight is not positive and finite, or too small against the others; a unit
            is not a positive multiple of 4096.
    """
    if unit_bytes <= 0 or unit_bytes % ALIGN_BYTES:
        raise ValueError(
            f"unit_bytes={unit_bytes}: expected a positive multiple of {ALIGN_BYTES}, as O_DIRECT "
            f"asks; try {UNIT_BYTES}"
        )
    if not weights or not all(0 < weight < math.inf for weight in weights):
        raise ValueError(
            f"weights={list(weights)}: expected a positive finite number for each drive; "
            "likely a measurement failed; leave the weights out for equal shares"
        )
    least = min(weights)
    if least * PATTERN_UNITS_MAX < sum(weights):
        raise ValueError(
            f"weights={list(weights)}: drive {weights.index(least)} would hold less than one unit "
            f"in {PATTERN_UNITS_MAX} and only slow the others down; leave it out"
        )
    # Where a unit goes is up to those before it, so each pattern begins all longer ones.
    longest = _spread(weights, PATTERN_UNITS_MAX)
    choices = [longest[:n] for n in range(len(weights), PATTERN_UNITS_MAX + 1)]
    best = min(_seconds(weights, choice) for choice in choices)
    pattern = next(p for p in choices if _seconds(weights, p) <= best * _NEARLY)
    return Stripes(unit_bytes, pattern)


def _spread(weights: Sequence[float], units: int) -> tuple[int, ...]:
    """`units` drive numbers: each unit goes to the drive that would be through with it first."""
    given = [0] * len(weights)
    pattern = []
    for _ in range(units):
        drive = min(range(len(weights)), key=lambda d: ((given[d] + 1) / weights[d], d))
        given[drive] += 1
        pattern.append(drive)
    return tuple(pattern)


def _seconds(weights: Sequence[float], pattern: tuple[int, ...]) -> float:
    """Time per unit where all drives work at once; without end where one has nothing to do."""
    counts = [pattern.count(drive) for drive in range(len(weights))]
    slowest = max(count / weight for count, weight in zip(counts, weights))
    return slowest / len(pattern) if all(counts) else math.inf


class Volume(Region):
    """A file of fixed size over several drives; made by `create_volume`. See Region.

    Attributes:
        files: the scratch file of each drive that holds a part.
        stripes: where the bytes lie.
        path: of all files; `path_of` tells for a stretch.
    """

    def __init__(
        self, files: Sequence[File], stripes: Stripes, backends: Sequence[Backend]
    ) -> None:
        """Files and backends are the volume's from now on."""
        self.files = tuple(files)
        self.stripes = stripes
        self.bytes = sum(file.bytes for file in files)
        self.path = _listed(file.path for file in files)
        self.direct = all(file.direct for file in files)
        self.notice = " ".join(file.notice for file in files if file.notice) or None
        self.memory_align_bytes = max(file.memory_align_bytes for file in files)
        self.offset_align_bytes = max(file.offset_align_bytes for file in files)
        self.closed = False
        self._pid = os.getpid()
        self._backends = tuple(backends)

    @property
    def native(self) -> bool:
        """Whether all backends are compiled, and `native_parts` has an answer."""
        return all(hasattr(backend, "address") for backend in self._backends)

    def native_parts(self, offset: int, length: int) -> list[NativePart]:
        """Where bytes lie, for another extension that talks to the engines."""
        parts = []
        for drive, at, start, stop in self.stripes.extents(offset, length):
            file, backend = self.files[drive], cast("NativeBackend", self._backends[drive])
            align = file.offset_align_bytes
            parts.append((backend.address(), file.fd, align, start, stop - start, at))
        return parts

    def path_of(self, offset: int, length: int) -> str:
        """The files that hold `length` bytes from `offset` on, for messages."""
        drives = {extent.drive for extent in self.stripes.extents(offset, length)}
        return _listed(self.files[drive].path for drive in sorted(drives))

    def flush(self) -> None:
        """Return when all that was written is on the drives.

        Raises:
            OSError: a drive failed.
        """
        for file, backend in zip(self.files, self._backends):
            with naming("flush", file.path):
                backend.io.sync(file.fd)

    def close(self) -> None:
        """See Region.close. The backends are closed too; every drive is, if one fails."""
        if os.getpid() != self._pid:
            return
        self.closed = True
        failure: OSError | None = None
        for close in [one.close for one in self.files] + [b.close for b in self._backends]:
            try:
                close()
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _start(self, writing: bool, parts: Sequence[Part]) -> Ticket:
        shares: dict[int, list[Part]] = {}
        for view, offset in parts:
            for drive, at, start, stop in self.stripes.extents(offset, view.nbytes):
                shares.setdefault(drive, []).append(Part(view[start:stop], at))
        tickets: list[Ticket] = []
        try:
            for drive, share in shares.items():
                tickets.append(self.files[drive]._start(writing, share))
        except BaseException:
            wait_all(tickets)  # the buffers are about to be the caller's again
            raise
        if len(tickets) == 1:
            return tickets[0]
        return JointTicket(f"{asked(writing, parts)} of {self.path}", tickets)

    def _check_process(self) -> None:
        self.files[0]._check_process()


def place_volume(
    directories: Directory | Sequence[Directory],
    bytes: int,
    *,
    weights: Sequence[float] | None = None,
    unit_bytes: int = UNIT_BYTES,
) -> tuple[list[int], Stripes]:
    """Which directories a volume uses, by their numbers, and how it is striped over them; one whose
    turn does not come, the volume being that small, is left out.

    Raises:
        ValueError: `bytes` is not positive, no directory is given, or the weights or the unit are
            not as `stripes` asks.
    """
    folders = _folders(directories)
    if bytes <= 0:
        raise ValueError(f"volume of {bytes} bytes: the size must be positive")
    if not folders or (weights is not None and len(weights) != len(folders)):
        raise ValueError(
            f"volume over {len(folders)} directories with "
            f"{'no' if weights is None else len(weights)} weights: expected at least one directory "
            "and no weights or as many"
        )
    shares = [1.0] * len(folders) if weights is None else list(weights)
    layout = stripes(shares, unit_bytes)
    used = [drive for drive in range(len(folders)) if layout.bytes_on(drive, _whole(bytes))]
    return used, stripes([shares[drive] for drive in used], unit_bytes)


def create_volume(
    directories: Directory | Sequence[Directory],
    bytes: int,
    open_backend: Callable[[], Backend],
    *,
    weights: Sequence[float] | None = None,
    unit_bytes: int = UNIT_BYTES,
    name: str | None = None,
    there: bool = False,
) -> Volume:
    """A new volume of `bytes` (rounded up to 4096), all of them reserved on their drives.

    Each directory gets one file and one backend, both closed with the volume. A directory whose
    turn does not come, the volume being that small, gets none.

    Args:
        directories: one, or several on different drives.
        bytes: size of the volume, positive.
        open_backend: makes a backend, once per file.
        weights: by directory, its share, best its measured speed; by default all are equal.
        unit_bytes: bytes on one drive before the next one's turn.
        name: of its files, which stay; by default they are unnamed, see `create_scratch`.
        there: the files are there already, with what is in them: see `open_file`.

    Raises:
        OSError: as of `create_scratch`, with the path of the directory in question. Nothing is
            left behind in any.
        ValueError: as of `place_volume`.

    A write into space that was only reserved runs at half to three quarters of the speed of an
    overwrite.
    """
    used, layout = place_volume(directories, bytes, weights=weights, unit_bytes=unit_bytes)
    folders, size = _folders(directories), _whole(bytes)
    with ExitStack() as opened:
        backends = []
        for drive, one in enumerate(used):
            backends.append(open_backend())
            opened.callback(backends[-1].close)
            if not there:
                _check_room(backends[-1], folders[one], layout.bytes_on(drive, size), name)
        files = []
        for drive, one in enumerate(used):
            count = layout.bytes_on(drive, size)
            if name is None:
                files.append(create_scratch(folders[one], count, backends[drive]))
            else:
                path = os.path.join(folders[one], f"{name}.{drive}")
                files.append((open_file if there else create_file)(path, count, backends[drive]))
                if not there:
                    opened.callback(os.unlink, path)
            opened.callback(files[-1].close)
        volume = Volume(files, layout, backends)
        opened.pop_all()
    return volume


def _folders(directories: Directory | Sequence[Directory]) -> list[Directory]:
    single = isinstance(directories, (str, os.PathLike))
    return [directories] if single else list(directories)  # type: ignore


def _whole(bytes: int) -> int:
    return -(-bytes // ALIGN_BYTES) * ALIGN_BYTES


def _check_room(backend: Backend, folder: Directory, share: int, name: str | None) -> None:
    """Refuses a full drive before the space of another is taken."""
    path = os.path.abspath(os.fspath(folder))
    free = backend.io.free_bytes(path)
    if free is not None and share > free:
        raise os_error(errno.ENOSPC, asked_file(share, name), path, free=free)


def _listed(paths: Iterable[str]) -> str:
    return " and ".join(paths)
