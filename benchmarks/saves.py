"""What saving and loading a model takes beside fio, torch, safetensors and DCP: speed and memory.

    python -m benchmarks.saves DIRECTORY [--rounds 3] [--tiers cpu cpu nvme] [--tiny]

A GPT of 500 M parameters trains in a process of its own, in a budget of 1 GiB of CPU memory, and is
saved and loaded in turn with what the others do with as many bytes. All are flushed to the drive
when they count as saved, and read from the drive and not from the page cache. The others have all
of it in memory; ours has it where `--tiers` says. On nvme the drive carries each byte twice, as for
fio both ways: a save reads what it writes, a load writes what it reads. A figure is the median over
the rounds, with the least and the most.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import offload
from benchmarks.loops import SAMPLE_S, Loop, memory_bytes

GPT = {"width": 1536, "depth": 16, "words": 24576, "length": 256, "batch": 2}
TINY_GPT = {"width": 64, "depth": 2, "words": 512, "length": 16, "batch": 2}

BLOCK_BYTES = 4 << 20

Calls = tuple[Callable[[], object], Callable[[], object]]
"""How one saves, and how it loads."""


def flushed(path: Path) -> list[Path]:
    """The files there, all of whose bytes are on the drive and not in the page cache."""
    files = [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]
    for one in files:
        fd = os.open(one, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return files


def seconds(call: Callable[[], object], path: Path) -> float:
    """What a call takes until its files are on the drive."""
    start = time.perf_counter()
    told = call()
    flushed(path)
    return told if isinstance(told, float) else time.perf_counter() - start


def fio(size: int, ways: Mapping[Path, str]) -> float:
    """Write or read so many bytes of each file from start to end, all files at once, past the page
    cache; the seconds that fio says it took."""
    whole = -(-size // BLOCK_BYTES) * BLOCK_BYTES
    command = ["fio", f"--bs={BLOCK_BYTES}", f"--size={whole}", "--iodepth=8", "--direct=1"]
    command += ["--ioengine=io_uring", "--end_fsync=1", "--output-format=json"]
    for path, way in ways.items():
        command += [f"--name={path.name}", f"--filename={path}", f"--rw={way}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return max(float(job[way]["runtime"]) for job, way in zip(jobs, ways.values())) / 1e3


def fio_new(size: int, path: Path, also: Mapping[Path, str]) -> float:
    """Write a new file, as the others do."""
    path.unlink(missing_ok=True)
    return fio(size, {path: "write", **also})


@contextmanager
def watched() -> Iterator[list[int]]:
    """The memory of this process, looked at while it goes on."""
    found, over = [memory_bytes(os.getpid())], threading.Event()

    def look() -> None:
        while not over.wait(SAMPLE_S):
            found.append(memory_bytes(os.getpid()))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiers", nargs=3, default=["nvme", "nvme", "nvme"])
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=asked.directory))
    try:
        measure(asked, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def measure(asked: Any, root: Path) -> None:
    """All rounds, and then memory."""
    shape = TINY_GPT if asked.tiny else GPT
    config = {"micro_batches": 1, "cpu_memory": "1GiB", "device_memory": "1GiB"}
    spec = {"system": "ours", "model": shape, "tiers": asked.tiers, "config": config}
    with watched() as training:
        loop = Loop({**spec, "directory": str(root)})
        loop.turn(unseen=1, steps=1)
    model, optimizer, ours = loop.model, loop.optimizer, root / "ours"
    with watched() as saving:
        offload.save(model, optimizer, ours)
    with watched() as loading:
        offload.load(model, optimizer, ours)
    size = sum(one.stat().st_size for one in flushed(ours))
    peaks = [max(one) / 2**20 for one in (training, saving, loading)]
    print("peak in training {:.0f} MiB, saving {:.0f}, loading {:.0f}".format(*peaks))
    state = {f"{n}": torch.randn(1 << 22) for n in range(max(1, size >> 24))}
    print(f"{size / 1e9:.2f} GB")
    paths = {name: root / name for name in ("ours", "fio", "torch", "safetensors", "dcp")}
    paths["fio, both ways"], tiers = root / "fio", root / "tiers"
    fio(size, {tiers: "write"})
    calls: dict[str, Calls] = {
        "ours": (
            partial(offload.save, model, optimizer, ours),
            partial(offload.load, model, optimizer, ours),
        ),
        "fio": (
            partial(fio_new, size, paths["fio"], {}),
            partial(fio, size, {paths["fio"]: "read"}),
        ),
        "fio, both ways": (
            partial(fio_new, size, paths["fio"], {tiers: "read"}),
            partial(fio, size, {paths["fio"]: "read", tiers: "write"}),
        ),
        "torch": (partial(torch.save, state, paths["torch"]), partial(torch.load, paths["torch"])),
        "safetensors": (
            partial(save_file, state, paths["safetensors"]),
            partial(load_file, paths["safetensors"]),
        ),
        "dcp": (
            partial(dcp.save, state, checkpoint_id=paths["dcp"], no_dist=True),
            partial(dcp.load, state, checkpoint_id=paths["dcp"], no_dist=True),
        ),
    }
    found = {(name, way): list[float]() for name in calls for way in (0, 1)}
    for number in range(asked.rounds + 1):
        for name in Random(number).sample([*calls], len(calls)):
            for way in (0, 1):
                took = seconds(calls[name][way], paths[name])
                if number:
                    found[name, way].append(took)
    for way, verb in enumerate(("save", "load")):
        for name in calls:
            values = sorted(size / took / 1e9 for took in found[name, way])
            shares = (
                f"{median(a / b for a, b in zip(found[of, way], found[name, way])):.2f} of {of}"
                for of in ("fio", "fio, both ways")
            )
            spread = f"({values[0]:.2f} to {values[-1]:.2f})"
            print(f"{verb} {name:14} {median(values):.2f} GB/s {spread}", *shares, sep=", ")
    loop.close()


if __name__ == "__main__":
    main()
