"""Run ops: every op becomes a task on its lane, behind the tasks that touched its places before.

The executor owns the memory, the store and the lanes of an engine. It knows places and values, and
nothing of parameters or modules. The user's thread reads and writes homes through `peek` and
`poke`, after `quiesce`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from offload import copies
from offload.arena import Memory, host_tensor
from offload.bed import Bed
from offload.books import Known, Spans
from offload.device import Device
from offload.interrupt import whole
from offload.lanes import Lanes
from offload.layout import Plan
from offload.program import WHOLE, Lane, Op, Use, Value, Verb, cells, staged
from offload.records import Kind
from offload.shared import Share
from offload.store import Store
from offload.task import Passage, Run, Task, in_slot
from offload.trace import Trace

ENGINE_LANES = (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.CPU, Lane.DISK)
"""Lanes with a thread; compute's runs the updates of states that live on the device."""


BytesOf = Callable[[Use], torch.Tensor]
"""Gives the flat bytes of a use, wherever its chunk has its staging slot."""


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
        self.bed: Bed | None = None
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
        if self.bed is not None:
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
        if op.bytes > copies.PIECE_BYTES_MAX:
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
        source, target, value = op.reads[0], op.writes[0], op.value
        unit, chunk = self.plan.profile.units[value.unit].name, value.chunk
        part, step = None if chunk == WHOLE else chunk, self.step

        def read() -> None:
            assert self.store is not None
            self.store.read(value.kind, unit, self._bytes_of(passage, target), part)

        def write() -> None:
            assert self.store is not None
            self.store.write(value.kind, unit, self._bytes_of(passage, source), step, part)

        def copy() -> Iterator[None]:
            here = self._bytes_of(passage, source)
            return copies.in_pieces(self.device, self._bytes_of(passage, target), here)

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

    def peek(self, value: Value) -> torch.Tensor:
        """The bytes of a value or chunk at home: a view in memory tiers, a copy from nvme."""
        home = self.plan.home(value.kind, value.unit)
        if home.tier != "nvme":
            return self.memory.at(Use(home, value))
        assert self.store is not None
        bounce = host_tensor(self.memory.extent(value)[1])
        unit = self.plan.profile.units[value.unit].name
        self.store.read(value.kind, unit, bounce, None if value.chunk == WHOLE else value.chunk)
        return bounce

    def poke(self, value: Value, content: torch.Tensor) -> None:
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
        part = None if value.chunk == WHOLE else value.chunk
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

    @whole
    def clear(self, value: Value) -> None:
        """Put zeros home."""
        self.poke(value, host_tensor(self.memory.extent(value)[1]))

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
            if self.bed is not None:
                each.callback(self.bed.close)
            if self.store is not None:
                each.callback(self.store.close)
