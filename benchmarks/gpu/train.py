"""Training runs on a GPU: one attach, then a line of figures for each point, as it comes.

    PYTHONPATH=. python benchmarks/gpu/train.py --size 3b --placement cpu-cpu-cpu --points 16k 4k

The placement is that of weights, gradients and states. `torch-bf16` is the same model in plain
PyTorch, all of it on the device, with its fused AdamW on bfloat16 weights and moments, `torch-fp32`
with masters and moments in fp32 as the engine has them, `torch-compiled` is `torch-bf16` with
compiled blocks. `deepspeed-2` has the states in CPU memory as DeepSpeed does it, `deepspeed-3` the
weights too; `fsdp2` is `fully_shard` with CPUOffloadPolicy, masters in fp32. Tokens are random
bytes without padding, weights random numbers: of zeros, products run up to 13% faster. A point is
the number of tokens of a step; 16kx4 has them in four micro-batches; 16k-unsaid does not say which
backward is the last, so updates begin at step(). With `--ranks` weights are gathered and gradients
exchanged over NCCL, though with no other rank: what that costs, and whether it overlaps.

`ops` are those of all lanes of a step, `host_us` the engine's own microseconds in the user's thread
per unit and step (`offload.cli.breakdown`), `*_gb_s` bytes over busy seconds of a lane.
`busy` and `gaps` are of two more steps, under the profiler: see `gaps.py`.

TFLOPS are those of the model alone: of a token, six for each weight of a matrix that multiplies
it, and 6 * depth * width * length for causal attention; nothing for recomputing. Exposed is the
time for which the user's thread waited for lanes, by `engine.report()`; the device may have had
work queued meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from resource import RUSAGE_SELF, getrusage
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import offload
from benchmarks.gpu.gaps import watched
from benchmarks.gpu.results import accelerator, keep, synchronize
from benchmarks.loops import ALONE
from offload import attachment, recording, reporting
from offload.cli import gpt
from offload.cli.breakdown import breakdown
from offload.planning import planner
from offload.planning.machine import probe
from offload.planning.tiers import parse_bytes
from offload.runtime.device import compute_device

SHAPES = {**gpt.SIZES, "dry": gpt.Shape(width=64, depth=2)}
OPTIMIZER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
CLIP = 1.0
LENGTH, DRY_LENGTH, DRY_LESS = 1024, 8, 512
"""Tokens of a sequence, and by how much fewer of them a dry point has."""

WARMUP, STEPS, PROFILED = 2, 8, 2
CHUNKS = planner.CHUNK_ELEMENTS, planner.LARGE_CHUNK_ELEMENTS
HOST_SHARE = 0.85
"""Of the host's memory, for the cpu tier: the machine is ours alone."""


class Point(NamedTuple):
    """What a step is."""

    name: str
    tokens: int
    micro: int
    said: bool


def point(name: str) -> Point:
    found = re.fullmatch(r"(\d+)k(?:x(\d+))?(-unsaid)?", name)
    if found is None:
        raise argparse.ArgumentTypeError(f"{name!r}: expected such as 16k, 16kx4 or 16k-unsaid")
    return Point(name, int(found[1]) * 1024, int(found[2] or 1), not found[3])


def asked(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="dry")
    parser.add_argument("--placement", default="cpu-cpu-cpu", help="torch-..., auto, or tiers")
    parser.add_argument("--points", nargs="+", type=point, default=[point("16k")])
    parser.add_argument("--name", default=None, help="before that of the point: size, placement")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--ranks", action="store_true", help="with all that several ranks take")
    parser.add_argument("--chunk", type=int, default=None, help="elements of a chunk")
    parser.add_argument("--device-memory", default=None)
    parser.add_argument("--memory", default=os.environ.get("GPU_MEMORY") or None, help="the host's")
    parser.add_argument("--nvme-path", default=None)
    parser.add_argument("--seconds", type=float, default=1e9, help="fewer steps where these end")
    parser.add_argument("--dry", action="store_true", help="the smallest size, few tokens")
    return parser.parse_args(given)


def built(shape: gpt.Shape, recompute: bool) -> nn.Module:
    with torch.device("meta"):
        return gpt.GPT(shape, recompute).to(torch.bfloat16)


def flops(shape: gpt.Shape, length: int) -> int:
    """Of a token, forward and backward."""
    block = 4 * shape.width**2 + 3 * shape.width * shape.hidden
    matrices = shape.depth * block + gpt.VOCABULARY * shape.width
    return 6 * matrices + 6 * shape.depth * shape.width * length


def fill(module: nn.Module) -> None:
    """Random values for a module's own parameters, as fast as memory: the same ones repeated."""
    for one in module.parameters(recurse=False):
        value = one.to_local() if isinstance(one, DTensor) else one
        with torch.no_grad():
            if value.ndim < 2:
                value.fill_(1.0)
                continue
            flat = value.view(-1)
            some = torch.randn(min(1 << 20, flat.numel()), dtype=value.dtype, device=value.device)
            some *= value.shape[1] ** -0.5
            for start in range(0, flat.numel(), some.numel()):
                into = flat[start : start + some.numel()]
                into.copy_(some[: into.numel()])


class Masters:
    """AdamW on masters and moments in fp32, for weights in bfloat16; fp32 gradients by block."""

    def __init__(self, model: nn.Module, fused: bool):
        owners = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
        self.groups = []
        for owner in owners:
            weights = list(owner.parameters(recurse=False))
            masters = [weight.detach().float() for weight in weights]
            adam = torch.optim.AdamW(masters, fused=fused, **OPTIMIZER)
            self.groups.append((adam, weights, masters))
        self.zero_grad = model.zero_grad

    @torch.no_grad()
    def step(self) -> None:
        for adam, weights, masters in self.groups:
            for weight, master in zip(weights, masters):
                master.grad = None if weight.grad is None else weight.grad.float()
            adam.step()
            adam.zero_grad()
            for weight, master in zip(weights, masters):
                weight.copy_(master)


def resident(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    """The same model in plain PyTorch."""
    model = built(SHAPES[args.size], recompute=True)
    model.to_empty(device=accelerator())
    model.apply(fill)
    fused = accelerator().type == "cuda"
    if args.placement == "torch-compiled":
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(backend="inductor" if fused else "eager")  # type: ignore[operator]
    if args.placement == "torch-fp32":
        return model, Masters(model, fused)
    return model, torch.optim.AdamW(model.parameters(), fused=fused, **OPTIMIZER)


def peer(args: argparse.Namespace) -> tuple[Any, Any]:
    """The same model under DeepSpeed, whose engine is both model and optimizer."""
    import deepspeed

    model = built(SHAPES[args.size], recompute=True).to_empty(device="cpu")
    model.apply(fill)
    cpu = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {"stage": int(args.placement[-1]), "offload_optimizer": cpu}
    zero |= {"overlap_comm": True, "contiguous_gradients": True}
    zero |= {"offload_param": cpu} if zero["stage"] == 3 else {}
    asked = {
        "train_micro_batch_size_per_gpu": args.points[0].tokens // LENGTH,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP if args.clip else 0.0,
        "optimizer": {"type": "AdamW", "params": OPTIMIZER},
        "zero_optimization": zero,
    }
    os.environ |= {**ALONE, "DS_ACCELERATOR": accelerator().type}
    trained = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=asked)[
        0
    ]
    return trained, trained


def sharded(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    """The same model under FSDP2, whose sharded weights, gradients and states are on the CPU."""
    model = built(SHAPES[args.size], recompute=True).float()
    initialize_group()
    pinned = torch.cuda.is_available()
    policy: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=pinned)}
    policy |= {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    policy |= {"mesh": init_device_mesh(accelerator().type, (1,))}
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    model.to_empty(device="cpu").apply(fill)
    return model, torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)


def initialize_group() -> None:
    """A process group of this process alone, where there is none."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def alone(_: object, device: Any, config: offload.Config) -> Any:
    """This process as the one rank of a group, which the engine takes for one of several."""
    from offload.parallel.group import Group

    initialize_group()
    return Group(None, device, config.comm_timeout)


def attached(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    """The model as the engine has it; `--memory` counts in place of what is free now."""
    tiers: Any = ("auto",) * 3 if args.placement == "auto" else args.placement.split("-")
    chunks = (args.chunk,) * 2 if args.chunk else CHUNKS
    planner.CHUNK_ELEMENTS, planner.LARGE_CHUNK_ELEMENTS = chunks
    model = built(SHAPES[args.size], recompute=True)
    paths = (args.nvme_path,) if args.nvme_path and "nvme" in tiers else ()
    machine = probe(paths, device_free_bytes=compute_device().free_bytes())
    if args.memory:
        here = "cpu_bytes", *["device_bytes"] * machine.device_is_cpu
        machine = replace(machine, **dict.fromkeys(here, parse_bytes(args.memory)))
    config = offload.Config(
        params=tiers[0],
        gradients=tiers[1],
        optimizer=tiers[2],
        nvme_path=paths,
        device_memory=args.device_memory,
        cpu_memory=int(machine.cpu_bytes * HOST_SHARE),
        max_grad_norm=CLIP if args.clip else None,
    )
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    group_of = alone if args.ranks else attachment._group_of
    with patch.object(attachment, "_group_of", group_of):
        return offload.attach(model, optimizer, config, initialize=fill, machine=machine)


PEERS = {"torch": resident, "deepspeed": peer, "fsdp2": sharded}


class Training:
    """A model, and what is measured of its steps."""

    def __init__(self, args: argparse.Namespace):
        """Attach it. Raises what a refusal raises."""
        self.args, self.begun = args, time.perf_counter()
        torch.manual_seed(0)
        made = PEERS.get(args.placement.split("-")[0], attached)
        self.model, self.optimizer = made(args)
        self.backward = self.model.backward if made is peer else torch.Tensor.backward
        synchronize()
        self.engine: Any = None if made is not attached else self.optimizer.engine
        self.attach_s = time.perf_counter() - self.begun

    def left(self) -> float:
        return float(self.args.seconds) - (time.perf_counter() - self.begun)

    def size(self, one: Point) -> tuple[int, int]:
        """Tokens of a step, and of a sequence."""
        dry: bool = self.args.dry
        return (one.tokens // DRY_LESS, DRY_LENGTH) if dry else (one.tokens, LENGTH)

    def step(self, one: Point) -> None:
        tokens, length = self.size(one)
        shape = tokens // one.micro // length, length + 1
        for index in range(one.micro):
            if self.engine is not None and one.said and index == one.micro - 1:
                self.engine.last_micro_batch()
            data = torch.randint(256, shape, device=accelerator())
            logits = self.model(data[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), data[:, 1:].flatten())
            self.backward(loss / one.micro)
        if self.args.clip and self.args.placement.startswith(("torch", "fsdp2")):
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> None:
        if self.engine is not None:
            self.engine.settle()
        synchronize()

    def steps(self, one: Point, count: int) -> float:
        """So many, to their end. Seconds of each."""
        since = time.perf_counter()
        for _ in range(count):
            self.step(one)
        self.settle()
        return (time.perf_counter() - since) / count

    def timed(self, one: Point) -> dict[str, Any]:
        """As many steps as there is time for, one at least."""
        if accelerator().type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        each = self.steps(one, 1)  # The first takes the longest.
        if self.left() > (WARMUP + STEPS) * each:
            each = self.steps(one, WARMUP - 1)
        steps = max(1, min(STEPS, int(self.left() / each)))
        before = used(self.engine)
        step_s = self.steps(one, steps)
        lanes = {
            name: {what: (use[what] - before[name][what]) / steps for what in use}
            for name, use in used(self.engine).items()
        }
        tokens, length = self.size(one)
        found: dict[str, Any] = {"attach_s": self.attach_s, "steps": steps, "step_s": step_s}
        found["tokens_per_s"] = tokens / step_s
        found["tflops"] = tokens / step_s * flops(SHAPES[self.args.size], length) / 1e12
        if lanes:
            found["exposed_s"] = sum(use["exposed_s"] for use in lanes.values())
            found["ops"] = sum(use["operations"] for use in lanes.values())
        for name in ("h2d", "d2h", "cpu", "disk"):
            if (use := lanes.get(name)) and use["busy_s"]:
                found[f"{name}_gb_s"] = use["bytes"] / use["busy_s"] / 1e9
        return {**found, **memory(self.engine), "lanes": lanes}

    def looked_at(self, one: Point, steps: int) -> dict[str, Any]:
        """What the engine reports of the last steps, and the device's busy time in two more."""
        found = dict[str, Any]()
        run = None if self.engine is None else recording.run_of(self.engine)
        if run is not None and len(run.stepped) > steps:
            with contextlib.suppress(ValueError):  # More ops than are kept.
                last = replace(run, since=max(run.since, run.stepped[-steps - 1][1]))
                own = breakdown(last).parts.get(reporting.ENGINE, 0.0)
                found["host_us"] = 1e6 * own / len(self.engine.plan.profile.units)
        return found | watched(lambda: self.steps(one, PROFILED))


def used(engine: Any) -> dict[str, dict[str, float]]:
    """What each lane has done so far; its `exposed_s` is that of the host."""
    if engine is None:
        return {}
    return {name: asdict(use) for name, use in engine.report().lanes.items()}


def memory(engine: Any) -> dict[str, Any]:
    """Peaks by tier, in GiB."""
    found: dict[str, Any] = {"rss_gib": getrusage(RUSAGE_SELF).ru_maxrss / 2**20}
    if accelerator().type == "cuda":
        found["device_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["device_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    if engine is not None:
        for use in engine.report().tiers:
            taken = use.resident_bytes + use.staging_bytes
            found[f"{use.tier}_tier_gib"] = taken / 2**30
        arena = engine.runner.memory.arenas["cpu"]
        found["pinned_gib"] = arena.pinned_bytes / 2**30
        found["misses"] = engine.report().misses
        found["notices"] = list(engine.notices)
    return found


REFUSALS = (offload.BudgetError, MemoryError, torch.OutOfMemoryError, OSError)


def run(given: Sequence[str] | None = None) -> None:
    """Keep a line for each point, twice: when it is timed, and when it is looked at."""
    args, training = asked(given), None
    chunk = {"chunk": args.chunk} if args.chunk else {}
    for one in args.points:
        row: dict[str, Any] = {
            "row": f"{args.name or f'{args.size} {args.placement}'} {one.name}",
            **{"size": (args.name or args.size).split()[0], "placement": args.placement},
            **{"point": one.name, "tokens": one.tokens, **chunk},
        }
        if training is not None and training.left() < 0:
            print(f"no time left for {row['row']}")
            break
        try:
            training = training or Training(args)
            keep("train", row := row | training.timed(one))
            print(row["row"], f"{row['step_s']:.3f} s a step", flush=True)
            keep("train", row | training.looked_at(one, row["steps"]))
        except REFUSALS as error:
            row["refused"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            keep("train", row)
            print(row["row"], row["refused"], flush=True)
    if training is not None and training.engine is not None and args.dry:
        training.engine.close()


if __name__ == "__main__":
    run()
    sys.stdout.flush()
    os._exit(0)  # All is kept: unpinning a hundred gigabytes takes a minute of the next run's.
