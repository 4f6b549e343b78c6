"""Run phases: ops in order, each behind those that touched its places before.

[Note: Phases as run]
What lanes do comes in phases: the fetches and computes of a pass, a gradient on its way home, the
sums of a norm, the updates of a step. A phase is made once by the functions of `program.compile`,
checked by `program.verify`, written down for the lanes, and started any number of times: no op is
made as a pass or a step goes on. Its ops wait for one another, and for those of earlier phases, by
the one rule of `Scoreboard`.

The user's thread reads and writes homes by `read_home` and `write_home`, after `quiesce`. When an
op fails, or the bookkeeping of the user's thread, nothing more is started, every blocked wait ends,
and the next call raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from cpu_adam.choice import leave_launching_cores, ptx
from offload.planning.layout import Plan
from offload.planning.profile import BLOCK_BYTES, Kind
from offload.program.ops import Lane, Op, Use, Value, Verb, cells
from offload.program.verify import check_op
from offload.runtime import entry
from offload.runtime.device import Device
from offload.runtime.entry import EngineError
from offload.runtime.memory import Memory, host_tensor
from offload.runtime.native import Native, native_runner
from offload.runtime.reference import Reference
from offload.runtime.stats import LaneStats
from offload.runtime.store import Store
from offload.runtime.works import Work, Works

Pace = Callable[[Op, float], float]
"""When an op that began at that time may end at the earliest, by `time.perf_counter`."""

Task = Any
"""An op of a phase that was started: `over`, `begun`, `cancelled`, `of_user`, `serial`."""

LOOK_AGAIN_S = 0.1
"""So often whoever is blocked looks whether signals came."""

KEPT_PER_UNIT_MAX = 48
"""Phases kept per unit: with orders of use that depend on the data there were no end."""


class Runner:
    """The memory, store and lanes of an engine. It knows places and values, and no parameters."""

    def __init__(
        self,
        plan: Plan,
        memory: Memory,
        store: Store | None,
        device: Device,
        pace: Pace | None = None,
    ):
        """Start the lanes; where they do not start, let `memory` and `store` go.

        Args:
            store: None where nothing lives on nvme.
            pace: when an op may end, for tests that imitate slower hardware.

        Raises:
            EngineError: a lane could not start; with what it met as its cause.
        """
        self.plan, self.memory, self.store, self.device = plan, memory, store, device
        self.swap_area: Any = None
        """Where the values are while the engine sleeps."""
        self._kept = dict[Hashable, Any]()
        """Phases and works that come again, until the memory of the tiers is given back."""
        self.step = np.zeros(1, np.int64) if store is None else store.chunks.step
        """Steps taken: stamped on what is written to the store."""
        self.works = Works(plan, memory.at, device_is_host=device.is_host)
        self.notice: str | None = None
        """What to tell the user about the lanes."""
        self.closed = False
        self.before_write: Callable[[Kind, int], None] = lambda kind, unit: None
        """Called before the user's thread writes the home of a value."""
        self.on_failure: Callable[[BaseException], object] = id
        """Called, perhaps more than once, with what has ended everything."""
        self.look: Callable[[float], object] = id
        """Called in a long wait, with its seconds so far; what it raises ends the wait."""
        self._failure: BaseException | None = None
        self.remedy = "go on from the last checkpoint"
        """What is to be done once the cause of a failure is mended."""
        self.stats = LaneStats(plan.profile)
        try:
            self.stats.lanes = self._lanes = self._open(pace)
        except BaseException as error:
            self._release()
            if not isinstance(error, RuntimeError):
                raise
            raise EngineError(f"a lane of the engine could not start: {error}") from error
        self.waited, self.cancel = self.stats.waited, self._lanes.cancel
        self.written = self._lanes.phase
        """Writes ops that were checked down for the lanes, with what they do."""
        self.clip, self.settings = self._lanes.clip, self._lanes.settings
        self.touching, self.all = self._lanes.touching, self._lanes.all
        self.lasting = isinstance(self._lanes, Native)
        """Whether a phase, or a work, that is kept holds no tensors."""
        self._by_handle = self.lasting and not device.is_host
        """Whether lanes know the user's streams by number."""

    def _open(self, pace: Pace | None) -> Native | Reference:
        """The native runner, or the reference where that cannot serve."""
        kept = self.stats.kept
        native = native_runner() if self.store is None or self.store.volume.native else None
        workspace = self.memory.workspace
        if native is not None:
            try:
                driver = self.device.open(native)
                if driver is not None:
                    leave_launching_cores()
                    if workspace() is not None:
                        driver.load(ptx().decode())
            except RuntimeError as error:
                self.notice = f"the lanes run in Python, which is slower: {error}"
            else:
                return Native(self.plan, self.store, driver, workspace, kept=kept, pace=pace)
        return Reference(self.plan, self.store, self.device, workspace, kept=kept, pace=pace)

    def phase(self, key: Hashable, make: Callable[[], Iterable[tuple[Op, Work | None]]]) -> Any:
        """The phase of the ops and works that `make` gives, checked, and kept under `key`."""

        def written() -> Any:
            made = list(make())
            for op, _ in made:
                check_op(self.plan, op)
            return self.written(made)

        return self.keep(key, written)

    def keep(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What is kept under `key`."""
        if key not in self._kept:
            if len(self._kept) >= KEPT_PER_UNIT_MAX * len(self.plan.profile.units):
                self._kept.clear()
            self._kept[key] = make()
        return self._kept[key]

    def moves(self, make: Callable[..., list[Op]], *args: Hashable) -> Any:
        """The phase of the ops that a function of `program.compile` makes of the plan and these."""

        def made() -> Iterator[tuple[Op, Work | None]]:
            return ((op, self.works.of(op)) for op in make(self.plan, *args))

        return self.phase((make, args), made)

    def start(self, phase: Any, pass_number: int, settings: Any = None) -> list[Task]:
        """Queue the ops of a phase, by the deadlines of that pass; works are given `settings`."""
        try:
            return self._lanes.start(phase, pass_number, settings)
        except BaseException as error:
            self.fail(error)  # Some may be queued, and nobody has them.
            raise

    def perform(self, op: Op, key: Hashable, make: Callable[[], Work], settings: Any) -> None:
        """Do an op's work, kept under `key`, on the calling thread or its stream of the device,
        where the host waits for sums."""

        def made() -> Any:
            return self._lanes.work(op, make())

        work = self.keep(key, made) if self.lasting else made()
        since, waits = time.perf_counter(), op.verb is Verb.SQUARE and not self.device.is_host
        stream = self.device.handle(self.device.stream()) if self._by_handle else 0
        with self.waited(Lane.COMPUTE) if waits else nullcontext():
            if waits:
                self.device.drain()  # Which sleeps; the copy of the sums spins.
            self._lanes.perform(work, settings, stream)
        self.stats.count(op, since)

    def check(self) -> None:
        """Begin a call into the engine.

        Raises:
            EngineError: a lane failed; with what it met as its cause.
            RuntimeError: the engine sleeps, or a graph of the device is being recorded.
        """
        self.device.refuse_capture()
        if self.swap_area is not None:
            raise RuntimeError(
                "the model is asleep (offload.sleep), and its values are out of reach: "
                "offload.wake(model) first"
            )
        self._check_lanes()

    def _check_lanes(self) -> None:
        entry.calls = self.stats.called
        if self._failure is None and self._lanes.failed:
            self._failure = self._lanes.failure()
        if self._failure is not None:
            self.on_failure(self._failure)
            raise EngineError(
                f"a lane of the offload engine failed: {self._failure}. The weights in memory "
                f"are not those of a finished step. Mend that, and {self.remedy}"
            ) from self._failure

    def fail(self, error: BaseException) -> None:
        """Start nothing more, end every wait with `error`: the first one told is the failure."""
        self._failure = self._failure or error
        self.on_failure(self._failure)
        self._lanes.stop(closing=False)

    @contextmanager
    def once(self) -> Iterator[None]:
        """A context in which an error, which leaves things half done, ends everything."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def begin(self, task: Task) -> None:
        """Block until the user's compute `task` may start, and start it."""
        if not self.device.is_host:
            task.streams = []
        if not self._lanes.begin(task, 0.0):
            self._block(task, partial(self._lanes.begin, task, LOOK_AGAIN_S))
        self.join(task)

    def begins(self, task: Task) -> bool:
        """Begin the user's `task` if it may start at once and the device is the host."""
        return self.device.is_host and bool(self._lanes.begin(task, 0.0))

    def join(self, task: Task) -> None:
        """Note that the user's `task`, which has begun, uses the current stream as well."""
        if not self.device.is_host and (stream := self.device.stream()) not in task.streams:
            task.streams.append(stream)

    def finish(self, task: Task) -> None:
        """The user's compute is over, or will be when the device is through with it."""
        if self.device.is_host:
            self._lanes.finish(task)
            return
        self.join(task)
        streams = map(self.device.handle, task.streams) if self._by_handle else task.streams
        try:
            self._lanes.finish(task, list(streams))
        except RuntimeError as error:  # Of the device's driver.
            self.fail(error)
            self._check_lanes()

    def wait(self, tasks: Iterable[Task]) -> None:
        """Block until all `tasks` are over, on the device too; raises EngineError as `check`."""
        for task in tasks:
            if not task.over:
                self._block(task, partial(self._lanes.over, task, LOOK_AGAIN_S))
        self._check_lanes()

    def over(self, task: Task) -> bool:
        """Block another thread than the user's until `task` is over; False where it will not be."""
        while not (found := task.over or self._lanes.over(task, LOOK_AGAIN_S)):
            if self._lanes.failed or self._failure is not None or self.closed:
                break
        return bool(found)

    def _block(self, task: Task, come: Callable[[], bool]) -> None:
        """Block until `come`, which waits for a while itself, and blame what led to `task`."""
        self._check_lanes()
        since = time.perf_counter()
        found = False
        with entry.interruptible():
            while not found and not self._lanes.failed and self._failure is None:
                if self.closed:
                    raise EngineError("the offload engine was closed while it was in use")
                if not (found := come()):
                    self.look(time.perf_counter() - since)
        self.stats.blame(task, since)
        if not found:
            self._check_lanes()

    def drain(self) -> None:
        """Block until the device is through with the user's stream."""
        if not self.device.is_host:
            with self.waited(Lane.COMPUTE):
                self.device.drain()

    def close(self) -> None:
        """Stop the lanes after what they are running, and let files and memory go."""
        self.closed = True
        self._lanes.stop(closing=True)
        self._release()

    def _release(self) -> None:
        """Let go of everything, whatever fails on the way."""
        with ExitStack() as each:
            each.callback(self.memory.close)
            if self.swap_area is not None:
                each.callback(self.swap_area.close)
            if self.store is not None:
                each.callback(self.store.close)

    def quiesce(self, kind: Kind, unit: int, *, to_write: bool = True) -> None:
        """Block until no task writes the home of a value (nor reads it, with `to_write`)."""
        if to_write:
            self.before_write(kind, unit)
        use = Use(self.plan.home(kind, unit), Value(kind, unit))
        touched = tuple(cells([use]))
        reads, writes = ((), touched) if to_write else (touched, ())
        self.wait(self.touching(reads, writes))

    def idle(self) -> None:
        """Block until no task touches any place."""
        self.wait(self.all())

    def forget(self) -> None:
        """Keep nothing that has addresses: the memory of the tiers is given back."""
        self._kept.clear()

    def read_home(self, value: Value) -> torch.Tensor:
        """The bytes of a value or chunk at home: a view in memory tiers, a copy from nvme."""
        home = self.plan.home(value.kind, value.unit)
        if home.tier != "nvme":
            return self.memory.at(Use(home, value))
        assert self.store is not None
        bounce = host_tensor(self.memory.extent(value)[1])
        self.store.read(value, bounce)
        return bounce

    def read_weights(self, unit: int, out: torch.Tensor) -> None:
        """Copy this rank's weights of a unit, as after any update that is due, to the device."""
        self.quiesce("weight", unit, to_write=False)
        for chunk, (offset, size) in enumerate(self.plan.profile.units[unit].weight_chunks):
            out[offset : offset + size].copy_(self.read_home(Value("weight", unit, chunk)))

    def write_home(self, value: Value, content: torch.Tensor) -> None:
        """Put the bytes of a value or chunk home."""
        self.before_write(value.kind, value.unit)
        home = self.plan.home(value.kind, value.unit)
        if home.tier != "nvme":
            here = self.memory.at(Use(home, value))
            if here.data_ptr() != content.data_ptr():
                self.copy_now(here, content)
            if self.device.holds(here):  # Else the host has written it, or the copy was waited for.
                self.drain()
            return
        assert self.store is not None
        if self.device.holds(content) or content.data_ptr() % BLOCK_BYTES:
            away, content = content, host_tensor(content.numel())
            self.copy_now(content, away)
        self.store.write(value, content, int(self.step[0]))

    def copy_now(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the user's thread; where that is between memories it waits for the bus."""
        there = self.device.holds(into)
        if there == self.device.holds(source):
            into.copy_(source)
        else:
            self.drain()  # Which sleeps and is told as compute; a copy spins.
            with self.waited(Lane.H2D if there else Lane.D2H):
                into.copy_(source)


class ChunkCache:
    """Reads and writes homes chunk by chunk, for code that goes from parameter to parameter.

    Many small parameters lie in one chunk, and on nvme a chunk is read and checked as a whole. So
    the last chunk read is cached until another one is read, or it was written.
    """

    def __init__(self, runner: Runner):
        self._runner = runner
        self._last: tuple[Value, object, torch.Tensor] | None = None

    def written(self, value: Value) -> object:
        """What tells the last write of a chunk on nvme from others, None where nothing was written
        yet, as of a gradient before a backward; "memory" of what lives there."""
        runner = self._runner
        if runner.store is None or runner.plan.home(value.kind, value.unit).tier != "nvme":
            return "memory"
        return runner.store.entry(value)

    def read(self, value: Value) -> torch.Tensor:
        """The bytes of a chunk at home, to be changed only by the one that writes it next."""
        runner, written = self._runner, self.written(value)
        if written == "memory":
            return runner.read_home(value)
        if written is None and value.kind == "gradient":
            return host_tensor(runner.memory.extent(value)[1])
        if self._last is None or self._last[:2] != (value, written):
            self._last = None  # Before the next one takes memory.
            self._last = value, written, runner.read_home(value)
        return self._last[2]

    def write(self, value: Value, content: torch.Tensor) -> None:
        """Put the bytes of a chunk home."""
        self._last = None
        self._runner.write_home(value, content)

    def forget(self) -> None:
        """Keep no chunk."""
        self._last = None
