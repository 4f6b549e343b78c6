"""What a step costs over two ranks, beside FSDP2 and DeepSpeed: a table.

    python -m benchmarks.ranks [--rounds 7] [--steps 2] [--only NAME ...] [--deepspeed PYTHON]

A GPT of 101 M parameters in bfloat16 (width 768, 12 layers, vocabulary 10240, batch 1 x 256) is
trained by two ranks of one thread each over gloo, weights, gradients and states in CPU memory. In
each round all systems take their turns in random order, so that what else the machine does falls on
all alike; a first round is not counted. A turn is some steps after one that is not timed.

Ours and FSDP2 with cpu_adam have exact fp32 masters beside bfloat16 weights, 14 bytes a parameter
with the gradient; `FSDP2 masters` has fp32 weights that are cast for their use (16), `FSDP2` has
bfloat16 weights and moments, by torch's fused AdamW (8), which is less work. DeepSpeed is ZeRO-3.
All of them are there all the time, in 25 GiB of memory: with less, compare some by --only.

Columns: seconds a step, median, least and most over the rounds, of the slower rank; ours over the
peer's of the same round; seconds of CPU that a rank takes for a step, which other work on the
machine changes less; the memory of the larger rank in its steps, RssAnon and RssShmem less what the
imports took; megabytes that a rank sends in a step as the engine counts them and as RANKS.md says.

The paced row has collectives that take their bytes by 1 Gb/s, and is compared with the longest
lane: the link, compute (the step of one process without ranks), or the update.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.loops import GPT, SAMPLE_S, memory_bytes

SHAPE = {"width": 768, "depth": 12, "words": 10240, "length": 256, "batch": 1}
TINY_SHAPE = {"width": 64, "depth": 2, "words": 512, "length": 16, "batch": 1}
RANKS = 2
GIGABIT = 125e6
"""Bytes a second."""

MEMORY = {"device_memory": "1GiB", "cpu_memory": "4GiB", "exposed_memory": "256MiB"}
PLACES = {"params": "cpu", "gradients": "cpu", "optimizer": "cpu"}

ALONE = "ours alone"
SYSTEMS: dict[str, dict[str, Any]] = {
    "ours shard=3": {"shard": 3},
    "ours shard=2": {"shard": 2},
    "ours compact": {"shard": 3, "states": "compact"},
    "ours paced": {"shard": 3},
    ALONE: {},
    "FSDP2": {},
    "FSDP2 masters": {},
    "FSDP2 cpu_adam": {},
    "DeepSpeed": {},
}
PEERS = ("FSDP2", "FSDP2 masters", "FSDP2 cpu_adam", "DeepSpeed")


class Link:
    """A link by which collectives pass one after the other: each is over when gloo's is, and the
    time has passed that its bytes take."""

    def __init__(self, group: Any) -> None:
        self._group, self._free, self.busy = group, 0.0, 0.0
        for name in ("gather", "exchange"):
            setattr(group, name, partial(self._slowed, getattr(group, name)))

    def _slowed(self, call: Any, *args: Any) -> Any:
        before = self._group.sent_bytes
        works, takes = call(*args), (self._group.sent_bytes - before) / GIGABIT
        self.busy += takes
        self._free = max(self._free, time.perf_counter()) + takes
        until, over = self._free, torch.futures.Future[None]()

        def end() -> None:
            for one in works:
                one.wait()
            time.sleep(max(0.0, until - time.perf_counter()))
            over.set_result(None)

        threading.Thread(target=end, daemon=True).start()
        return [SimpleNamespace(is_completed=over.done, get_future=lambda: over, wait=over.wait)]


class Rank:
    """A model that trains with others, and what its steps take."""

    def __init__(self, system: str, shape: dict[str, int]) -> None:
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        self.model: Any = GPT(**shape)
        torch.set_default_dtype(torch.float32)
        self.engine: Any = None
        self.link: Any = None
        self.backward: Any = torch.Tensor.backward
        if system == "DeepSpeed":
            self._deepspeed(shape["batch"])
        elif system.startswith("FSDP2"):
            self._fsdp(system)
        else:
            self._ours(system)

    def _trains(self, optimizer: Any) -> None:
        self.step = lambda: (optimizer.step(), optimizer.zero_grad())

    def _ours(self, system: str) -> None:
        import offload

        optimizer = torch.optim.AdamW(self.model.parameters())
        config = offload.Config(**PLACES, **MEMORY, micro_batches=1, **SYSTEMS[system])
        _, optimizer = offload.attach(self.model, optimizer, config)
        self.engine = optimizer.engine
        if "paced" in system:
            self.link = Link(self.engine.ranks.group)
        self._trains(optimizer)

    def _fsdp(self, system: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
        options["mesh"] = init_device_mesh("cpu", (RANKS,))
        if system == "FSDP2 masters":
            self.model.float()
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in self.model.blocks:
            fully_shard(block, **options)
        fully_shard(self.model, **options)
        if system == "FSDP2 cpu_adam":
            from cpu_adam import CPUAdam

            self._trains(CPUAdam(self.model.parameters(), lr=1e-3))
        else:
            self._trains(torch.optim.AdamW(self.model.parameters(), fused=True))

    def _deepspeed(self, batch: int) -> None:
        import deepspeed

        zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
        asked = {
            "train_micro_batch_size_per_gpu": batch,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": zero | {"offload_param": {"device": "cpu"}},
        }
        self.model, *_ = deepspeed.initialize(
            model=self.model, model_parameters=self.model.parameters(), config=asked
        )
        self.backward, self.step = self.model.backward, self.model.step

    def predicted(self, compute_s: float) -> float:
        """Seconds of a step by the simulator, of which so many are the model's, over the link."""
        from offload.planning.machine import Machine
        from offload.program.compile import compile_program
        from offload.program.ops import Verb
        from offload.program.simulate import simulate

        units = self.engine.plan.profile.full
        sizes = [
            0 if "words" in one.name or "places" in one.name else one.weight_bytes for one in units
        ]

        def seconds(unit: int, verb: Verb) -> float:
            """Backward has twice the products of forward."""
            return compute_s * sizes[unit] / sum(sizes) * (1 if verb is Verb.FORWARD else 2) / 3

        machine = Machine(device_bytes=0, cpu_bytes=0, link_bytes_per_s=GIGABIT)
        program = compile_program(self.engine.plan)
        return simulate(program, machine, seconds, updates_in_backward=True).step_seconds

    def turn(self, unseen: int, steps: int) -> dict[str, float]:
        """The mean of some steps after others: seconds, those of CPU, and what was sent."""
        marks = []
        for times in (unseen, steps):
            for _ in range(times):
                self.backward(self.model())
                self.step()
            sent, update, engine = 0, 0.0, self.engine
            if engine is not None:
                engine.settle()
                update = engine.report().lanes["cpu"].busy_s
                sent = engine.ranks.group.sent_bytes if engine.ranks else 0
            if dist.is_initialized():
                dist.barrier()
            busy = self.link.busy if self.link else 0.0
            marks.append((time.perf_counter(), time.process_time(), sent, busy, update))
        names = "step", "cpu", "sent", "link", "update"
        return {n: (b - a) / steps for n, a, b in zip(names, *marks)}


class Ranks:
    """Processes that train together. Raises RuntimeError where one ended early."""

    def __init__(self, system: str, python: str, shape: dict[str, int], files: str) -> None:
        ranks = range(1 if system == ALONE else RANKS)
        self._errors = [tempfile.TemporaryFile("w+") for _ in ranks]  # noqa: SIM115
        store, root = f"{files}/{system.replace(' ', '-')}", Path(__file__).parents[1]
        port = str(29600 + [*SYSTEMS].index(system))
        environment = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment |= {"LOCAL_WORLD_SIZE": str(RANKS), "WORLD_SIZE": str(RANKS)}
        environment |= {"DS_ACCELERATOR": "cpu"}
        self._processes = [
            subprocess.Popen(
                [python, "-m", "benchmarks.ranks", "--system", system, "--store", store],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=root,
                env={**os.environ, **environment, "RANK": str(at), "LOCAL_RANK": str(at)},
            )
            for at, errors in enumerate(self._errors)
        ]
        self._ask("imports")
        self._before = [memory_bytes(one.pid) for one in self._processes]
        self._ask("make", system, shape)

    def _ask(self, *what: Any) -> list[Any]:
        for one in self._processes:
            assert one.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps(what), file=one.stdin, flush=True)
        answers = []
        for one, errors in zip(self._processes, self._errors):
            assert one.stdout is not None
            if not (line := one.stdout.readline()):
                errors.seek(0)
                said = errors.read().strip().splitlines()[-3:]
                raise RuntimeError(" ".join((f"ended with {one.wait()}:", *said)))
            answers.append(json.loads(line))
        return answers

    def predicted(self, compute_s: float) -> float:
        """See `Rank`."""
        return float(self._ask("predicted", compute_s)[0])

    def turn(self, unseen: int, steps: int) -> dict[str, float]:
        """The worst of the ranks."""
        found = self._ask("turn", unseen, steps)
        return {name: max(one[name] for one in found) for name in found[0]}

    def peak_bytes(self) -> int:
        """The most that a rank has of its own in two steps."""
        peaks, turn = [0], threading.Thread(target=self.turn, args=(0, 2))
        turn.start()
        while turn.is_alive():
            now = (memory_bytes(one.pid) - b for one, b in zip(self._processes, self._before))
            peaks.append(max(now))
            turn.join(SAMPLE_S)
        return max(peaks)

    def close(self) -> None:
        """End them."""
        for one, errors in zip(self._processes, self._errors):
            one.kill()
            one.communicate()
            errors.close()


def formula(shape: dict[str, int], system: str) -> float:
    """Megabytes that a rank sends in a step by RANKS.md, section 2, at A = 1: weights and gradients
    once, and with shard=3 again the weights that backward needs and no slot has: all blocks' but
    the last one's."""
    width, words = shape["width"], shape["words"]
    block = 12 * width * width + 13 * width
    every = shape["depth"] * block + (2 * words + shape["length"] + 2) * width
    again = (shape["depth"] - 1) * block if SYSTEMS[system]["shard"] == 3 else 0
    return (2 * every + again) * 2 * (RANKS - 1) / RANKS / 1e6


def serve(system: str, store: str) -> None:
    """Answer each line: imports, then the model, then turns."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is no answer.
    torch.set_num_threads(1)
    rank, one = int(os.environ["RANK"]), None
    for line in sys.stdin:
        call, *given = json.loads(line)
        found: Any = None
        if call == "imports":
            if system == "DeepSpeed":
                import deepspeed

                deepspeed.init_distributed(dist_backend="gloo")
            elif system != ALONE:
                dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
            if system.startswith("ours"):
                import offload  # noqa: F401
        elif call == "make":
            one = Rank(*given)
        else:
            found = getattr(one, call)(*given)
        print(json.dumps(found), file=answers, flush=True)


def shown(values: list[float]) -> str:
    """Median, least and most."""
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def row(name: str, found: dict[str, list[dict[str, float]]], made: Ranks, shape: Any) -> str:
    """What is told of a system."""
    turns = found[name]
    middle = {key: median(one[key] for one in turns) for key in turns[0]}
    told = [f"{shown([one['step'] for one in turns])} s, cpu {middle['cpu']:.3f} s"]
    told += [f"{made.peak_bytes() / 2**20:.0f} MiB"]
    if middle["sent"]:
        told += [f"sent {middle['sent'] / 1e6:.1f} MB of {formula(shape, name):.1f}"]
    if middle["link"]:
        lanes = {"link": middle["link"], "update": middle["update"]}
        if ALONE in found:
            lanes["compute"] = median(one["step"] for one in found[ALONE])
        told += [", ".join(f"{lane} {took:.3f} s" for lane, took in lanes.items())]
        longest = max(lanes.values())
        told += [shown([one["step"] / longest for one in turns]) + " of the longest"]
        if compute := lanes.get("compute"):
            told += [f"{made.predicted(compute) / middle['step']:.3f} of it predicted"]
    elif name.startswith("ours") and name != ALONE:
        for peer in (one for one in PEERS if one in found):
            ratio = median(a["step"] / b["step"] for a, b in zip(turns, found[peer]))
            told += [f"{ratio:.2f} of {peer}"]
    return f"{name:15} {'; '.join(told)}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[*SYSTEMS], choices=[*SYSTEMS])
    parser.add_argument("--deepspeed", default="", metavar="PYTHON")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--system", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.system:
        serve(asked.system, asked.store)
        return
    shape, made = TINY_SHAPE if asked.tiny else SHAPE, dict[str, Ranks]()
    with contextlib.ExitStack() as opened:
        files = opened.enter_context(tempfile.TemporaryDirectory())
        for name in asked.only:
            python = asked.deepspeed if name == "DeepSpeed" else sys.executable
            try:
                if not python:
                    raise RuntimeError("not installed: give --deepspeed PYTHON")
                made[name] = Ranks(name, python, shape, files)
                opened.callback(made[name].close)
            except RuntimeError as error:
                print(f"{name:15} {error}", flush=True)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in made}
        for number in range(1 + asked.rounds):
            for name in Random(number).sample([*made], len(made)):
                turn = made[name].turn(1, asked.steps)
                if number:
                    found[name].append(turn)
        print(f"{datetime.now():%Y-%m-%d %H:%M}, load {os.getloadavg()[0]:.1f}")
        for name, one in made.items():
            print(row(name, found, one, shape), flush=True)


if __name__ == "__main__":
    main()
