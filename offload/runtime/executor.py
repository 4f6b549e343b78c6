"""Run ops: every op becomes a task on its lane, behind the tasks that touched its places before.

The executor owns the memory, the store and the lanes of an engine. It knows places and values, and
nothing of parameters or modules. The user's thread reads and writes homes through `read_home` and
`write_home`, after `quiesce`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from offload.planning.layout import Plan
from offload.planning.profile import Kind
from offload.program.ops import ALL_CHUNKS, Lane, Op, Use, Value, Verb, cells
from offload.program.schedule import Task, Work
from offload.program.verify import check_op
from offload.runtime.books import CompiledBooks, Known, native_books
from offload.runtime.device import Device
from offload.runtime.lanes import Lanes, Pace
from offload.runtime.memory import Memory, host_tensor
from offload.runtime.native_work import NativeWorks
from offload.runtime.shared_budget import Share
from offload.runtime.store import Store
from offload.runtime.trace import Trace
from offload.runtime.works import PythonWorks

ENGINE_LANES = (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.CPU, Lane.DISK)
"""Lanes with a thread; compute's runs the updates of states that live on the device. Where Python
streams chunks the CPU has a second thread: one computes while the other's chunk moves."""


MADE_PER_UNIT_MAX = 32
"""Ops kept per unit: with orders of use that depend on the data there were no end."""

KEPT_BYTES_MAX = 16 << 20
"""Largest chunk that `ChunkCache` keeps. Chunks never are larger; frozen weights may be."""


Made = TypeVar("Made")


class SwapArea(Protocol):
    """Where the values of a sleeping engine lie."""

    def close(self) -> None:
        """Let go of them."""


class Executor:
    """The resources of an engine, and the order in which they are used."""

    def __init__(
        self,
        plan: Plan,
        memory: Memory,
        store: Store | None,
        device: Device,
        pace: Pace | None = None,
        trace: Trace | None = None,
    ):
        """Start the lanes; where they do not start, let `memory` and `store` go.

        `store` is None when nothing lives on nvme; see `Lanes` for `pace` and `trace`.
        """
        self.plan = plan
        self.memory = memory
        self.store = store
        self.device = device
        self.swap_area: SwapArea | None = None
        """Where the values are while the engine sleeps."""
        self.share: Share | None = None
        """What it holds of a budget that engines share."""
        self._made, self._made_in = dict[Hashable, Any](), 0
        """Ops that come again, and of which arenas their addresses are."""
        self.step = np.zeros(1, np.int64) if store is None else store.chunks.step
        """Steps taken: stamped on what is written to the store."""
        can_be_native = pace is None and (store is None or store.native)
        native = native_books() if can_be_native else None
        works = PythonWorks(plan, memory, store, device)
        self.works: PythonWorks | NativeWorks = works
        """Makes what lanes do."""
        self.notice: str | None = None
        """What the user should know about the lanes."""
        books: CompiledBooks | None = None
        if native is not None:
            try:
                books = CompiledBooks(trace.ran.maxlen or 0 if trace else 0, device.open(native))
                self.works = NativeWorks(native, plan, memory.at, store, works, device.is_host)
            except RuntimeError as error:  # Of the device's driver.
                self.notice = f"the lanes run in Python, which is slower: {error}"
        streams = books is None and not (device.is_host and store is None)
        try:
            self.lanes = Lanes(
                (*ENGINE_LANES, *([Lane.CPU] if streams else [])),
                device,
                pace=pace,
                trace=trace,
                books=books,
                explain=self.works.explain,
            )
        except BaseException:
            self._release()
            raise
        works.did = self.lanes.did

    def check(self) -> None:
        """Raise unless values can be had.

        Raises:
            EngineError: a lane failed.
            RuntimeError: the engine sleeps, or a graph of the device is being recorded.
        """
        self.device.refuse_capture()
        if self.swap_area is not None:
            raise RuntimeError(
                "the model is asleep (offload.sleep), and its values are out of reach: "
                "offload.wake(model) first"
            )
        self.lanes.check()

    def made(self, make: Callable[..., Op | list[Op]], *args: Hashable) -> list[Known]:
        """What `make` of `program.compile` makes of the plan and these: moves, the user's ops."""

        def known() -> list[Known]:
            found = make(self.plan, *args)
            return [
                self.known(op, self.works.move(op) if op.verb is Verb.MOVE else None)
                for op in ([found] if isinstance(found, Op) else found)
            ]

        return self.kept((make, args), known)

    def kept(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` makes: kept under `key`, as its addresses are those of the arenas of now."""
        too_many = len(self._made) >= MADE_PER_UNIT_MAX * len(self.plan.profile.units)
        if too_many or self._made_in != self.memory.taken:
            self._made.clear()
            self._made_in = self.memory.taken
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found

    def known(self, op: Op, work: Work | None) -> Known:
        """`op`, once it is checked, to be issued any number of times; `work` is what it does."""
        check_op(self.plan, op)
        return self.again(op, work)

    def again(self, op: Op, work: Work | None) -> Known:
        """`op`, which was checked, with other work."""
        return self.lanes.know(op, tuple(cells(op.reads)), tuple(cells(op.writes)), work)

    def issue(self, ops: Sequence[Known], pass_number: int, settings: Any = None) -> list[Task]:
        """Queue ops, each behind those that touched its places before; works get `settings`."""
        try:
            return self.lanes.issue(ops, pass_number, settings)
        except BaseException as error:
            self.lanes.fail(error)  # Some may be queued, and nobody has them.
            raise

    # -- the user's thread at the homes --------------------------------------------------------

    def quiesce(self, kind: Kind, unit: int, *, to_write: bool = True) -> None:
        """Block until no task writes the home of a value (nor reads it, with `to_write`)."""
        use = Use(self.plan.home(kind, unit), Value(kind, unit))
        touched = tuple(cells([use]))
        reads, writes = ((), touched) if to_write else (touched, ())
        self.lanes.wait(self.lanes.touching(reads, writes))

    def idle(self) -> None:
        """Block until no task touches any place, homes and slots and what is staged."""
        self.lanes.wait(self.lanes.all())

    def read_home(self, value: Value) -> torch.Tensor:
        """The bytes of a value or chunk at home: a view in memory tiers, a copy from nvme."""
        home = self.plan.home(value.kind, value.unit)
        if home.tier != "nvme":
            return self.memory.at(Use(home, value))
        assert self.store is not None
        bounce = host_tensor(self.memory.extent(value)[1])
        unit = self.plan.profile.units[value.unit].name
        chunk = None if value.chunk == ALL_CHUNKS else value.chunk
        self.store.read(value.kind, unit, bounce, chunk)
        return bounce

    def write_home(self, value: Value, content: torch.Tensor) -> None:
        """Put the bytes of a value or chunk home."""
        home = self.plan.home(value.kind, value.unit)
        if home.tier != "nvme":
            here = self.memory.at(Use(home, value))
            if here.data_ptr() != content.data_ptr():
                self.copy_now(here, content)
            if self.device.holds(here):  # Else the host has written it, or the copy was waited for.
                self.lanes.drain()
            return
        assert self.store is not None
        if self.device.holds(content):
            away, content = content, host_tensor(content.numel())
            self.copy_now(content, away)
        unit = self.plan.profile.units[value.unit].name
        part = None if value.chunk == ALL_CHUNKS else value.chunk
        self.store.write(value.kind, unit, content, int(self.step[0]), part)

    def copy_now(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the user's thread; where that is between memories it waits for the bus."""
        there = self.device.holds(into)
        if there == self.device.holds(source):
            into.copy_(source)
        else:
            self.lanes.drain()  # Which sleeps and is told as compute; a copy spins.
            with self.lanes.waited(Lane.H2D if there else Lane.D2H):
                into.copy_(source)

    def clear(self, value: Value) -> None:
        """Put zeros home."""
        self.write_home(value, host_tensor(self.memory.extent(value)[1]))

    def close(self) -> None:
        """Stop the lanes; when the last has stopped, let files and memory go.

        In a lane, where the garbage collector may call it, it returns before that.
        """
        self.lanes.close(self._release)

    def _release(self) -> None:
        """Let go of everything, whatever fails on the way."""
        with ExitStack() as each:
            if self.share is not None:
                each.callback(self.share, {})
            each.callback(self.memory.close)
            if self.swap_area is not None:
                each.callback(self.swap_area.close)
            if self.store is not None:
                each.callback(self.store.close)


class ChunkCache:
    """Reads and writes homes chunk by chunk, for code that goes from parameter to parameter.

    Many small parameters lie in one chunk, and on nvme a chunk is read and checked as a whole. So
    the chunk read last is kept until another one is read, or it was written.
    """

    def __init__(self, executor: Executor):
        """Of the values that `executor` has at home."""
        self._executor = executor
        self._last: tuple[Value, object, torch.Tensor] | None = None

    def read(self, value: Value) -> torch.Tensor:
        """The bytes of a chunk at home as it is now, to be changed only by who writes it next."""
        written = self._written(value)
        last, self._last = self._last, None
        if last is not None and last[0] == value and last[1] == written:
            found = last[2]
        else:
            del last  # Before the next one takes memory.
            found = self._read(value, written)
        if written is not None and found.nbytes <= KEPT_BYTES_MAX:
            self._last = value, written, found
        return found

    def _read(self, value: Value, written: object) -> torch.Tensor:
        on_nvme = self._executor.plan.home(value.kind, value.unit).tier == "nvme"
        if on_nvme and written is None and value.kind == "gradient":  # No backward has come here.
            return host_tensor(self._executor.memory.extent(value)[1])
        return self._executor.read_home(value)

    def write(self, value: Value, content: torch.Tensor) -> None:
        """Put the bytes of a chunk home."""
        self._last = None
        self._executor.write_home(value, content)

    def forget(self) -> None:
        """Keep no chunk."""
        self._last = None

    def _written(self, value: Value) -> object | None:
        """What stands for the last write of a chunk on nvme: every write makes another one."""
        plan, store = self._executor.plan, self._executor.store
        if store is None or plan.home(value.kind, value.unit).tier != "nvme":
            return None
        return store.entry(value.kind, plan.profile.units[value.unit].name, value.chunk)
