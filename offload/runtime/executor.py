"""Run ops: every op becomes a task on its lane, behind the tasks that touched its places before.

The executor owns the memory, the store and the lanes of an engine. It knows places and values, and
nothing of parameters or modules. The user's thread reads and writes homes through `read_home` and
`write_home`, after `quiesce`.

[Note: Pieces]
A device moves bytes in each direction one copy after the other, in the order in which it was given
them: a unit of 400 MB holds up whatever comes behind it, however urgent, for 8 ms at 50 GB/s. So a
long copy is queued piece by piece. Two are under way at once, the one that moves and the one that
follows it, so that nothing stands still between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import torch

from offload.planning.layout import Plan
from offload.planning.profile import BLOCK_BYTES, Kind
from offload.program.ops import ALL_CHUNKS, Lane, Op, Use, Value, Verb, cells, staged
from offload.program.schedule import Fence, Passage, Run, Task, in_slot
from offload.runtime.books import Known, Spans
from offload.runtime.device import Device
from offload.runtime.lanes import Lanes
from offload.runtime.memory import Memory, host_tensor
from offload.runtime.shared_budget import Share
from offload.runtime.store import Store
from offload.runtime.trace import Trace

PIECE_BYTES_MAX = 64 << 20
"""Most bytes of a piece: a millisecond or two, and long enough to reach the full speed. The pieces
of a copy are of one size, so more than half of it."""

UNDER_WAY_MAX = 2
"""Pieces that are queued and not done."""


def in_pieces(device: Device, into: torch.Tensor, source: torch.Tensor) -> Iterator[None]:
    """Queue a copy of flat bytes on the current stream; yields between two pieces.

    When it ends, all is queued, and of the pieces the last `UNDER_WAY_MAX` may not be done.
    """
    size = into.numel()
    count = max(1, -(-size // PIECE_BYTES_MAX))
    step = -(-size // (count * BLOCK_BYTES)) * BLOCK_BYTES or BLOCK_BYTES
    under_way: deque[Fence | None] = deque()
    for start in range(0, size, step):
        if start:
            under_way.append(device.fence(device.stream()))
            if len(under_way) == UNDER_WAY_MAX:
                fence = under_way.popleft()
                if fence is not None:
                    fence.synchronize()
            yield
        device.copy(into[start : start + step], source[start : start + step])


ENGINE_LANES = (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.CPU, Lane.DISK)
"""Lanes with a thread; compute's runs the updates of states that live on the device."""


KEPT_BYTES_MAX = 16 << 20
"""Largest chunk that `ChunkCache` keeps. Chunks never are larger; frozen weights may be."""

BytesOf = Callable[[Use], torch.Tensor]
"""Gives the flat bytes of a use, wherever its chunk has its staging slot."""


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
        pace: Callable[[Op], float] | None = None,
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
        try:
            self.lanes = Lanes(ENGINE_LANES, device=device, pace=pace, trace=trace)
        except BaseException:
            self._release()
            raise
        self.step = 0
        """Steps taken: stamped on what is written to the store."""

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

    def issue(
        self,
        op: Op,
        pass_number: int,
        run: Callable[[], None] | None = None,
    ) -> Task:
        """Queue `op` on its lane; a move knows what to do, any other op does `run`."""
        return self.issue_known(self.known(op), pass_number, run)

    def known(self, op: Op) -> Known:
        """`op`, to be issued any number of times."""
        reads, writes = tuple(cells(self.plan, op.reads)), tuple(cells(self.plan, op.writes))
        if op.verb is not Verb.MOVE or "nvme" in (
            use.place.tier for use in (*op.reads, *op.writes)
        ):
            return self.lanes.know(op, reads, writes)
        if op.bytes > PIECE_BYTES_MAX:
            return self.lanes.know(op, reads, writes, self._mover(op, None))
        run = partial(self._copy, *op.reads, *op.writes)
        spans = self._spans(op) if self.lanes.copies else None
        return self.lanes.know(op, reads, writes, run, spans)

    def _spans(self, op: Op) -> Spans | None:
        into, source = (self.memory.at(use) for use in (*op.writes, *op.reads))
        assert into.numel() == source.numel()
        return (into.data_ptr(), source.data_ptr(), into.numel()) if into.numel() else None

    def issue_known(
        self, known: Known, pass_number: int, run: Callable[[], None] | None = None
    ) -> Task:
        """As `issue`."""
        work = known.run or run
        try:
            if work is None and not known.ready:
                work = self._mover(known.op, None)
            return self.lanes.issue(known, pass_number, work)
        except BaseException as error:
            self.lanes.fail(error)  # What went before it, of the same value, cannot be taken back.
            raise

    def issue_all(self, known: Sequence[Known], pass_number: int) -> list[Task]:
        """Queue several ops that say what they do, moves or the user's own compute."""
        runs = [one.run if one.ready else self._mover(one.op, None) for one in known]
        try:
            return self.lanes.issue_all(known, pass_number, runs)
        except BaseException as error:
            self.lanes.fail(error)  # Some may be queued, and nobody has them.
            raise

    def issue_chunk(
        self,
        ops: Sequence[Op],
        pass_number: int,
        run: Callable[[BytesOf], None],
        carrying: Callable[[Op, BytesOf], Run | None] | None = None,
    ) -> list[Task]:
        """Queue the ops of a chunk: moves, and the one that does `run`.

        `carrying` gives what those moves do that it knows better.
        """
        passage = self.lanes.passage() if staged(ops) else None
        tasks = []
        try:
            for op in ops:
                bytes_of = partial(self._bytes_of, passage)
                moves = op.verb is Verb.MOVE
                work = carrying(op, bytes_of) if carrying is not None else None
                if work is None:
                    work = self._mover(op, passage) if moves else partial(run, bytes_of)
                reads, writes = cells(self.plan, op.reads), cells(self.plan, op.writes)
                known = self.lanes.know(op, tuple(reads), tuple(writes))
                tasks.append(self.lanes.issue(known, pass_number, work, passage))
            if passage is not None:
                self.lanes.seal(passage)
        except BaseException as error:
            self.lanes.fail(error)  # A passage that is not sealed would be waited for for ever.
            raise
        return tasks

    def _bytes_of(self, passage: Passage | None, use: Use) -> torch.Tensor:
        return self.memory.at(use if passage is None else in_slot(use, passage.slot))

    def _copy(self, source: Use, target: Use) -> None:
        self.device.copy(self.memory.at(target), self.memory.at(source))

    def _mover(self, op: Op, passage: Passage | None) -> Run:
        assert op.verb is Verb.MOVE, "what any other op does says who issues it"
        source, target, value = op.reads[0], op.writes[0], op.value
        unit, chunk = self.plan.profile.units[value.unit].name, value.chunk
        part, step = None if chunk == ALL_CHUNKS else chunk, self.step

        def read() -> None:
            assert self.store is not None
            self.store.read(value.kind, unit, self._bytes_of(passage, target), part)

        def write() -> None:
            assert self.store is not None
            self.store.write(value.kind, unit, self._bytes_of(passage, source), step, part)

        def copy() -> Iterator[None]:
            here = self._bytes_of(passage, source)
            return in_pieces(self.device, self._bytes_of(passage, target), here)

        if source.place.tier == "nvme":
            return read
        return write if target.place.tier == "nvme" else copy

    # -- the user's thread at the homes --------------------------------------------------------

    def quiesce(self, kind: Kind, unit: int, *, to_write: bool = True) -> None:
        """Block until no task writes the home of a value (nor reads it, with `to_write`)."""
        use = Use(self.plan.home(kind, unit), Value(kind, unit))
        touched = tuple(cells(self.plan, [use]))
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
        self.store.write(value.kind, unit, content, self.step, part)

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
                each.callback(self.share.give_back)
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
        if last is not None and last[0] == value and last[1] is written:
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
