"""When the device had nothing to do, and what the host did meanwhile.

The profiler of torch (kineto) has when each kernel and copy ran, and torch's operations on the
host. Beside it a thread looks every millisecond which Python functions run, in the thread of the
user and in that of autograd, whose hooks are the engine's: the profiler could tell, too, but slows
down all Python. Both count nanoseconds of the system's clock.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from offload import reporting

GAPS = 10
SAMPLE_S = 1e-3
OURS = ("offload", "cpu_adam", "benchmarks", "__main__")

Interval = tuple[float, float]


def merged(found: Iterable[Interval]) -> list[Interval]:
    """The times that lie in at least one of some intervals, in order."""
    together: list[Interval] = []
    for start, stop in sorted(found):
        if together and start <= together[-1][1]:
            together[-1] = together[-1][0], max(stop, together[-1][1])
        else:
            together.append((start, stop))
    return together


def between(busy: Iterable[Interval], since: float, until: float) -> list[Interval]:
    """The times in which there was none of `busy`, the longest first."""
    edges = [since]
    for start, stop in merged(reporting.clip(busy, since, until)):
        edges += [start, stop]
    edges.append(until)
    gaps = [(a, b) for a, b in zip(edges[::2], edges[1::2]) if b > a]
    return sorted(gaps, key=lambda gap: gap[0] - gap[1])


def told(frame: Any) -> str:
    """A frame's function, and the one of ours that led to it."""
    names = []
    while frame is not None and len(names) < 2:
        mine = frame.f_globals.get("__name__", "").split(".")[0] in OURS
        if mine or not names:
            names.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(names)


class Sampler:
    """What Python ran: samples of (nanoseconds, function of the thread that drives the device)."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, str]] = []
        self._user, self._over = threading.get_ident(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(SAMPLE_S):
            frames: dict[int, Any] = sys._current_frames()
            mine = frames.pop(self._user, None)
            frames.pop(self._thread.ident, None)
            hooks = list(frames.values())
            # While the user waits for a backward, what autograd's threads run is what counts.
            backward = mine is not None and mine.f_code.co_name == "_engine_run_backward"
            frame = hooks[0] if backward and hooks else mine
            self.samples.append((time.time_ns(), told(frame)))

    def during(self, since: float, until: float) -> str:
        """What was seen most often, or last before."""
        first = bisect_left(self.samples, (since, ""))
        last = bisect_left(self.samples, (until, ""))
        seen = [what for _, what in self.samples[first:last] or self.samples[:first][-1:]]
        return Counter(seen).most_common(1)[0][0] if seen else ""


def watched(work: Callable[[], object]) -> dict[str, Any]:
    """Shares of the time of `work` in which the device was busy, and its longest gaps.

    `kernel_busy` is without copies, and the gaps are times without a kernel. On a CPU operations
    of torch stand for kernels.
    """
    kinds = [ProfilerActivity.CPU]
    if on_device := torch.cuda.is_available():
        kinds.append(ProfilerActivity.CUDA)
    with Sampler() as sampler, profile(activities=kinds) as profiled:
        since = time.time_ns()
        work()
        until = time.time_ns()
    kernels, copies = list[Interval](), list[tuple[int, int, str]]()
    ops = list[tuple[int, int, str]]()
    kineto: Any = profiled.profiler
    for event in kineto.kineto_results.events():
        name, start = event.name(), event.start_ns()
        span = start, start + event.duration_ns()
        here = event.device_type() != DeviceType.CPU
        if not here:
            ops.append((*span, name))
        if event.is_user_annotation() or here != on_device:
            continue
        if here and name.startswith("Mem"):  # Memcpy and Memset.
            copies.append((*span, name))
        elif here or name.startswith("aten::"):
            kernels.append(span)
    total = until - since

    def share(some: Iterable[Interval]) -> float:
        return reporting.seconds(reporting.clip(some, since, until)) / total

    gaps = []
    for start, stop in between(kernels, since, until)[:GAPS]:
        middle = (start + stop) / 2
        inside = [one for one in ops if one[0] <= middle <= one[1]]
        moving = {name.split(" (")[0] for a, b, name in copies if a < stop and b > start}
        gaps.append(
            {
                "ms": (stop - start) / 1e6,
                "at_ms": (start - since) / 1e6,
                "host": sampler.during(start, stop),
                "op": max(inside)[2] if inside else "",
                "copies": ", ".join(sorted(moving)),
            }
        )
    everything = [*kernels, *((a, b) for a, b, _ in copies)]
    return {
        "busy": share(everything),
        "kernel_busy": share(kernels),
        "profiled_s": total / 1e9,
        "gaps": gaps,
    }
