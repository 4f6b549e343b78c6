"""The update against this machine's memory and against torch, as ratios.

    python benchmarks/adam.py [--elements 64Mi] [--threads 2 1] [--rounds 9]

In one process and in turns: in-place streams of the bytes that the update must move, in one array
and in five (what memory gives is the faster), the update by every kernel and thread count, and what
mixed precision needs of torch's fused AdamW: the bfloat16 gradient to float32, the fused step, the
float32 weight to bfloat16. All on huge pages. Times are medians; ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import cpu_adam
from cpu_adam import FORMATS, AdamHyper, Span, UpdateTable, choice, update

HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True)
EXACT = FORMATS["exact"]
BYTES_PER_ELEMENT = 2 + 2 * (2 + EXACT.bytes_per_element)
"""Gradient read; weight and state read and written."""
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def memory(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory on huge pages, touched."""
    held = mmap.mmap(-1, count * dtype.itemsize + (2 << 20))
    held.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(held, dtype=torch.uint8)
    start = -whole.data_ptr() % (2 << 20)
    return whole[start : start + count * dtype.itemsize].zero_().view(dtype)


def fill(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Normal numbers, a block again and again."""
    block = torch.randn(min(x.numel(), 1 << 20)).mul_(scale).to(x.dtype)
    for part in x.split(block.numel()):
        part.copy_(block[: part.numel()])
    return x


def stream(name: str, elements: int, *arrays: torch.Tensor) -> None:
    """Read and write every byte of some arrays, by the update's threads."""
    native = cpu_adam.kernel().native
    assert native is not None, "the benchmark needs compiled kernels"
    rows = np.array([[elements, 0, 0, *(x.data_ptr() for x in arrays)]], np.int64)
    operation = native.OPERATIONS.index(name)
    native.run(0, operation, 0, rows, np.zeros((1, native.FACTORS), np.float32))


class Job:
    """The tensors of one update of `elements` in the `exact` format, and of torch's equal."""

    def __init__(self, elements: int) -> None:
        self.gradient = fill(memory(elements, torch.bfloat16), 1e-2)
        self.weight = fill(memory(elements, torch.bfloat16), 1.0)
        self.slots = {"residue": memory(elements, torch.int16)}
        self.slots["exp_avg"] = fill(memory(elements, torch.float32), 1e-3)
        self.slots["exp_avg_sq"] = fill(memory(elements, torch.float32), 1e-4).abs_()
        self.words = memory(elements * 14 // 4, torch.int32)
        self.master = torch.nn.Parameter(fill(memory(elements, torch.float32), 1.0))
        self.master.grad = memory(elements, torch.float32)
        self.served = memory(elements, torch.bfloat16)
        self.optimizer = torch.optim.AdamW([self.master], fused=True)

    def stream_in_one(self) -> None:
        """The bytes of the update, in one array: all read and written."""
        stream("stream", self.weight.numel() * BYTES_PER_ELEMENT // 8, self.words)

    def stream_in_five(self) -> None:
        """The bytes of the update in five arrays like its own."""
        elements, words = self.weight.numel(), self.words
        sizes = (elements // 2, elements // 2, elements // 2, elements, elements)
        ends = torch.tensor(sizes).cumsum(0).tolist()
        arrays = [words[end - size : end] for end, size in zip(ends, sizes)]
        stream("stream_exact", elements, *arrays)

    def ours(self, kernel: str) -> None:
        with choice.forced(kernel):
            update(self.weight, self.gradient, self.slots, HYPER, step=10, format=EXACT)

    def of_torch(self) -> None:
        assert self.master.grad is not None
        self.master.grad.copy_(self.gradient)
        self.optimizer.step()
        self.served.copy_(self.master.detach())

    def many(self, tensors: int, elements: int) -> UpdateTable:
        """A table of small spans, at the start of the memory."""
        cuts = [slice(k * elements, (k + 1) * elements) for k in range(tensors)]
        return UpdateTable([self.part(cut) for cut in cuts], EXACT)

    def part(self, cut: slice) -> Span:
        slots = {name: slot[cut] for name, slot in self.slots.items()}
        return Span(self.weight[cut], self.gradient[cut], slots)


def in_turns(jobs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every job in every round; a first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for count in range(rounds + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            took = time.perf_counter() - start
            if count:
                found[name].append(took)
    return found


def ratio(slow: list[float], fast: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(slow, fast))


def whole_job(job: Job, threads: int, rounds: int, console: Console) -> None:
    elements = job.weight.numel()
    cpu_adam.set_threads(threads)
    torch.set_num_threads(threads)
    kernels = [name for name in choice.available() if name != "python"]
    jobs: dict[str, Callable[[], None]] = {
        "stream, 1 array": job.stream_in_one,
        "stream, 5 arrays": job.stream_in_five,
    }
    jobs.update({name: partial(job.ours, name) for name in kernels})
    jobs["torch fused"] = job.of_torch
    times = in_turns(jobs, rounds)
    fastest = min(list(times)[:2], key=lambda name: statistics.median(times[name]))
    table = Table(title=f"{elements / 2**20:.0f} Mi elements, {threads} threads")
    for head in ("", "M/s", "GB/s", "of the stream", "of torch", f"of {kernels[0]}"):
        table.add_column(head, justify="right" if head else "left")
    for name, took in times.items():
        rate = elements / statistics.median(took)
        ratios = (ratio(times[other], took) for other in (fastest, "torch fused", kernels[0]))
        figures = (rate / 1e6, rate * BYTES_PER_ELEMENT / 1e9)
        table.add_row(name, *(f"{x:.1f}" for x in figures), *(f"{x:.3f}" for x in ratios))
    console.print(table)


def small_tensors(job: Job, threads: int, rounds: int, console: Console) -> None:
    """1000 tensors of 4096 elements in one call, against one of as many elements."""
    tensors, elements = 1000, 4096
    cpu_adam.set_threads(threads)
    many, one = job.many(tensors, elements), job.many(1, tensors * elements)
    jobs = {"many": partial(many.update, [(HYPER, 10)]), "one": partial(one.update, [(HYPER, 10)])}
    times = in_turns(jobs, 10 * rounds)
    extra = statistics.median(a - b for a, b in zip(times["many"], times["one"])) / tensors
    console.print(
        f"{tensors} tensors of {elements}, {threads} threads: "
        f"{statistics.median(times['many']) * 1e3:.2f} ms in one call, {extra * 1e6:.2f} us per "
        f"tensor more than one tensor of as many elements"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", default="64Mi")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    elements = int(asked.elements[:-2]) * UNITS[asked.elements[-2:]]
    job, console = Job(elements), Console()
    for threads in asked.threads:
        whole_job(job, threads, asked.rounds, console)
        small_tensors(job, threads, asked.rounds, console)


if __name__ == "__main__":
    main()
