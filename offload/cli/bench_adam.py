"""`offload bench adam`: the update of parameters in CPU memory against what memory gives.

[Note: Fair figures]
The jobs of a state format run in turns, round after round, so that other load on the machine falls
on all alike; ratios are taken within a round, and their median counts. A first round is not
counted. All arrays lie in one mapping on huge pages, with some pages between them: arrays about a
large power of two apart meet in the same memory banks.

The stream is torch's in-place addition over as many bytes as the update must move (gradient read;
weight and state read and written). It runs over the same bytes as the update: on a virtual machine
one region of memory can be a third slower than another.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn

import cpu_adam
from cpu_adam import FORMATS, AdamHyper, LionHyper, SGDHyper, StateFormat
from cpu_adam.memory import on_huge_pages
from offload.cli import Signals, bad_input, nearest
from offload.cli.console import Output, Progress, emit, others_percent, warnings_of
from offload.cli.flags import AsJson, check_field, parse_flags
from offload.planning.machine import host_free_bytes
from offload.planning.tiers import format_bytes, parse_bytes

SECONDS_MAX = 3600
SPACE_BYTES = 17 << 12
ROUNDS_MIN, ROUNDS_MAX = 3, 100
STEPS_DONE = 9
"""Steps that all states have behind them."""
HYPERS: Mapping[str, Any] = {
    "adam": AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True),
    "lion": LionHyper(lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.1),
    "sgd": SGDHyper(lr=1e-3, momentum=0.9),
}
"""Hyper-parameters by rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam(AsJson):
    """Measure the update of parameters in CPU memory with bf16 gradients: parameters per second by
    state format, as a share of what memory gives, beside torch's fused AdamW. CPU_ADAM_KERNEL
    names the kernel, CPU_ADAM_THREADS the number of threads.
    """

    elements: Annotated[str, tyro.conf.arg(metavar="COUNT")] = "64Mi"
    """Parameters in one update. With fewer than 16Mi caches may hold them."""

    formats: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="")] = tuple(FORMATS)
    """Formats of the states. Default: all."""

    seconds: float = 25.0
    """Seconds to measure, about; a few rounds are made however long they take."""

    def __post_init__(self) -> None:
        check_field(self, "elements", self.count > 0, "a number of parameters, such as 64Mi")
        check_field(self, "seconds", 0 <= self.seconds <= SECONDS_MAX, f"0 to {SECONDS_MAX}")
        for found in self.formats:
            like = nearest(found, tuple(FORMATS))
            check_field(self, "formats", found in FORMATS, f"some of {', '.join(FORMATS)}{like}")

    @property
    def count(self) -> int:
        """`elements` as a number, 0 where it is none."""
        with contextlib.suppress(ValueError):
            return parse_bytes(self.elements)
        return 0


@dataclass(frozen=True, slots=True)
class Figure:
    """What was found for one state format."""

    format: str
    bytes_per_element: float
    """That the update must move."""
    parameters_per_s: float
    """Median."""
    of_stream: list[float]
    """Speed as a share of the stream's, by round."""
    of_torch: list[float]
    """Speed in multiples of torch's fused AdamW, by round; empty for the other rules."""

    def __str__(self) -> str:
        line = f"{self.format:10} {self.parameters_per_s / 1e6:6.0f} M/s, "
        line += _spread(self.of_stream) + " of stream"
        return line + (f", {_spread(self.of_torch)} of torch" if self.of_torch else "")


def _spread(rounds: list[float]) -> str:
    figures = statistics.median(rounds), min(rounds), max(rounds)
    median, least, most = (f"{one:.2f}" if one < 10 else f"{one:.0f}" for one in figures)
    return f"{median} ({least}-{most})"


def command(arguments: list[str]) -> None:
    """Measures as `arguments` say; what can be refused is refused before."""
    asked = parse_flags(Adam, "offload bench adam", arguments)
    # Results go to standard output, progress and remarks to standard error.
    console, remarks = Output(stderr=asked.json), Output(stderr=True)
    with Signals() as signals:
        signals.where = "before the first figure"
        with bad_input():
            needed, free = needed_bytes(asked), host_free_bytes()
            if needed > free:
                raise ValueError(
                    f"asked for updates of {asked.elements} parameters, which take "
                    f"{format_bytes(needed)} of memory; found {format_bytes(free)} free; likely "
                    "cause: more parameters than this machine, or the limit of its container, has "
                    "room for; try: --elements 1Mi"
                )
        kernel, _ = warnings_of(cpu_adam.kernel)  # Told below.
        if kernel.native is None:
            remarks.notes([f"the Python reference serves ({kernel.reason})"])
        if busy := others_percent():
            remarks.notes([f"other programs keep {busy}% of the processors busy: figures suffer"])
        threads = cpu_adam.threads()
        console.sentence(
            f"{asked.elements} parameters, kernel {kernel.name}, threads: {threads}; "
            f"{len(os.sched_getaffinity(0))} cores; torch {torch.__version__}"
        )
        figures: list[Figure] = []
        with Progress(remarks) as progress:

            def said(share: float, what: str) -> None:
                signals.where = f"while measuring {what}"
                progress.show(f"measuring {what}", share)

            for figure in measure(asked, said):
                console.sentence(str(figure))
                figures.append(figure)
        told = "Medians (extremes). of stream: as a share of an in-place addition over as many "
        console.sentence(told + "bytes; of torch: of its fused AdamW with all casts.", style="dim")
    if asked.json:
        found = {"kind": "bench adam", "kernel": kernel.name, "threads": threads}
        found |= {"elements": asked.count, "figures": [asdict(figure) for figure in figures]}
        emit(found)


def _layout(format: StateFormat, elements: int) -> dict[str, tuple[int, torch.dtype]]:
    """Items and dtype of every array, by name: first those of the update, then torch's."""
    found = {"gradient": (elements, torch.bfloat16)}
    found["weight"] = (elements, getattr(torch, format.weight_dtype))
    for slot in format.slots:
        found[slot.name] = (slot.items(elements), getattr(torch, slot.dtype))
    if format.rule == "adam":
        names = ("torch master", "torch gradient", "torch exp_avg", "torch exp_avg_sq")
        found |= dict.fromkeys(names, (elements, torch.float32))
    return found


def _spaced(count: int, dtype: torch.dtype) -> int:
    """Whole cache lines, and what lies between two arrays."""
    return -(-count * dtype.itemsize // 64) * 64 + SPACE_BYTES


def needed_bytes(asked: Adam) -> int:
    """Memory that measuring takes, beyond the process itself."""
    layouts = [_layout(FORMATS[name], asked.count) for name in asked.formats]
    return max(sum(_spaced(*array) for array in layout.values()) for layout in layouts)


def measure(asked: Adam, progress: Callable[[float, str], None]) -> Iterator[Figure]:
    """Measures format by format, and yields what was found; torch gets as many threads."""
    started, torch_threads = time.perf_counter(), torch.get_num_threads()
    memory = on_huge_pages(torch.empty(needed_bytes(asked), dtype=torch.uint8))
    names = list(dict.fromkeys(asked.formats))
    try:
        torch.set_num_threads(cpu_adam.threads())
        for done, name in enumerate(names):
            left = started + asked.seconds - time.perf_counter()
            progress(done / len(names), name)
            yield _figure(FORMATS[name], asked.count, memory, left / (len(names) - done))
    finally:
        torch.set_num_threads(torch_threads)


def _figure(format: StateFormat, elements: int, memory: Tensor, seconds: float) -> Figure:
    """Measures one format."""
    tensors, start = dict[str, Tensor](), 0
    for name, (count, dtype) in _layout(format, elements).items():
        end = start + count * dtype.itemsize
        tensors[name] = memory[start:end].view(dtype).zero_()
        start += _spaced(count, dtype)
    gradient, weight = tensors["gradient"].normal_(std=1e-2), tensors["weight"].normal_()
    record = {slot.name: tensors[slot.name] for slot in format.slots}
    moved = gradient.nbytes + 2 * sum(x.nbytes for x in (weight, *record.values()))
    words = memory[: moved // 8 * 4].view(torch.int32)  # Each is read and written back.
    hyper, step = HYPERS[format.rule], STEPS_DONE + 1

    def update() -> None:
        cpu_adam.update(weight, gradient, record, hyper, step=step, format=format)

    jobs: list[Callable[[], object]] = [lambda: words.add_(0), update]
    if format.rule == "adam":
        jobs.append(_torch_job(tensors))
    stream, ours, *theirs = _in_turns(jobs, seconds)
    return Figure(
        format.name,
        bytes_per_element=moved / elements,
        parameters_per_s=elements / statistics.median(ours),
        of_stream=[a / b for a, b in zip(stream, ours)],
        of_torch=[a / b for times in theirs for a, b in zip(times, ours)],
    )


def _torch_job(tensors: Mapping[str, Tensor]) -> Callable[[], None]:
    """The whole job by torch's fused AdamW: gradient to float32, step, master to weight."""
    weight = tensors["weight"]
    master = nn.Parameter(tensors["torch master"].copy_(weight))
    master.grad = tensors["torch gradient"]
    optimizer = torch.optim.AdamW([master], fused=True)
    states = {name: tensors[f"torch {name}"] for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[master] = {"step": torch.tensor(float(STEPS_DONE)), **states}

    @torch.no_grad()
    def job() -> None:
        tensors["torch gradient"].copy_(tensors["gradient"])
        optimizer.step()
        if weight.dtype != torch.float32:
            weight.copy_(master)

    return job


def _in_turns(jobs: list[Callable[[], object]], seconds: float) -> list[list[float]]:
    """Seconds of every job in every round."""
    rounds: list[list[float]] = []
    started = time.perf_counter()
    for count in range(ROUNDS_MAX + 1):
        took = []
        for job in jobs:
            start = time.perf_counter()
            job()
            took.append(time.perf_counter() - start)
        rounds.append(took)
        if count >= ROUNDS_MIN and time.perf_counter() + sum(took) > started + seconds:
            break
    return [list(times) for times in zip(*rounds[1:])]
