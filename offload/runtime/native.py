"""The native runner: lanes in C++ (`src`), which do works without Python and the GIL.

[Note: Native runner]
It serves where the compiler was there and the device is the host, or one that it has a driver for,
but for `OFFLOAD_RUNNER=python`. A lane begins what is most urgent of what may start, goes on when
something that it has begun is over, and waits for no single op. A copy that takes no longer than to
wake its lane is done by who makes it ready. A work holds addresses, which stay as long as the
arenas do.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from cpu_adam.choice import SQUARES, Kernel, block_elements, kernel, require_version
from cpu_adam.native import GRADIENT_NUMBERS, factor_rows
from cpu_adam.reference import cut, views
from cpu_adam.spans import Steps
from offload.planning.layout import Plan
from offload.planning.profile import CHUNK_STAGES
from offload.planning.tiers import Tier
from offload.program.ops import Lane, Op, cells, part_of
from offload.program.schedule import FLYING_BYTES_MAX
from offload.runtime.stats import SPANS_MAX, Ran
from offload.runtime.store import Store
from offload.runtime.works import Add, At, Copy, Job, Squares, Transfer, Update, Work, item

RUNNER_VARIABLE = "OFFLOAD_RUNNER"
"""Environment variable: `python` runs everything in Python, by the reference, where C++ could."""

RUNNER_VERSION = 15
"""Of the native runner, as `src/module.cpp` has it."""

_LANES = tuple(Lane)
_NUMBER = {lane: number for number, lane in enumerate(_LANES)}
_WAYS: tuple[tuple[Tier, Tier] | None, ...] = (
    None,
    ("nvme", "cpu"),
    ("cpu", "nvme"),
    ("device", "cpu"),
    ("cpu", "device"),
)
"""Of what lanes tell that they have done (`Part` in src/task.h)."""

_native: Any = None
"""The extension; None where it is not compiled, and the reference serves."""

with contextlib.suppress(ImportError):
    _found = importlib.import_module("offload.runtime._runner")
    require_version(_found, RUNNER_VERSION)
    _native = _found


def native_runner() -> Any:
    """The extension; None where it, or the kernels, are not there or not to serve."""
    chosen = os.environ.get(RUNNER_VARIABLE) != "python" and kernel().native is not None
    return _native if chosen else None


class Native:
    """The native runner of an engine; see `Reference` for what each call does."""

    def __init__(
        self,
        plan: Plan | None = None,
        store: Store | None = None,
        driver: Any = None,
        workspace: Callable[[], torch.Tensor | None] = lambda: None,
        *,
        kept: int = SPANS_MAX,
        pace: Callable[[Op, float], float] | None = None,
        threads: bool = True,
    ):
        """Start the lanes, or raise RuntimeError.

        Args:
            driver: of the device, where that is not the host; its kernels are loaded.
            workspace: scratch memory on the device.
            kept: of so many ops it is remembered when they ran.
            pace: see `Runner`.
            threads: whether lanes run; else tests begin what is next by `first`.
        """
        self._plan, self._store, self._workspace = plan, store, workspace
        self._kernel: Kernel = kernel()
        assert self._kernel.native is not None
        _native.share_pool(self._kernel.native.pool())
        self._operations = {name: at for at, name in enumerate(self._kernel.native.OPERATIONS)}
        self._on_device = driver is not None

        def told(number: int, part: int, size: int, since: float) -> float:
            assert pace is not None
            return pace(part_of(list(self._ops)[number], size, _WAYS[part]), since)

        stages = CHUNK_STAGES if plan is None else plan.profile.chunk_stages
        self._runner = runner = _native.open(
            len(_LANES),
            _NUMBER[Lane.DISK],
            stages,
            FLYING_BYTES_MAX,
            kept,
            driver,
            pace and told,
            threads,
        )
        self._numbers: dict[object, int] = {}
        """Of every place."""
        self._ops: dict[Op, int] = {}
        """Of every op that was written down, too."""
        self.start, self.cancel = runner.start, runner.cancel
        self.begin, self.over, self.finish = runner.begin, runner.over, runner.finish
        self.all, self.stop, self.perform = runner.all, runner.stop, runner.perform

    clip: Callable[[float], Any] = staticmethod(lambda norm: _native.Clip(norm))

    def settings(self, steps: Steps, clip: Any) -> Any:
        """What works of a step are given: what updates its parameters, and the clipping."""
        return _native.settings(factor_rows(self._kernel, steps, 1.0), clip)

    def phase(self, ops: Iterable[tuple[Op, Work | None]]) -> Any:
        """Write ops down with their works; without one it is the user's compute."""
        return _native.phase(
            [
                (
                    _NUMBER[op.lane],
                    op.deadline,
                    op.bytes,
                    self._ops.setdefault(op, len(self._ops)),
                    None if work is None else self.work(op, work),
                    *map(self._numbered, (cells(op.reads), cells(op.writes))),
                )
                for op, work in ops
            ]
        )

    def _numbered(self, names: Iterable[object]) -> list[int]:
        return [self._numbers.setdefault(one, len(self._numbers)) for one in names]

    def touching(self, reads: Iterable[object], writes: Iterable[object]) -> Any:
        """Whom an op with these cells would have to wait for."""
        return self._runner.touching(self._numbered(reads), self._numbered(writes))

    def first(self, lane: Lane) -> Any:
        """Begin the most urgent task of a lane, and nothing of its work."""
        return self._runner.first(_NUMBER[lane])

    def look(self, task: Any) -> Any:
        """Its urgency, and the serial numbers of those that it waits for."""
        return self._runner.look(task)[:2]

    def path(self, task: Any) -> list[tuple[Lane, float]]:
        """The lanes that led to `task`, latest first, each with the time since when it could."""
        return [(_LANES[number], since) for number, since in self._runner.look(task)[2]]

    @property
    def failed(self) -> bool:
        """Whether a lane has failed."""
        return bool(self._runner.failed)

    def failure(self) -> BaseException | None:
        """What a lane met; asked for once."""
        try:
            self._runner.rethrow()
        except _native.ChunkFailed as error:
            return error if self._store is None else self._store.chunks.explain(error.args)
        except BaseException as error:
            return error
        return None

    def used(self, lane: Lane) -> tuple[float, int, int]:
        """Seconds, bytes and number of works that a lane has done."""
        found: tuple[float, int, int] = self._runner.used(_NUMBER[lane])
        return found

    def ran(self) -> list[Ran]:
        """The last works, and computes of the user, as they ended."""
        ops = list(self._ops)
        return [
            Ran(part_of(ops[number], size, _WAYS[part]), start, stop)
            for number, part, size, start, stop in self._runner.ran()
        ]

    def work(self, op: Op, work: Work) -> Any:
        """Write down a work of an op."""
        if work.links is None:
            return self._several(op.lane, work.jobs)
        links = []
        for link in work.links:
            done = [(one, self._several(one.lane, one.jobs)) for one in link]
            links.append([(_NUMBER[o.lane], made, _WAYS.index(o.way), o.bytes) for o, made in done])
        return _native.stream(links)

    def _several(self, lane: Lane, jobs: Sequence[Job]) -> Any:
        """All jobs of a kind in one: copies, transfers, sums, and updates of one chunk."""
        groups: dict[object, list[Any]] = {}
        for job in jobs:
            alike = getattr(job, "chunk", None), getattr(job, "dtype", None)
            groups.setdefault((type(job), alike), []).append(job)
        there = self._on_device and lane in (Lane.H2D, Lane.D2H, Lane.COMPUTE)
        works = [self._made(group, there) for group in groups.values()]
        return works[0] if len(works) == 1 else _native.several(works)

    def _made(self, group: list[Any], there: bool) -> Any:
        """The work of jobs of one kind; the device does what is `there`."""
        match group[0]:
            case Copy():
                copies = [(_at(one.into), _at(one.source), one.into.bytes.nbytes) for one in group]
                return _native.copies(copies, there)
            case Transfer():
                return self._transfers(group)
            case Add():
                return self._sums(group)
            case Squares():
                return self._squares(group, there)
            case Update():
                return self._updates(group, there)
        return _native.combine()

    def _transfers(self, group: Sequence[Transfer]) -> Any:
        assert self._store is not None
        chunks, given = self._store.chunks, []
        for one in group:
            base, stride = _at(one.at)
            numbers = self._store.numbers(one.value)
            for number, start, size, check, homes in chunks.native_chunks(numbers):
                given.append((number, (base + start, stride), size, check, homes))
        return _native.chunks(group[0].writes, given, self._kernel.index, *chunks.native_counts())

    def _sums(self, group: Sequence[Add]) -> Any:
        dtype = group[0].dtype
        rows = [
            (one.into.bytes.nbytes // item(dtype), 0, 0, _at(one.source)[0], _at(one.into)[0])
            for one in group
        ]
        return self._sweep(f"accumulate_{dtype}", dtype, rows, [0, 0], there=False)

    def _squares(self, group: Sequence[Squares], there: bool) -> Any:
        size, dtype = item(group[0].dtype), GRADIENT_NUMBERS[getattr(torch, group[0].dtype)]
        given = [(one.leaf, one.first, _at(one.at), one.at.bytes.nbytes // size) for one in group]
        if not there:
            return _native.squares(self._kernel.index, dtype, given)
        scratch = self._workspace()
        assert scratch is not None
        room = scratch.data_ptr(), scratch.nbytes // item("float64")
        return _native.device_squares(dtype, *room, block_elements(SQUARES), given)

    def _updates(self, group: Sequence[Update], there: bool) -> Any:
        assert self._plan is not None
        job, unit = group[0], self._plan.profile.units[group[0].unit]
        chunk = unit.chunks[job.chunk]
        fmt = self._plan.states.format(unit.segments[chunk.segment].dtype)
        record, rows = views(job.record.bytes, fmt, chunk.elements), []
        for one in group:
            slots = cut(record, fmt, one.piece.chunk_start, one.piece.elements)
            row = [one.piece.elements, one.step, one.first]
            row += [_at(one.gradient)[0], _at(one.weight)[0]]
            rows.append([*row, *(slots[slot.name].data_ptr() for slot in fmt.slots)])
        strides = [job.gradient.stride, job.weight.stride, *[job.record.stride] * len(fmt.slots)]
        return self._sweep(fmt.name, job.dtype, rows, strides, there=there)

    def _sweep(
        self,
        name: str,
        dtype: str,
        rows: Sequence[Sequence[int]],
        strides: Sequence[int],
        *,
        there: bool,
    ) -> Any:
        number = GRADIENT_NUMBERS[getattr(torch, dtype)]
        table = np.array(rows, np.int64).reshape(len(rows), 3 + len(strides))
        if there:
            return _native.device_sweep(name, number, block_elements(name), table, list(strides))
        operation = self._operations[name]
        return _native.sweep(self._kernel.index, operation, number, table, list(strides))


def _at(at: At) -> tuple[int, int]:
    return at.bytes.data_ptr(), at.stride
