"""The reference runner: readable Python that does each op when somebody needs it.

[Note: Reference]
No thread is here. What is started waits; whoever needs an op, to compute or to look at a home, does
all that it waits for first, in the order of its start, and so gets what any order of lanes gives.
It overlaps nothing. It serves where the native runner does not, and tests hold that one against it.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import torch

from cpu_adam import Part, accumulate, update_parts, views
from cpu_adam.native import square_sums
from cpu_adam.reference import Node, cut, push, total
from cpu_adam.spans import Steps
from offload.planning.layout import Plan
from offload.program.ops import Lane, Op, cells, part_of
from offload.program.schedule import Scoreboard
from offload.runtime.device import Device
from offload.runtime.stats import Ran
from offload.runtime.store import Store
from offload.runtime.works import (
    Add,
    At,
    Combine,
    Copy,
    Job,
    Squares,
    Stage,
    Transfer,
    Update,
    Work,
)

CLIP_EPS = 1e-6
"""Added to the norm before dividing, as in torch.nn.utils.clip_grad_norm_."""


@dataclass(slots=True)
class Clip:
    """The norm of one step's gradient, while it is computed."""

    max_norm: float
    norm: float = 0.0
    factor: float = 1.0
    _parts: dict[int, list[Node]] = field(default_factory=dict)

    def parts(self) -> dict[int, list[Node]]:
        """What was put."""
        return dict(self._parts)

    def put(self, leaf: int, nodes: list[Node]) -> None:
        """The sum of the squares of part of a parameter, from this leaf of all on."""
        self._parts[leaf] = nodes

    def combine(self) -> None:
        """The norm from the sums of squares in their order, and the factor that clips it."""
        squares, nodes = 0.0, list[Node]()
        for _, part in sorted(self._parts.items()):
            if part[0][0] == 0:  # A parameter begins.
                squares, nodes = squares + total(nodes), []
            for node in part:
                push(nodes, node)
        squares += total(nodes)
        self.norm = math.sqrt(squares) if squares == squares else math.nan
        ratio = self.max_norm / (self.norm + CLIP_EPS)
        self.factor = ratio if not ratio >= 1.0 else 1.0


class Settings(NamedTuple):
    """What of a step its works are given."""

    steps: Steps
    clip: Clip | None


class Task:
    """One op of a phase that was started."""

    def __init__(self, op: Op, work: Work | None, settings: Settings | None, serial: int):
        self.op, self.work, self.settings, self.serial = op, work, settings, serial
        self.waits: Sequence[Task] = ()
        """Those that were not over when it was started; of one that was cancelled, too."""
        self.of_user = work is None
        self.begun = self.cancelled = self.over = False
        self.began_at = 0.0


class Reference:
    """See [Note: Reference]."""

    def __init__(
        self,
        plan: Plan,
        store: Store | None,
        device: Device,
        workspace: Callable[[], torch.Tensor | None],
        *,
        kept: int,
        pace: Callable[[Op, float], float] | None,
    ):
        """Of so many ops it is remembered when they ran; `pace` as of `Runner`."""
        self._plan, self._store, self._device = plan, store, device
        self._workspace, self._pace = workspace, pace
        self._serial = itertools.count(1)
        self._board: Scoreboard[Task] = Scoreboard()
        self.touching, self.all = self._board.waits, self._board.all
        self.failed = False
        self._failure: BaseException | None = None
        self._path: list[tuple[Lane, float]] = []
        self._used = dict.fromkeys(Lane, (0.0, 0, 0))
        self._ran: deque[Ran] = deque(maxlen=kept)

    phase, clip, settings = list, Clip, Settings

    def start(
        self, phase: Iterable[tuple[Op, Work | None]], number: int, settings: Settings | None = None
    ) -> list[Task]:
        """Start a phase in the pass of that number; works are given `settings`."""
        tasks = list[Task]()
        for op, work in phase:
            task = Task(op, work, settings, next(self._serial))
            touched = tuple(cells(op.reads)), tuple(cells(op.writes))
            task.waits = self._board.waits(*touched)
            self._board.note(task, *touched)
            tasks.append(task)
        return tasks

    def cancel(self, tasks: Iterable[Task]) -> None:
        """Take back those of `tasks` that have not begun; who waits for one waits for its waits."""
        for task in tasks:
            if not task.begun:
                task.cancelled = task.over = True

    def begin(self, task: Task, seconds: float) -> bool:
        """Begin the user's `task` once it is ready; with no `seconds`, only where it is."""
        assert task.begun is task.over is False, "it has begun, or was taken back"
        due = self._due(task)
        if (due and not seconds) or not self._do(due):
            return False
        task.begun, task.began_at = True, time.perf_counter()
        return True

    def finish(self, task: Task, streams: Sequence[object] = ()) -> None:
        """The user's `task` is done; on a device with streams that is waited for."""
        assert task.begun > task.over, "what is finished has begun"
        if streams:
            self._device.drain_all()
        self._ran.append(Ran(task.op, task.began_at, time.perf_counter()))
        task.over, task.waits = True, ()

    def work(self, op: Op, work: Work) -> tuple[Op, Work]:
        """Write down a work of an op."""
        return op, work

    def perform(self, work: tuple[Op, Work], settings: Settings | None, stream: object) -> None:
        """Do a work on the calling thread and its stream."""
        self._perform(*work, settings)

    def over(self, task: Task, seconds: float) -> bool:
        """Whether `task` is over; with `seconds` it is done now."""
        if not task.over and seconds:
            self._do([*self._due(task), task])
        return task.over

    def path(self, task: Task) -> list[tuple[Lane, float]]:
        """The lanes that somebody has waited for last, latest first, and since when."""
        return self._path[::-1]

    def used(self, lane: Lane) -> tuple[float, int, int]:
        """Seconds, bytes and number of works that a lane has done."""
        return self._used[lane]

    def ran(self) -> list[Ran]:
        """The last works, and computes of the user, as they ended."""
        return list(self._ran)

    def failure(self) -> BaseException | None:
        """What a lane met; asked for once."""
        return self._failure

    def stop(self, *, closing: bool) -> None:
        """Start nothing more."""

    def _due(self, task: Task) -> list[Task]:
        """What is to be done before `task`, in the order of its start; each once."""
        found, stack = set[Task](), list(task.waits)
        while stack:
            one = stack.pop()
            if one not in found and (one.cancelled or not one.over):
                found.add(one)
                stack += one.waits
        return sorted((one for one in found if not one.over), key=attrgetter("serial"))

    def _do(self, tasks: Iterable[Task]) -> bool:
        """Do these, in order; whether none has failed."""
        self._path = []
        for task in tasks if not self.failed else ():
            assert task.work is not None, "the user's own is finished before others wait for it"
            self._path.append((task.op.lane, time.perf_counter()))
            task.begun = True
            try:
                self._perform(task.op, task.work, task.settings)
            except BaseException as error:
                self.failed, self._failure = True, error
                if not isinstance(error, Exception):
                    raise
                return False
            task.over, task.waits, task.work, task.settings = True, (), None, None
        return not self.failed

    @torch.no_grad()
    def _perform(self, op: Op, work: Work, settings: Settings | None) -> None:
        """Do all of an op's work; the device is through with it then."""
        whole = Stage(op.lane, work.jobs, None, op.bytes)
        for stage in [whole] if work.links is None else itertools.chain(*work.links):
            since = time.perf_counter()
            for job in stage.jobs:
                self._job(op, job, settings)
            self._device.drain()
            self._did(part_of(op, stage.bytes, stage.way), since)

    def _job(self, op: Op, job: Job, settings: Settings | None) -> None:
        match job:
            case Copy(into, source):
                into.bytes.copy_(source.bytes.view(into.bytes.dtype), non_blocking=True)
            case Transfer(writes, value, at):
                assert self._store is not None
                if writes:
                    self._store.write(value, at.bytes, int(self._store.chunks.step[0]))
                else:
                    self._store.read(value, at.bytes)
            case Add(source, into, dtype):
                accumulate(_typed(into, dtype), _typed(source, dtype))
            case Squares(at, dtype, leaf, first):
                clip = settings and settings.clip
                assert clip is not None
                gradient, scratch = _typed(at, dtype), None
                if self._device.holds(gradient):
                    scratch = self._workspace()
                sums = square_sums(gradient, first, scratch, self._device.drain)
                clip.put(leaf, sums)
            case Combine():
                clip = settings and settings.clip
                assert clip is not None
                clip.combine()
            case Update():
                assert settings is not None
                self._update(op, job, settings)

    def _update(self, op: Op, job: Update, settings: Settings) -> None:
        unit, piece = self._plan.profile.units[job.unit], job.piece
        chunk = unit.chunks[job.chunk]
        segment = unit.segments[chunk.segment]
        fmt = self._plan.states.format(segment.dtype)
        ends = piece.parameter_stop == unit.parameters[piece.parameter].elements
        record = views(job.record.bytes, fmt, chunk.elements)
        update_parts(
            _typed(job.weight, segment.dtype),
            _typed(job.gradient, job.dtype),
            cut(record, fmt, piece.chunk_start, piece.elements),
            [Part(0, piece.elements, job.first, job.step, is_last=ends)],
            settings.steps,
            gradient_scale=1.0 if settings.clip is None else settings.clip.factor,
            format=fmt,
            workspace=self._workspace(),
        )

    def _did(self, op: Op, since: float) -> None:
        if self._pace is not None:
            time.sleep(max(0.0, self._pace(op, since) - time.perf_counter()))
        now, used = time.perf_counter(), self._used[op.lane]
        self._used[op.lane] = (used[0] + now - since, used[1] + op.bytes, used[2] + 1)
        self._ran.append(Ran(op, since, now))


def _typed(at: At, dtype: str) -> torch.Tensor:
    """Bytes as a flat tensor of a dtype, as torch's own are."""
    return at.bytes.view(getattr(torch, dtype)) if at.bytes.dtype is torch.uint8 else at.bytes
