"""One training run on a GPU: step time, exposed time by lane, TFLOPS, peak memory. A JSON line.

    PYTHONPATH=. python benchmarks/gpu/train.py --size 1b --placement cpu-cpu-cpu

The placement is that of weights, gradients and states; `torch` is the same model in plain PyTorch
with AdamW, all of it on the device, without this engine. Tokens are random bytes without padding.

TFLOPS are those of the model alone: of a token, six for each weight of a matrix that multiplies
it, and 6 * depth * width * length for causal attention; nothing for recomputing. Exposed is the
time by which the device stood still while a step waited for a lane: events before and after each
wait of the host tell how long the device had nothing to do, and it is booked on the lanes as the
engine books the host's own wait: for a task of a lane, or for a copy that its own thread makes.
Where the host waits for the device's compute nothing stands still, and next to nothing is booked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import nn

import offload
from benchmarks.gpu.results import accelerator, synchronize
from offload.cli import gpt

SHAPES = {**gpt.SIZES, "dry": gpt.Shape(width=64, depth=2)}
OPTIMIZER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="dry")
    parser.add_argument("--placement", default="cpu-cpu-cpu", help="torch, auto, or tiers a-b-c")
    parser.add_argument("--device-memory", default=None)
    parser.add_argument("--cpu-memory", default=None)
    parser.add_argument("--nvme-path", default=None)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--no-recompute", action="store_true")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=None, help="fewer steps where these end")
    return parser.parse_args()


def built(shape: gpt.Shape, recompute: bool) -> nn.Module:
    with torch.device("meta"):
        return gpt.GPT(shape, recompute).to(torch.bfloat16)


def flops(shape: gpt.Shape, length: int) -> int:
    """Of a token, forward and backward."""
    block = 4 * shape.width**2 + 3 * shape.width * shape.hidden
    matrices = shape.depth * block + gpt.VOCABULARY * shape.width
    return 6 * matrices + 6 * shape.depth * shape.width * length


def moment() -> Any:
    """When the device is through with what is queued on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass
class Waits:
    """How long the device stood still in each lane's name."""

    timed: list[tuple[Any, Any, dict[str, float]]] = field(default_factory=list)

    @contextlib.contextmanager
    def watching(self, engine: Any) -> Iterator[None]:
        """Moments of the device around each wait of the host."""
        lanes = engine.executor.lanes
        block, waited = lanes._block, lanes.waited

        def exposed() -> dict[str, float]:
            return {lane.value: use.exposed_s for lane, use in lanes.stats.use.items()}

        @contextlib.contextmanager
        def timed() -> Iterator[None]:
            before, start = exposed(), moment()
            yield
            blamed = {name: now - before[name] for name, now in exposed().items()}
            if any(blamed.values()):
                self.timed.append((start, moment(), blamed))

        def timed_block(*args: Any) -> None:
            with timed():
                block(*args)

        @contextlib.contextmanager
        def timed_waited(lane: Any) -> Iterator[None]:
            with timed(), waited(lane):
                yield

        if accelerator().type == "cuda":
            lanes._block, lanes.waited = timed_block, timed_waited
        yield

    def by_lane(self) -> dict[str, float]:
        """Seconds, after the device is through."""
        found: dict[str, float] = {}
        for start, stop, blamed in self.timed:
            idle, total = start.elapsed_time(stop) / 1e3, sum(blamed.values())
            for name, seconds in blamed.items():
                found[name] = found.get(name, 0.0) + min(idle, total) * seconds / total
        self.timed.clear()
        return found


def resident(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    """The same model in plain PyTorch."""
    model = built(SHAPES[args.size], not args.no_recompute)
    model.to_empty(device=accelerator())
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            gpt.init(module)
    fused = accelerator().type == "cuda"
    return model, torch.optim.AdamW(model.parameters(), fused=fused, **OPTIMIZER)


def attached(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    tiers: Any = ("auto",) * 3 if args.placement == "auto" else args.placement.split("-")
    model = built(SHAPES[args.size], not args.no_recompute)
    config = offload.Config(
        params=tiers[0],
        gradients=tiers[1],
        optimizer=tiers[2],
        nvme_path=(args.nvme_path,) if args.nvme_path else (),
        device_memory=args.device_memory,
        cpu_memory=args.cpu_memory,
        micro_batches=args.micro_batches,
    )
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    return offload.attach(model, optimizer, config, initialize=gpt.init)


def step(args: argparse.Namespace, model: nn.Module, optimizer: Any) -> None:
    for _ in range(args.micro_batches):
        tokens = torch.randint(256, (args.batch, args.length + 1), device=accelerator())
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        (loss / args.micro_batches).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def measured(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    begun = time.perf_counter()
    model, optimizer = (resident if args.placement == "torch" else attached)(args)
    synchronize()
    engine, waits = getattr(optimizer, "engine", None), Waits()
    found: dict[str, Any] = {"attach_s": time.perf_counter() - begun}
    if accelerator().type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def settle() -> None:
        if engine is not None:
            engine.settle()
        synchronize()

    def fit(steps: int, each: float) -> int:
        """So many steps as there is time for, one at least."""
        if args.seconds is None:
            return steps
        return max(1, min(steps, int((args.seconds - (time.perf_counter() - begun)) / each)))

    since = time.perf_counter()
    step(args, model, optimizer)
    settle()
    each = time.perf_counter() - since  # The first takes the longest.
    for _ in range(min(args.warmup - 1, fit(args.warmup + args.steps, each) - 1)):
        since = time.perf_counter()
        step(args, model, optimizer)
        settle()
        each = time.perf_counter() - since
    found["steps"] = steps = fit(args.steps, each)
    with waits.watching(engine) if engine is not None else contextlib.nullcontext():
        before = used(engine)
        since = time.perf_counter()
        for _ in range(steps):
            step(args, model, optimizer)
        settle()
        found["step_s"] = (time.perf_counter() - since) / steps
        after = used(engine)
    idle = waits.by_lane()
    lanes: dict[str, dict[str, float]] = {}
    for name, use in after.items():
        lanes[name] = {what: (use[what] - before[name][what]) / steps for what in use}
        lanes[name]["device_exposed_s"] = idle.get(name, 0.0) / steps
    tokens = args.batch * args.length * args.micro_batches
    shape = SHAPES[args.size]
    found["tokens_per_s"] = tokens / found["step_s"]
    found["tflops"] = found["tokens_per_s"] * flops(shape, args.length) / 1e12
    for name, use in lanes.items():
        found[f"{name}_exposed_s"] = use["device_exposed_s"]
        found[f"{name}_busy_s"] = use["busy_s"]
    found["exposed_s"] = sum(use["device_exposed_s"] for use in lanes.values())
    return {**found, **memory(engine), "lanes": lanes}


def used(engine: Any) -> dict[str, dict[str, float]]:
    """What each lane has done so far; its `exposed_s` is that of the host."""
    if engine is None:
        return {}
    return {name: asdict(use) for name, use in engine.report().lanes.items()}


def memory(engine: Any) -> dict[str, Any]:
    """Peaks by tier, in GiB."""
    found: dict[str, Any] = {"rss_gib": peak_rss_bytes() / 2**30}
    if accelerator().type == "cuda":
        found["device_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["device_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    if engine is not None:
        for use in engine.report().tiers:
            taken = use.resident_bytes + use.staging_bytes
            found[f"{use.tier}_tier_gib"] = taken / 2**30
        arena = engine.executor.memory.arenas["cpu"]
        found["pinned_gib"] = arena.pinned_bytes / 2**30
        found["misses"] = engine.report().misses
        found["notices"] = list(engine.notices)
    return found


def peak_rss_bytes() -> int:
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


def main() -> None:
    args = asked()
    row: dict[str, Any] = {
        "size": args.size,
        "placement": args.placement,
        "device_memory": args.device_memory,
        "batch": args.batch * args.micro_batches,
        "length": args.length,
    }
    try:
        row |= measured(args)
    except (offload.BudgetError, MemoryError, torch.OutOfMemoryError) as error:
        row["refused"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    print(json.dumps(row))


if __name__ == "__main__":
    main()
