"""The update on this machine, in elements a second: by size of a chunk, on the CPU by threads, and
on the device.

    PYTHONPATH=. python benchmarks/gpu/update.py [--dry]

Memory moved is what the update cannot do without: gradient, weight and record in, weight and record
out. Beside it, what a copy of as many bytes by as many of torch's threads reaches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import cpu_adam
from benchmarks.gpu.results import accelerator, keep, synchronize, table, used_columns
from cpu_adam import FORMATS, AdamHyper, Part, update_parts, views
from cpu_adam.choice import ptx
from offload.runtime.device import compute_device
from offload.runtime.memory import host_tensor
from offload.runtime.native import Native, native_runner

ROUNDS = 5
ELEMENTS = 1 << 27
CHUNKS = (1 << 20, 1 << 22, 1 << 24, ELEMENTS)
HYPER = AdamHyper(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decoupled=True)


def seconds(work: Callable[[], object]) -> float:
    """Median of rounds, the first of which does not count."""
    times = []
    for _ in range(ROUNDS + 1):
        synchronize()
        since = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - since)
    return statistics.median(times[1:])


def updates(
    name: str, elements: int, chunk: int, device: torch.device
) -> tuple[Callable[[], None], int]:
    """A step of all chunks of a model, and the bytes that it moves."""
    fmt = FORMATS[name]
    dtype: torch.dtype = getattr(torch, fmt.weight_dtype)
    weight = host_tensor(elements * dtype.itemsize).to(device).view(dtype)
    gradient = torch.ones_like(weight)
    size = fmt.record_bytes(chunk)
    records = host_tensor(size * (elements // chunk)).to(device)

    parts = []
    for index in range(elements // chunk):
        here = slice(index * chunk, (index + 1) * chunk)
        record = views(records[index * size : (index + 1) * size], fmt, chunk)
        parts.append((weight[here], gradient[here], record))

    def run() -> None:
        for one in parts:
            part = Part(0, chunk, 0, 0, is_last=True)
            update_parts(*one, [part], [(HYPER, 3)], format=fmt)

    moved = gradient.nbytes + 2 * (weight.nbytes + records.nbytes)
    return run if device.type == "cpu" else by_kernels(name, parts), moved


def by_kernels(name: str, parts: list[tuple[Any, Any, Any]]) -> Callable[[], None]:
    """The same as the lanes have it done on a device."""
    device, lanes = compute_device(), native_runner()
    driver = device.open(lanes)
    driver.load(ptx().decode())
    native = Native(driver=driver)
    settings, works = native.settings([(HYPER, 3)], None), list[Any]()
    for weight, gradient, record in parts:
        arrays = [gradient, weight, *(record[slot.name] for slot in FORMATS[name].slots)]
        row, dtype = [weight.numel(), 0, 0, *(x.data_ptr() for x in arrays)], str(weight.dtype)[6:]
        works.append(native._sweep(name, dtype, [row], [0] * len(arrays), there=True))

    def run() -> None:
        for work in works:
            native.perform(work, settings, device.handle(device.stream()))

    return run


def copied(size: int, device: torch.device, count: int) -> float:
    """Bytes a second that a copy reads and writes."""
    source, target = (host_tensor(size // 2).to(device) for _ in range(2))
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    took = seconds(lambda: target.copy_(source))
    torch.set_num_threads(before)
    return size / took


def row(where: str, name: str, chunk: int, count: int | None, elements: int) -> dict[str, Any]:
    device = torch.device("cpu") if where == "cpu" else accelerator()
    run, moved = updates(name, elements, chunk, device)
    took = seconds(run)
    return {
        "row": f"{where} {name} {chunk} {count or ''}".rstrip(),
        **{"where": where, "format": name, "chunk": chunk, "threads": count},
        "m_elements_s": elements / took / 1e6,
        "gb_s": moved / took / 1e9,
        "of_copy": moved / took / copied(moved, device, count or 1),
        "chunk_us": 1e6 * took * chunk / elements,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="with a few elements, for a try")
    dry, most = parser.parse_args().dry, cpu_adam.threads()
    chunks = [chunk >> 10 * dry for chunk in CHUNKS]
    fewer = sorted({1, max(1, most // 4), max(1, most // 2), max(1, most - 3)} - {most})
    wanted: list[tuple[str, str, int, int | None]] = []
    for name in ("exact", "compact"):
        wanted += [("cpu", name, chunk, most) for chunk in chunks]
        if accelerator().type != "cpu":
            wanted += [("device", name, chunk, None) for chunk in chunks[:3]]
    wanted += [("cpu", "exact", chunks[2], count) for count in fewer]
    rows = []
    for where, name, chunk, count in wanted:
        cpu_adam.set_threads(count)
        rows.append(row(where, name, chunk, count, chunks[-1]))
        keep("update", rows[-1])  # Now: the next one may take too long.
    cpu_adam.set_threads(None)
    print(table(rows, used_columns(rows)))


if __name__ == "__main__":
    main()
