"""The update measured against this machine's memory and against other optimizers; prints nothing.

[Note: Fair figures]
Speed is compared within *groups*: one state format with one number of threads. The jobs of a group
run in turns, round after round, so that whatever else the machine does falls on all alike; ratios
are taken within a round, and the median of them counts. A first round is not counted. All arrays
lie in one mapping, touched before, on huge pages where the system gives them, with some pages
between them: arrays about a large power of two apart meet in the same banks, which none but those
of a benchmark are. (64 Mi elements end to end: `exact` 0.68 of a stream that it keeps up with
otherwise; `compact` 2400 M/s, with 1, 2, 5 and 17 pages 2200, 2700, 2900 and 2900.)

What memory gives is an in-place stream by the same threads: as many bytes as the update must move
(gradient read; weight and state read and written), each read and written back with an addition of
nothing, which changes none. It runs over the very bytes of the update: on a virtual machine one
region of a process's memory can be a third slower than another, as the host backs some with small
pages, and no stream elsewhere tells what these can give. It goes over them as one array, from the
first byte on for half as many as are moved, and array by array; the faster counts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cpu_adam import choice, native
from cpu_adam.figures import Figure, Group, Role, Small, Spread
from cpu_adam.formats import FORMATS, StateFormat
from cpu_adam.hyper import AdamHyper, Hyper, LionHyper, SGDHyper
from cpu_adam.memory import HUGE_PAGE_BYTES
from cpu_adam.peers import STEPS_DONE, Peer, PeerJob, arrays
from cpu_adam.reference import cut
from cpu_adam.spans import Span

GRADIENTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Dtypes of gradients by their short names."""
HYPERS: dict[str, Hyper] = {
    hyper.rule: hyper
    for hyper in (
        AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True),
        LionHyper(lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.1),
        SGDHyper(lr=1e-3, momentum=0.9),
    )
}
"""Hyper-parameters by rule."""
STEP = STEPS_DONE + 1

SPACE_BYTES = 17 << 12
ROUNDS_MIN = 3
ROUNDS_MAX = 100
SMALL_TENSORS, SMALL_ELEMENTS, SMALL_ROUNDS = 1000, 4096, 15
"""Many small tensors in one call: how many, how large, how often."""

Jobs = Mapping[tuple[Role, str], Callable[[], object]]
Progress = Callable[[float, str], None]
"""Told which share of the whole is done, and what is measured now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What to measure."""

    elements: int
    """Parameters in one update."""
    formats: tuple[str, ...]
    """Rows of `FORMATS`."""
    kernels: tuple[str, ...]
    """Kernels, of those that `choice.available` names."""
    threads: tuple[int, ...]
    """Numbers of threads."""
    gradient: torch.dtype
    """Dtype of the gradients."""
    peers: tuple[Peer, ...]
    """Optimizers to compare with, each where its rule is that of the format."""
    seconds: float
    """About how long it may take. `ROUNDS_MIN` rounds are done however long they take."""


def default_kernels() -> tuple[str, ...]:
    """All compiled kernels that run here; the one that serves where none does, or it is forced."""
    chosen = choice.kernel()
    if chosen.native is None or os.environ.get(choice.KERNEL_VARIABLE):
        return (chosen.name,)
    return tuple(name for name in choice.available() if name != "python")


def needed_bytes(wanted: Wanted) -> int:
    """Memory that measuring takes, beyond the process itself."""
    return max(
        sum(_spaced(count * dtype.itemsize) for count, dtype in layout.values())
        for layout in (_layout(FORMATS[name], wanted) for name in wanted.formats)
    )


def measure(wanted: Wanted, progress: Progress = lambda share, what: None) -> Iterator[Group]:
    """Measures group by group, formats outermost, and yields what was found."""
    started = time.perf_counter()
    memory = _Memory(needed_bytes(wanted))
    torch_threads = torch.get_num_threads()
    count, done = len(wanted.formats) * len(wanted.threads), 0
    try:
        for name in wanted.formats:
            job = _Job(FORMATS[name], wanted, memory)
            for threads in wanted.threads:
                choice.set_threads(threads)
                torch.set_num_threads(threads)
                left = started + wanted.seconds - time.perf_counter()
                within = partial(_within, progress, f"{name}, threads: {threads}", done, count)
                yield job.group(threads, left / (count - done), within)
                done += 1
    finally:
        torch.set_num_threads(torch_threads)
        choice.set_threads(None)


def _within(progress: Progress, what: str, done: int, count: int, share: float) -> None:
    """Progress within a group as progress of the whole."""
    progress((done + share) / count, what)


class _Memory:
    """One mapping that tensors are cut from."""

    def __init__(self, size: int) -> None:
        # Of this process alone, where the system can: what could be shared gets no huge pages.
        alone = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
        held = mmap.mmap(-1, size + HUGE_PAGE_BYTES, **alone)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # A kernel without them.
                held.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(held, dtype=torch.uint8)
        start = -whole.data_ptr() % HUGE_PAGE_BYTES
        self._bytes = whole[start : start + size]

    def words(self, count: int) -> Tensor:
        """The first words of 32 bits."""
        return self._bytes[: 4 * count].view(torch.int32)

    def cut(self, layout: Mapping[str, tuple[int, torch.dtype]]) -> dict[str, Tensor]:
        """Tensors of zeros from its start on; earlier ones must be out of use."""
        found, start = {}, 0
        for name, (count, dtype) in layout.items():
            size = count * dtype.itemsize
            found[name] = self._bytes[start : start + size].view(dtype).zero_()
            start += _spaced(size)
        return found


def _spaced(size: int) -> int:
    """Whole cache lines, and what lies between two arrays."""
    return -(-size // 64) * 64 + SPACE_BYTES


def _layout(format: StateFormat, wanted: Wanted) -> dict[str, tuple[int, torch.dtype]]:
    """Items and dtype of every array of a job, by name: first those of the update."""
    elements = wanted.elements
    own = {"gradient": (elements, wanted.gradient)}
    own["weight"] = (elements, getattr(torch, format.weight_dtype))
    for slot in format.slots:
        own[f"slot {slot.name}"] = (slot.items(elements), getattr(torch, slot.dtype))
    shared = arrays(wanted.peers, format, wanted.gradient)
    return own | {f"peer {name}": (elements, dtype) for name, dtype in shared.items()}


class _Job:
    """The tensors of an update in one format, which streams run over too, and of peers."""

    def __init__(self, format: StateFormat, wanted: Wanted, memory: _Memory) -> None:
        self._format = format
        self._wanted = wanted
        tensors = memory.cut(_layout(format, wanted))
        self._gradient = _fill(tensors["gradient"], 1e-2)
        self._weight = _fill(tensors["weight"], 1.0)
        self._slots = {slot.name: tensors[f"slot {slot.name}"] for slot in format.slots}
        written = [self._weight, *self._slots.values()]
        self._moved_bytes = self._gradient.nbytes + 2 * sum(x.nbytes for x in written)
        self._words = memory.words(self._moved_bytes // 8)
        of_peers = arrays(wanted.peers, format, wanted.gradient)
        shared = {name: tensors[f"peer {name}"] for name in of_peers}
        if shared:
            shared["master"].copy_(self._weight)
        self._peers = {
            peer.name: PeerJob(peer, self._gradient, shared)
            for peer in wanted.peers
            if peer.rule == format.rule
        }

    def group(self, threads: int, seconds: float, progress: Callable[[float], None]) -> Group:
        """Measures with the threads that are set now, for about so many seconds."""
        jobs: dict[tuple[Role, str], Callable[[], object]] = {}
        jobs |= {("stream", name): job for name, job in self._streams().items()}
        jobs |= {("update", name): partial(self._update, name) for name in self._wanted.kernels}
        jobs |= {("peer", name): job for name, job in self._peers.items()}
        times = _in_turns(jobs, seconds, progress)
        return Group(
            format=self._format.name,
            threads=threads,
            elements=self._wanted.elements,
            bytes_per_element=self._moved_bytes / self._wanted.elements,
            figures=tuple(self._figures(times)),
            small=self._small(),
        )

    def _update(self, kernel: str) -> None:
        with choice.forced(kernel):
            native.update(
                self._weight,
                self._gradient,
                self._slots,
                HYPERS[self._format.rule],
                step=STEP,
                format=self._format,
            )

    def _streams(self) -> dict[str, Callable[[], object]]:
        """In-place streams over the update's bytes: see [Note: Fair figures]."""
        chosen = choice.kernel()
        if chosen.native is None:
            return {"torch in-place add": partial(self._words.add_, 0)}
        found: dict[str, Callable[[], object]] = {}
        found["one array"] = partial(native.stream, chosen, "stream", self._words)
        name = f"stream_{self._format.name}"
        own = (self._gradient, self._weight, *self._slots.values())
        found["as many arrays"] = partial(native.stream, chosen, name, *own)
        return found

    def _figures(self, times: Mapping[tuple[Role, str], Sequence[float]]) -> Iterator[Figure]:
        def fastest(role: Role) -> Sequence[float] | None:
            found = [took for (other, _), took in times.items() if other == role]
            return min(found, key=statistics.median, default=None)

        stream, peer = fastest("stream"), fastest("peer")
        assert stream is not None
        for (role, name), took in times.items():
            yield Figure(
                role=role,
                name=name,
                rounds=len(took),
                seconds=Spread.of(took),
                parameters_per_s=Spread.of([self._wanted.elements / t for t in took]),
                bytes_per_s=Spread.of([self._moved_bytes / t for t in took]),
                of_stream=Spread.of([a / b for a, b in zip(stream, took)]),
                of_peer=None if peer is None else Spread.of([a / b for a, b in zip(peer, took)]),
            )

    def _small(self) -> Small | None:
        """Many small tensors in one call, against one of as many elements."""
        tensors = min(SMALL_TENSORS, self._wanted.elements // SMALL_ELEMENTS)
        if not tensors:
            return None
        kernel = self._wanted.kernels[0]
        turns = [(HYPERS[self._format.rule], STEP)]
        jobs: dict[tuple[Role, str], Callable[[], object]] = {}
        for name, count in (("many", tensors), ("one", 1)):
            table = self._table(count, tensors * SMALL_ELEMENTS // count)
            jobs["update", name] = partial(table.update, turns)
        with choice.forced(kernel):
            rounds = SMALL_ROUNDS if kernel != "python" else ROUNDS_MIN
            times = _in_turns(jobs, 0.0, rounds_min=rounds)
        many, one = times["update", "many"], times["update", "one"]
        return Small(
            kernel=kernel,
            tensors=tensors,
            elements=SMALL_ELEMENTS,
            seconds=Spread.of(many),
            extra_us_per_tensor=Spread.of([(a - b) / tensors * 1e6 for a, b in zip(many, one)]),
        )

    def _table(self, tensors: int, elements: int) -> native.UpdateTable:
        """A table of spans side by side, each of tensors of its own, as parameters are."""
        spans = []
        for start in range(0, tensors * elements, elements):
            here = slice(start, start + elements)
            slots = cut(self._slots, self._format, start, elements)
            apart = {name: _apart(slot) for name, slot in slots.items()}
            spans.append(Span(_apart(self._weight[here]), _apart(self._gradient[here]), apart))
        return native.UpdateTable(spans, self._format)


def _apart(x: Tensor) -> Tensor:
    """The same memory as a tensor with a storage of its own."""
    start = x.storage_offset() * x.itemsize
    storage = x.untyped_storage()[start : start + x.nbytes]
    return torch.empty(0, dtype=x.dtype).set_(storage)


def _fill(x: Tensor, scale: float) -> Tensor:
    """Normal numbers, a block again and again."""
    block = torch.randn(min(x.numel(), 1 << 20)).mul_(scale).to(x.dtype)
    for start in range(0, x.numel(), block.numel()):
        part = x[start : start + block.numel()]
        part.copy_(block[: part.numel()])
    return x


def _in_turns(
    jobs: Jobs,
    seconds: float,
    progress: Callable[[float], None] = lambda share: None,
    rounds_min: int = ROUNDS_MIN,
) -> dict[tuple[Role, str], list[float]]:
    """Seconds of every job in every round, in the order of rounds."""
    found: dict[tuple[Role, str], list[float]] = {key: [] for key in jobs}
    started = time.perf_counter()
    for count in range(ROUNDS_MAX + 1):
        began = time.perf_counter()
        for key, job in jobs.items():
            start = time.perf_counter()
            job()
            took = time.perf_counter() - start
            if count:
                found[key].append(took)
            spent = time.perf_counter() - started
            progress(min(1.0, spent / seconds) if seconds > 0 else 0.0)
        now = time.perf_counter()
        if count >= rounds_min and now + (now - began) > started + seconds:
            break
    return found
