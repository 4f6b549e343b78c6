"""Eight threads of Python that submit at once, against one: do they lower the sum?

    PYTHONPATH=. python benchmarks/nvme_threads.py DIRECTORY [--rounds 10] [--record FILE]

One backend, one file, as many bytes under way in both cases: one thread keeps eight transfers under
way, or eight threads keep one each, every transfer of so many blocks. The drive is asked for the
same in both cases: one stretch of the file after the other, or with --apart in eight streams, a
part of the file for each, in turn. Both take turns, each first in every second round; ratios of
speed and of processor seconds per byte, geometric means with 95% intervals. A ratio of 1 is what is
asked for. Nothing is left on disk. Ten rounds take half a minute; with `--record` a run adds its
figures to those in the file, and shows all of them together.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import mmap
import threading
import time
from collections import deque
from pathlib import Path

from rich.console import Console

from aio import File, Ticket, create_scratch, open_backend
from aio.backends import compared
from aio.ratio import Ratio

MIB = 1 << 20
THREADS = 8


class Turn:
    """One load: `threads` threads keep THREADS transfers under way, for about so many seconds."""

    def __init__(
        self,
        file: File,
        memory: memoryview,
        request: int,
        writing: bool,
        seconds: float,
        apart: bool,
    ) -> None:
        streams = THREADS if apart else 1
        stretch = file.bytes // streams // request * request
        self._offsets = (
            stream * stretch + at
            for at in itertools.cycle(range(0, stretch, request))
            for stream in range(streams)
        )
        self._lock = threading.Lock()  # of the offsets
        self._memory = memory
        self._request = request
        self._call = file.write_from if writing else file.read_into
        self._seconds = seconds
        self._moved = [0] * THREADS
        self._errors: list[OSError] = []

    def run(self, threads: int) -> tuple[float, float]:
        """Bytes per second, and processor seconds per byte."""
        each = THREADS // threads
        workers = [threading.Thread(target=self._work, args=(n, each)) for n in range(threads)]
        cpu, began = time.process_time(), time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if self._errors:
            raise self._errors[0]
        moved = sum(self._moved)
        return moved / (time.perf_counter() - began), (time.process_time() - cpu) / moved

    def _work(self, number: int, depth: int) -> None:
        """Some of the memory, `depth` transfers under way."""
        slots = range(number * depth, (number + 1) * depth)
        views = deque(self._memory[n * self._request : (n + 1) * self._request] for n in slots)
        under_way: deque[tuple[Ticket, memoryview]] = deque()
        end = time.perf_counter() + self._seconds
        try:
            while time.perf_counter() < end:
                if not views:
                    ticket, view = under_way.popleft()
                    ticket.wait()
                    views.append(view)
                view = views.popleft()
                with self._lock:
                    offset = next(self._offsets)
                under_way.append((self._call(view, offset), view))
                self._moved[number] += view.nbytes
        except OSError as error:
            self._errors.append(error)
        finally:
            for ticket, _ in under_way:
                with contextlib.suppress(OSError):
                    ticket.wait()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory")
    parser.add_argument("--backend", default=compared()[0][0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.6, help="of each turn")
    parser.add_argument("--size", type=int, default=2048, help="MiB of the file")
    parser.add_argument("--request", type=int, default=4, help="MiB of a transfer")
    parser.add_argument("--apart", action="store_true", help="eight streams of offsets")
    parser.add_argument("--record", type=Path, help="a file of figures, to be added to")
    return parser.parse_args()


def main() -> None:
    asked, console = arguments(), Console(highlight=False)
    request = asked.request * MIB
    ratios: dict[str, list[tuple[float, float]]] = {"read": [], "write": []}
    if asked.record is not None and asked.record.exists():
        ratios = json.loads(asked.record.read_text("utf-8"))
    with contextlib.ExitStack() as opened:
        backend = opened.enter_context(contextlib.closing(open_backend(asked.backend, depth=32)))
        file = opened.enter_context(create_scratch(asked.directory, asked.size * MIB, backend))
        memory = mmap.mmap(-1, THREADS * request, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(memory)
        for at in range(0, file.bytes, request):  # no first writes while it is timed
            file.write_from(view[: min(request, file.bytes - at)], at).wait()
        for number in range(asked.rounds):
            for writing in (False, True):
                found = {}
                for threads in (1, THREADS) if number % 2 else (THREADS, 1):
                    turn = Turn(file, view, request, writing, asked.seconds, asked.apart)
                    found[threads] = turn.run(threads)
                (speed, cost), (speed_of_one, cost_of_one) = found[THREADS], found[1]
                both = speed / speed_of_one, cost / cost_of_one
                ratios["write" if writing else "read"].append(both)
        direct = file.direct
    for mode, pairs in ratios.items():
        speeds, costs = (Ratio.of(values) for values in zip(*pairs))
        console.print(
            f"{mode}: {THREADS} threads in multiples of one: speed {speeds.mean:.3f} "
            f"({speeds.low:.2f}-{speeds.high:.2f}), processor seconds per byte {costs.mean:.2f} "
            f"({costs.low:.2f}-{costs.high:.2f}); {speeds.count} rounds, {asked.backend}, "
            f"O_DIRECT {direct}",
            soft_wrap=True,
        )
    if asked.record is not None:
        asked.record.write_text(json.dumps(ratios) + "\n", "utf-8")


if __name__ == "__main__":
    main()
