"""Training loops that take turns, each in a process of its own: torch's, ours and DeepSpeed's.

python -m benchmarks.loops SYSTEM      # what Process starts: a line of JSON in, an answer out
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SAMPLE_S, ENDS_S = 0.01, 60.0
"""How often a process's memory is looked at; how long it may take to end."""

ALONE = {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
ALONE |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
"""Environment of DeepSpeed without its launcher."""


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """A decoder with an untied head; its forward gives the loss of random tokens."""

    def __init__(self, width: int, depth: int, words: int, length: int, batch: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.batch = batch

    def forward(self) -> torch.Tensor:
        length, device = self.places.num_embeddings, self.norm.weight.device
        tokens = torch.randint(self.words.num_embeddings, (self.batch, length + 1), device=device)
        x = self.words(tokens[:, :-1]) + self.places(torch.arange(length, device=device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def deepspeed_engine(model: GPT, tier: str, directory: str) -> Any:
    """ZeRO-3 with the optimizer in a tier; on nvme as well as it could be tuned by hand."""
    import deepspeed

    offload: dict[str, Any] = {"device": tier}
    zero = {"stage": 3, "offload_optimizer": offload}
    if tier == "nvme":
        zero["sub_group_size"] = 20_000_000
        offload |= {"nvme_path": directory, "buffer_count": 12, "pin_memory": True}
        offload |= {"pipeline_read": True, "pipeline_write": True}
    asked = {
        "train_micro_batch_size_per_gpu": model.batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "overlap_events": True},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=asked)[0]


class Loop:
    """A model that trains. Of `spec`: `system` (torch's AdamW, "plain" or "unfused", "ours" or
    "DeepSpeed"), `model` (arguments of GPT or Chain), `tiers` (all three of ours, the states' of
    DeepSpeed), further fields of `config`, and a `directory` for files."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.manual_seed(0)
        shape, system, directory = spec["model"], spec["system"], spec["directory"]
        if "words" in shape:
            torch.set_default_dtype(torch.bfloat16)
            self.model: Any = GPT(**shape)
            torch.set_default_dtype(torch.float32)
        else:
            from benchmarks.hooks import Chain

            self.model = Chain(**shape)
            torch.set_num_threads(1)  # So little work is not shared.
        self.engine: Any = None
        if system == "DeepSpeed":
            self.model = made = deepspeed_engine(self.model, *spec["tiers"], directory)
            self.backward, self.step = made.backward, made.step
            return
        optimizer: Any = torch.optim.AdamW(self.model.parameters(), fused=system == "plain")
        if system == "ours":
            import offload

            tiers = dict(zip(("params", "gradients", "optimizer"), spec["tiers"]))
            config = offload.Config(**tiers, nvme_path=directory, **spec["config"])
            _, optimizer = offload.attach(self.model, optimizer, config)
            self.engine = optimizer.engine
        elif torch.accelerator.is_available():
            self.model.to(torch.accelerator.current_accelerator())
        self.optimizer = optimizer
        self.backward = torch.Tensor.backward
        self.step = lambda: (optimizer.step(), optimizer.zero_grad())

    def _now(self) -> float:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _disk(self) -> dict[str, float]:
        """What the disk lane has done once all updates are, in bytes and busy seconds."""
        if self.engine is None:
            return {"bytes": 0.0, "busy": 0.0}
        self.engine.settle()
        use = self.engine.report().lanes["disk"]
        return {"bytes": use.bytes, "busy": use.busy_s}

    def turn(self, unseen: int, steps: int) -> dict[str, float]:
        """Seconds of a step and of its forward and backward, and what the disk lane did in one:
        the mean of some steps after others, with as much of updates left to do before as after."""
        found, before = dict.fromkeys(("forward", "backward", "step"), 0.0), self._disk()
        for number in range(unseen + steps):
            marks = [self._now()]
            loss = self.model()
            marks.append(self._now())
            self.backward(loss)
            marks.append(self._now())
            self.step()
            marks.append(self._now())
            if number >= unseen:
                for name, start, stop in zip(found, (*marks[:2], marks[0]), marks[1:]):
                    found[name] += (stop - start) / steps
        done = self._disk()
        return found | {name: (done[name] - before[name]) / (unseen + steps) for name in done}

    def update(self) -> dict[str, float]:
        """The same of an update alone, gradients there: from `step()` until it is done."""
        self.backward(self.model())
        before, start = self._disk(), self._now()
        self.step()
        done = self._disk()
        return {"step": self._now() - start} | {name: done[name] - before[name] for name in done}

    def predicted(self) -> dict[str, float]:
        """Seconds of a step, those of the last turn, and what the simulator makes of the compute
        and the speeds of the lanes in them."""
        from offload.cli.breakdown import breakdown
        from offload.recording import run_of

        run = run_of(self.engine)
        if run.prediction is None:
            raise RuntimeError(f"no prediction: {run.unpredicted}")
        return {"step": breakdown(run).step_s, "predicted": run.prediction.step_seconds}

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


def memory_bytes(pid: int) -> int:
    """Memory that a process has of its own, without files."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) << 10


class Process:
    """A Loop in a process of its own; `watch` measures its memory. Raises RuntimeError where it
    ended early, with its last words."""

    def __init__(self, spec: dict[str, Any], python: str, *, watch: bool) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command, piped = [python, "-m", "benchmarks.loops", spec["system"]], subprocess.PIPE
        root = Path(__file__).parents[1]
        self._process = subprocess.Popen(
            command, stdin=piped, stdout=piped, stderr=self._errors, text=True, cwd=root
        )
        self.memory: list[int] = []
        """Samples of its own memory in bytes, less what its imports took."""
        self._ask("import")
        if watch:
            threading.Thread(target=self._watch, daemon=True).start()
        self._ask(spec)

    def _watch(self) -> None:
        with contextlib.suppress(OSError, KeyError):  # It has ended.
            before = memory_bytes(self._process.pid)
            while True:
                self.memory.append(memory_bytes(self._process.pid) - before)
                time.sleep(SAMPLE_S)

    def _ask(self, *what: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(what), file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            self._errors.seek(0)
            raise RuntimeError(self._errors.read().strip().rpartition("\n")[2])
        return json.loads(line)

    def turn(self, **given: int) -> dict[str, float]:
        return self._ask("turn", given)

    def update(self) -> dict[str, float]:
        return self._ask("update", {})

    def predicted(self) -> dict[str, float]:
        return self._ask("predicted", {})

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=ENDS_S)
        self._process.kill()
        self._errors.close()


def main() -> None:
    """Answer each line: imports, then the model, then turns."""
    lines, answers = map(json.loads, sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is no answer.
    next(lines)
    if sys.argv[1] == "DeepSpeed":
        os.environ.update(ALONE)
        import deepspeed  # noqa: F401
    elif sys.argv[1] == "ours":
        import offload  # noqa: F401
    print("null", file=answers, flush=True)
    loop = Loop(*next(lines))
    print("null", file=answers, flush=True)
    for call, given in lines:
        print(json.dumps(getattr(loop, call)(**given)), file=answers, flush=True)
    loop.close()


if __name__ == "__main__":
    main()
