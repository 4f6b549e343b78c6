"""Several ranks in processes of this machine, over gloo, which do one job after the other."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
import types
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offload
from cpu_adam import crc32c
from offload.parallel import local
from offload.parallel.flat_shard import FlatShard

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.ranks"])  # Torch, too, whose import takes seconds.
PATIENCE_S = 60


class World:
    """So many ranks. A job is the name of a function of a module, by default `tests.ranks_jobs`, or
    its name after that of another module."""

    def __init__(
        self,
        ranks: int,
        directory: Path,
        jobs: str = "tests.ranks_jobs",
        other: tuple[str, str] | None = None,
        backend: str = "gloo",
    ):
        """With `other`, a module and a source, its classes have the functions of that source; over
        another backend than gloo each rank has a device of its own."""
        self.ranks, self._directory, self._how = ranks, directory, (jobs, other, backend)
        self._pipes: list[Any] = []
        self.processes: list[Any] = []

    def _start(self) -> None:
        store = str(self._directory / f"store-{time.monotonic_ns()}")
        for rank in range(self.ranks):
            mine, other = CONTEXT.Pipe()
            args = rank, self.ranks, store, other, *self._how
            one = CONTEXT.Process(target=serve, args=args, daemon=True)
            one.start()
            other.close()
            self._pipes.append(mine)
            self.processes.append(one)

    def begin(self, job: str, *args: Any, **options: Any) -> None:
        """Let all ranks do a job; they are started where none are."""
        if not self.processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((job, args, options))

    def results(self, patience_s: float = PATIENCE_S, of: int | None = None) -> list[Any]:
        """What each rank returns, or the first so many: an exception that it raised, None of one
        that is gone."""
        until, found = time.monotonic() + patience_s, []
        for rank, pipe in enumerate(self._pipes[:of]):
            if not pipe.poll(max(0.0, until - time.monotonic())):
                for one in self.processes:
                    os.kill(one.pid, signal.SIGUSR1)  # They tell where they are.
                time.sleep(1)
                self.close()
                raise TimeoutError(f"rank {rank} of {self.ranks} did not come back")
            try:
                found.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                found.append(None)
        return found

    def run(
        self, job: str, *args: Any, patience_s: float = PATIENCE_S, **options: Any
    ) -> list[Any]:
        """The results of a job in which no rank raises."""
        self.begin(job, *args, **options)
        found = self.results(patience_s)
        failed = [one for one in found if isinstance(one, Failed)]
        if failed:
            self.close()  # The others may still wait for one that raised.
        assert not failed, failed[0].text
        return found

    def close(self) -> None:
        for one in self.processes:
            one.kill()
            one.join()
        self._pipes, self.processes = [], []


def worlds_of(*ranks: int, jobs: str = "tests.ranks_jobs") -> Any:
    """A fixture for the tests of a file: worlds by how many ranks they have."""

    @pytest.fixture(scope="module")
    def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, World]]:
        made = {n: World(n, tmp_path_factory.mktemp(f"of{n}"), jobs) for n in ranks}
        yield made
        for one in made.values():
            one.close()

    return worlds


def world_of(ranks: int, backend: str = "gloo") -> Any:
    """A fixture for the tests of a file: so many ranks."""

    @pytest.fixture(scope="module")
    def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
        made = World(ranks, tmp_path_factory.mktemp(f"of{ranks}"), backend=backend)
        yield made
        made.close()

    return world


@dataclass
class Failed:
    """An exception of a rank."""

    kind: str
    message: str
    text: str = field(repr=False)
    seconds: float = 0.0


def serve(
    rank: int,
    ranks: int,
    store: str,
    pipe: Any,
    jobs: str,
    other: tuple[str, str] | None,
    backend: str,
) -> None:
    gc.disable()  # Nothing of what is imported is garbage.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    if backend != "gloo":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    module = importlib.import_module(jobs)
    gc.freeze()  # Each attach collects: it need not look at all of torch again.
    gc.enable()
    if other is not None:
        _replace(*other)
    while True:
        try:
            job, args, options = pipe.recv()
        except EOFError:
            return
        since = time.monotonic()
        try:
            other_module, _, name = job.rpartition(".")
            of = importlib.import_module(other_module) if other_module else module
            pipe.send(getattr(of, name)(rank, ranks, *args, **options))
        except BaseException as error:
            seconds = time.monotonic() - since
            failed = Failed(type(error).__name__, str(error), traceback.format_exc(), seconds)
            pipe.send(failed)


def _replace(module: str, source: str) -> None:
    """Let the classes of a module have the functions of another source."""
    known, made = sys.modules[module], types.ModuleType(module)
    sys.modules[module] = made  # For dataclasses and the like.
    exec(compile(source, module, "exec"), vars(made))
    sys.modules[module] = known
    for name, one in vars(made).items():
        if isinstance(one, type) and one.__module__ == module and name in vars(known):
            for key, value in vars(one).items():
                if callable(value) or isinstance(value, (property, staticmethod)):
                    setattr(getattr(known, name), key, value)
                for cell in getattr(value, "__closure__", None) or ():
                    if cell.cell_contents is one:  # For super().
                        cell.cell_contents = getattr(known, name)


# -- one process that does what the ranks do -----------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Halves(nn.Module):
    """Used by one of its halves at a time."""

    def __init__(self, width: int):
        super().__init__()
        self.halves = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor, half: int) -> torch.Tensor:
        return x + torch.relu(self.halves[half](x))


class Model(nn.Module):
    """A few blocks of odd sizes. `kind` is one of `KINDS`."""

    def __init__(self, kind: str = "plain", width: int = 47, vocabulary: int = 37):
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if kind == "tied":
            self.head.weight = self.embed.weight
            nn.init.normal_(self.embed.weight, std=0.1)
        if kind == "frozen":
            for part in (*self.blocks[:2], self.blocks[2].up):
                part.requires_grad_(False)
        if kind == "adapter":
            self.requires_grad_(False)
            self.extra = nn.Linear(width, width)
        if kind == "experts":
            self.experts = nn.ModuleList(Block(width) for _ in range(3))
            self.strands = nn.ModuleList([Halves(width)])
        if kind == "braided":
            self.strands = nn.ModuleList(Halves(width) for _ in range(3))
        if kind == "scalar":
            self.gain = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor, only: int | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        if self.kind == "braided":  # Gradients come in turns, of units that share a slot, too.
            x, y, z = (one(x, 0) for one in self.strands)
            x = self.strands[0](z, 1) + self.strands[1](x, 1) + self.strands[2](y, 1)
        for at, block in enumerate(self.blocks):
            if only is not None and at == only:
                continue
            if self.kind == "checkpointed" and at < 3:  # The last two together.
                two = nn.Sequential(*self.blocks[at:]) if at == 2 else block
                x = torch.utils.checkpoint.checkpoint(two, x, use_reentrant=False)
            elif self.kind != "checkpointed":
                x = block(x)
            if self.kind == "twice" and at == 1:
                x = block(x)
        if self.kind == "adapter":
            x = x + self.extra(x)
        if self.kind == "experts":  # Which depends on the data, and so on the rank.
            first, second = tokens[:, 0].tolist()
            for at, expert in enumerate(self.experts):
                x = x + expert(x) if first >> at & 1 else x
            x = self.strands[0](x, second % 2)
        if self.kind == "scalar":
            x = x * self.gain
        return self.head(x)


KINDS = (
    "plain",
    "tied",
    "frozen",
    "adapter",
    "scalar",
    "checkpointed",
    "twice",
    "unused",
    "experts",
    "generates",
    "braided",
)


@dataclass(frozen=True)
class How:
    """A training run, over any number of ranks."""

    kind: str = "plain"
    dtype: torch.dtype = torch.bfloat16
    micro: int = 1
    steps: int = 3
    optimizer: str = "AdamW"
    config: dict[str, Any] = field(default_factory=dict)
    mesh: tuple[int, ...] = ()
    """Of the ranks, where it is not all in a row."""
    sleeps: str = "never"
    """In which tier after each backward, where no update has begun, and after each step."""

    def sums(self, ranks: int) -> list[list[list[int]]]:
        """The micro-batches of one process: those of a list are summed before their sums are."""
        row = 1 if 1 in self.mesh else self.mesh[-1] if self.mesh else 1
        each = [[*range(rank, ranks * self.micro, ranks)] for rank in range(ranks)]
        if self.config.get("shard") == 1:
            return [each[at : at + row] for at in range(0, ranks, row)]
        every = range(ranks * self.micro)
        return [[[*every[at : at + row]]] for at in every[::row]] if row > 1 else [[[*every]]]

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = Model(self.kind).to(self.dtype)
        make = getattr(torch.optim, self.optimizer)
        options = {"momentum": 0.9} if self.optimizer == "SGD" else {}
        trained = [one for one in model.parameters() if one.requires_grad]
        return model, make(trained, lr=1e-2, **options)

    def loss(self, model: nn.Module, number: int) -> torch.Tensor:
        """Of one micro-batch."""
        generator = torch.Generator().manual_seed(100 + number)
        tokens = torch.randint(0, 37, (2, 7), generator=generator)
        tokens = tokens.to(next(model.parameters()).device)
        only = 1 if self.kind == "unused" else None
        out = model(tokens, only)
        return nn.functional.cross_entropy(out.float().flatten(0, 1), tokens.flatten()) / self.micro


WAYS = (
    ("cpu", "cpu", "cpu"),
    ("device", "cpu", "cpu"),
    ("device", "device", "device"),
    ("cpu", "device", "nvme"),
    ("nvme", "nvme", "nvme"),
)
"""Homes of weights, gradients and states that accelerators are tried with."""


def way_of(way: tuple[str, str, str], shard: int, folder: Path) -> How:
    """A run with these homes, whose updates begin inside backward."""
    config: dict[str, Any] = dict(zip(("params", "gradients", "optimizer"), way))
    if "nvme" in way:
        config["nvme_path"] = str(folder)
    config |= {"shard": shard, "micro_batches": 2}
    return How("tied", micro=2, config=config, sleeps="cpu" if "device" in way else "never")


def same(one: Any, other: Any) -> bool:
    """Whether results of jobs are the same, tensors to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(_bits(one), _bits(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


MEMORY = {
    "device_memory": "256MiB" if torch.cuda.is_available() else "64MiB",
    "cpu_memory": "64MiB",
}


@dataclass
class Trained:
    """What is left of a run: by name, each as far as a rank has it."""

    losses: list[float]
    norms: list[float | None]
    values: dict[str, tuple[int, torch.Tensor]]
    """By name, which element is the first, and the values, flat."""
    sent_bytes: int = 0


def one_process(how: How, ranks: int) -> Trained:
    """What the ranks together have to give."""
    model, optimizer = how.build()
    options = {
        name: value
        for name, value in how.config.items()
        if name in ("states", "gradient_dtype", "max_grad_norm")
    }
    model, optimizer = offload.attach(model, optimizer, offload.Config(**MEMORY, **options))
    scale = 1 if how.config.get("reduce") == "sum" else ranks
    losses, norms, count = list[float](), [], how.micro * ranks
    for step in range(how.steps):
        sums, found = [dict[nn.Parameter, torch.Tensor]() for _ in range(2)], dict[int, float]()
        for row in how.sums(ranks):
            for numbers in row:
                for number in numbers:
                    loss = how.loss(model, step * count + number)
                    (loss / scale).backward()
                    found[number] = loss.item()
                move_gradients(model, sums[0])
            for parameter, gradient in sums[0].items():
                parameter.grad = gradient
            sums[0].clear()
            move_gradients(model, sums[1])
        for parameter, gradient in sums[1].items():
            parameter.grad = gradient
        losses += [found[number] for number in range(count)]
        optimizer.step()
        norms.append(optimizer.grad_norm())
        optimizer.zero_grad()
    left = Trained(losses, norms, values_of(model, optimizer))
    offload.engine_of(model).close()
    return left


def move_gradients(model: nn.Module, sums: dict[nn.Parameter, torch.Tensor]) -> None:
    """Add the gradients of a model to what there is of each parameter; none is left."""
    for one in model.parameters():
        if one.grad is not None:
            sums[one] = sums[one] + one.grad if one in sums else one.grad.clone()
            one.grad = None


def values_of(model: nn.Module, optimizer: Any) -> dict[str, tuple[int, torch.Tensor]]:
    """All weights and states, as far as they are here."""
    found = {}
    for name, value in model.state_dict().items():
        found[name] = value
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            found[f"{number} {name}"] = value
    kept = {}
    for name, value in found.items():
        here, values = local(value) if isinstance(value, FlatShard) else (range(1), value.view(-1))
        kept[name] = here.start, torch.empty(values.shape, dtype=values.dtype).copy_(values)
    return kept


def digest(values: dict[str, tuple[int, torch.Tensor]]) -> int:
    """What tells other values from these: thousands of tensors are more than a pipe takes."""
    found = 0
    for name in sorted(values):
        start, value = values[name]
        found = crc32c(_bits(value), zlib.crc32(f"{name} {start}".encode(), found))
    return found


def joined(found: list[Trained]) -> dict[str, torch.Tensor]:
    """The values of all ranks."""
    every = {}
    for name in found[0].values:
        parts = sorted((one.values[name] for one in found), key=lambda part: part[0])
        if all(torch.equal(part, parts[0][1]) and start == parts[0][0] for start, part in parts):
            every[name] = parts[0][1]  # A step, or a buffer: of each rank.
            continue
        at = 0
        for start, part in parts:
            assert not part.numel() or start == at, f"{name} has a gap at {at}"
            at += part.numel()
        every[name] = torch.cat([part for _, part in parts])
    return every


def assert_as_one(found: list[Trained], how: How) -> None:
    """The ranks have trained as one process does, to the bit."""
    ranks, wanted = len(found), one_process(how, len(found))
    for rank, one in enumerate(found):
        assert one.losses == wanted.losses[rank::ranks]
        assert one.norms == wanted.norms
    every = joined(found)
    assert every.keys() == wanted.values.keys()
    for name, (_, value) in wanted.values.items():
        assert torch.equal(_bits(every[name]), _bits(value)), f"{name} differs"


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)
