"""What ranks do in tests: each function runs on every rank of a `ranks.World`."""

from __future__ import annotations

import io
import os
import random
import signal
import time
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import cpu_adam
import offload
from offload import attachment
from offload.parallel.group import Group
from offload.program.compile import compile_program
from offload.program.ops import Lane, Verb
from tests.paced_ranks import paced_ranks
from tests.ranks import MEMORY, How, Model, Trained, digest, values_of


def train(rank: int, ranks: int, how: How) -> Trained:
    """Train, and give what is left."""
    model, optimizer = _attached(how)
    engine = offload.engine_of(model)
    losses, norms = list[float](), []
    for step in range(how.steps):
        losses += _steps(model, optimizer, how, rank, ranks, [step])
        norms.append(optimizer.grad_norm())
    sent = engine.ranks.group.sent_bytes if engine.ranks else 0
    found = Trained(losses, norms, values_of(model, optimizer), sent)
    engine.close()
    return found


def alone(rank: int, ranks: int, backend: str, job: str, *args: Any) -> Any:
    """Do a job as the only rank of a group, where the engine does what it does with several."""
    mesh = dist.new_group([0], backend=backend)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            attachment,
            "_group_of",
            lambda _, device, config: Group(mesh, device, config.comm_timeout),
        )
        return globals()[job](rank, ranks, *args)


def paced(rank: int, ranks: int, seed: int, job: str, *args: Any) -> Any:
    """Do a job on the accelerator of tests, and see that nothing raced."""
    with paced_ranks(seed) as device:
        found = globals()[job](rank, ranks, *args)
    assert not device.timeline.races, device.timeline.races[0]
    return found


def nothing(rank: int, ranks: int, *args: Any) -> int:
    """Only be there."""
    return rank


def _attached(how: How) -> tuple[Any, Any]:
    mesh = _mesh(how.mesh) if how.mesh else None
    return offload.attach(*how.build(), offload.Config(**{**MEMORY, **how.config}), mesh=mesh)


_mesh = cache(partial(init_device_mesh, "cpu"))


def diverge(rank: int, ranks: int, how: How) -> dict[str, tuple[int, torch.Tensor]]:
    """Each rank leaves out another block in one step, and calls forward another number of times."""
    model, optimizer = _attached(how)
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                for _ in range(1 + 2 * rank):
                    how.loss(model, rank)
        tokens = torch.arange(6, device=next(model.parameters()).device).view(1, 6) + rank
        out = model(tokens, (rank if step % 2 else None))
        out.float().square().mean().backward()
        first, last = offload.local(model.embed.weight.grad)
        last = last.clone()
        optimizer.step()
        optimizer.zero_grad()
    found = values_of(model, optimizer)
    found["last gradient"] = first.start, last
    offload.engine_of(model).close()
    return found


def early(rank: int, ranks: int, how: How) -> list[tuple[int, int]]:
    """How many updates have begun at the end of each backward, inside it and after it."""
    model, optimizer = _attached(how)
    engine, inside, found = offload.engine_of(model), list[int](), []
    collectives = engine.ranks.collectives
    ended = collectives.closed
    collectives.closed = lambda: (inside.append(len(engine.early.begun)), ended())
    for step in range(how.steps):
        for micro in range(how.micro):
            how.loss(model, (step * how.micro + micro) * ranks + rank).backward()
            found.append((inside[-1], len(engine.early.begun)))
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    return found


def clip(rank: int, ranks: int, how: How) -> tuple[list[float], dict[str, Any]]:
    """Clip by torch's own function, and edit gradients in place."""
    model, optimizer = _attached(how)
    norms = []
    for step in range(3):
        how.loss(model, step * ranks + rank).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        with torch.no_grad():
            model.head.weight.grad.mul_(2)
        optimizer.step()
        optimizer.zero_grad()
    found = norms, values_of(model, optimizer)
    offload.engine_of(model).close()
    return found


def touch(rank: int, ranks: int, how: How) -> dict[str, str]:
    """What each touch of a value says, on one rank; and what works."""
    model, optimizer = _attached(how)
    how.loss(model, rank).backward()
    weight, said = model.head.weight, {}
    touches = {
        "add": lambda: weight * 2,
        "cpu": lambda: weight.tolist(),
        "print": lambda: weight.detach() + 1,
        "grad": lambda: weight.grad.sum(),
        "save": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "item": lambda: weight.detach().tolist(),
    }
    for name, one in touches.items() if rank else ():
        try:
            one()
            said[name] = "nothing"
        except offload.ShardError as error:
            said[name] = str(error)
    assert weight.shape == (37, 47) == weight.grad.shape
    assert weight.requires_grad
    assert "FlatShard" in repr(weight.detach())
    assert torch.zeros_like(weight).dtype == weight.dtype
    assert torch.zeros_like(weight, dtype=torch.float64).dtype == torch.float64
    here, values = offload.local(weight)
    with offload.gathered(model):
        whole = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(2)
    assert torch.equal(whole.view(-1)[here.start : here.stop], values)
    with offload.gathered(model, ["head.weight"], source=1):
        assert torch.equal(weight, whole * 2)
        with torch.no_grad():
            weight.add_(rank)
    for asked in ("head.weight", weight, model.head.parameters()):
        with offload.gathered(model, asked):
            assert torch.equal(weight, whole * 2 + 1)
    optimizer.step()
    offload.engine_of(model).close()
    return said


def save(rank: int, ranks: int, how: How, folder: str, *, ours: bool = False) -> Trained:
    """Save after a step, by torch.distributed.checkpoint or `offload.save`, and go on."""
    model, optimizer = _attached(how)
    _steps(model, optimizer, how, rank, ranks, [0])
    torch.manual_seed(10 + rank)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if ours:
        offload.save(model, optimizer, folder, user={"by": ranks})
    else:
        dcp.save(state, checkpoint_id=folder)
    losses = _steps(model, optimizer, how, rank, ranks, [1])
    found = Trained(losses, [], values_of(model, optimizer))
    offload.engine_of(model).close()
    return found


def load(
    rank: int, ranks: int, how: How, folder: str, micro: int, *, ours: bool = False
) -> Trained:
    """Load what other ranks have saved, and go on with as many micro-batches in all."""
    model, optimizer = _attached(how)
    torch.manual_seed(7)
    _steps(model, optimizer, replace(how, micro=1), rank, ranks, [7])  # So that there are states.
    if ours:
        by = offload.load(model, optimizer, folder)["by"]
        assert torch.initial_seed() == (10 + rank if rank < by else 7)
    else:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    losses = _steps(model, optimizer, replace(how, micro=micro), rank, ranks, [1])
    found = Trained(losses, [], values_of(model, optimizer))
    offload.engine_of(model).close()
    return found


def loaded(rank: int, ranks: int, how: How, folder: str) -> Trained:
    """What `offload.load` makes of a save, and the step of six micro-batches after it."""
    model, optimizer = _attached(how)
    offload.load(model, optimizer, folder)
    for number in range(6 + rank, 12, ranks):
        how.loss(model, number).backward()
    optimizer.step()
    found = Trained([], [], values_of(model, optimizer))
    offload.engine_of(model).close()
    return found


def _steps(
    model: Any, optimizer: Any, how: How, rank: int, ranks: int, steps: list[int]
) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(how.micro):
            with torch.no_grad():
                for _ in range((step + rank) % 3 if how.kind == "generates" else 0):
                    how.loss(model, rank)
            loss = how.loss(model, (step * how.micro + micro) * ranks + rank)
            loss.backward()
            losses.append(loss.item())
        if "micro_batches" not in how.config:
            rest(model, how, rank)
        optimizer.step()
        optimizer.zero_grad()
        rest(model, how, rank)
    return losses


def rest(model: Any, how: How, rank: int = 0) -> None:
    """Let a model sleep and wake, where it is asked for, some ranks later than others."""
    if how.sleeps != "never":
        with torch.no_grad():
            for _ in range(rank if how.kind == "generates" else 0):
                how.loss(model, rank)
        offload.sleep(model, how.sleeps)
        offload.wake(model)


def differ(rank: int, ranks: int, how: How, what: str) -> None:
    """Rank 1 does something else than rank 0."""
    if what == "model" and rank == 1:
        how = replace(how, kind="tied")
    if what == "seed":
        torch.manual_seed(rank)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        offload.attach(model, optimizer, offload.Config(**MEMORY))
    if what == "config" and rank == 1:
        how = replace(how, config={**how.config, "gradient_dtype": "fp32"})
    if what == "budget" and rank == 1:
        how = replace(how, config={**how.config, "device_memory": 1, "cpu_memory": 1})
    model, optimizer = _attached(replace(how, config={"comm_timeout": 5.0, **how.config}))
    try:
        for step in range(3):
            for again in range(2 if what in ("batches", "edit") and rank == 1 and step else 1):
                if what == "edit" and again:
                    model.blocks[0].register_forward_hook(partial(_edit, model.blocks[3]))
                how.loss(model, step * ranks + rank).backward()
            if what == "lr" and rank == 1 and step:
                optimizer.param_groups[0]["lr"] = 0.5
            if what == "skipped" and rank == 1 and step == 1:
                optimizer.zero_grad()
                continue
            if what == "raise" and rank == 1 and step:
                offload.engine_of(model).runner.fail(OSError("the drive is gone"))
            if what == "kill" and rank == 1 and step:
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "stop" and rank == 1 and step:
                os.kill(os.getpid(), signal.SIGSTOP)
            if what == "save" and rank == 0 and step:
                offload.save(model, optimizer, "nowhere")
            if what == "values" and rank == 0 and step:
                offload.gathered(model).__enter__()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        offload.engine_of(model).close()


def late(rank: int, ranks: int, how: How, seeds: int) -> list[int]:
    """What is left of runs in which collectives happen when they are waited for, or at once."""
    return _disturbed(rank, ranks, how, [random.Random(seed) for seed in range(seeds)], _begin_late)


def delayed(rank: int, ranks: int, how: How, seeds: int) -> list[int]:
    """What is left of runs in which each rank dawdles at other places."""
    chances = [random.Random(seed * 10 + rank) for seed in range(seeds)]
    return _disturbed(rank, ranks, how, chances, _dawdle)


def _disturbed(rank: int, ranks: int, how: How, chances: list[Any], begin: Any) -> list[int]:
    """What is left of runs in which collectives begin so."""
    found = []
    for chance in chances:
        model, optimizer = _attached(how)
        group = offload.engine_of(model).ranks.group
        group._begun = partial(begin, chance, group._begun)
        _steps(model, optimizer, how, rank, ranks, [0, 1, 2])
        found.append(digest(values_of(model, optimizer)))
        offload.engine_of(model).close()
    return found


def _begin_late(
    chance: random.Random, begin: Any, what: Any, into: torch.Tensor, source: torch.Tensor, on: Any
) -> Any:
    if chance.random() < 0.3:
        return begin(what, into, source, on)
    before = source.clone()
    into.view(torch.uint8).fill_(0xAA)
    source.copy_(before)  # Which may lie in the other.
    if into.is_cuda:  # Its stream is late, and the host is not.
        torch.cuda._sleep(chance.randrange(1 << 22))
        return begin(what, into, source, on)
    return [Late(partial(begin, what, into, source, on))]


class Late:
    """A collective that happens when somebody waits for it."""

    def __init__(self, begin: Any):
        self._begin, self._over = begin, False

    def is_completed(self) -> bool:
        self.wait()
        return True

    def wait(self) -> None:
        """Let it happen, once."""
        if not self._over:
            self._over = True
            for work in self._begin():
                work.wait()


def _dawdle(chance: random.Random, do: Any, *args: Any) -> Any:
    time.sleep(chance.random() ** 4 / 150)
    return do(*args)


def detach(rank: int, ranks: int, how: How) -> dict[str, torch.Tensor]:
    """Undo attach: each rank has all of the model, and of the states."""
    model, optimizer = _attached(how)
    _steps(model, optimizer, how, rank, ranks, [0, 1])
    model, optimizer = offload.detach(model)
    found = {name: value.detach().clone() for name, value in model.named_parameters()}
    for number, state in enumerate(optimizer.state.values()):
        found |= {f"{number} {name}": value for name, value in state.items() if name != "step"}
    return found


def pipeline(rank: int, ranks: int, schedule: str, attached: bool, micro: int) -> list[Any]:
    """Train a pipeline of two stages, over as many rows of ranks as there are; plain, or attached.

    A row takes every so-manieth micro-batch; an interleaved one has two stages on each rank.
    Returns the weights of the rank's stages.
    """
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("rows", "stages"))
    row, at = mesh["rows"].get_local_rank(), mesh["stages"].get_local_rank()
    torch.manual_seed(5)
    blocks = [nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 16)) for _ in range(4)]
    each = 2 if "Interleaved" in schedule else 1
    stages, pairs = list[Any](), list[tuple[Any, Any]]()
    for number in range(at, 2 * each, 2):
        model: Any = nn.Sequential(*blocks[2 // each * number :][: 2 // each])
        optimizer: Any = cpu_adam.CPUAdam(model.parameters(), lr=1e-2)
        if attached:
            config = offload.Config(**MEMORY, reduce="sum", params="cpu")
            model, optimizer = offload.attach(model, optimizer, config, mesh=mesh["rows"])
        how = number, 2 * each, torch.device("cpu")
        stages.append(pipelining.PipelineStage(model, *how, group=mesh["stages"].get_group()))
        pairs.append((model, optimizer))
    loss, given_to = nn.functional.mse_loss, stages if each > 1 else stages[0]
    made = getattr(pipelining, schedule)(given_to, micro, loss_fn=loss, scale_grads=False)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        given, wanted = torch.randn(2, 8, 3, 16, generator=generator)
        mine = slice(row, None, ranks // 2)
        made.step(given[mine].flatten(0, 1)) if at == 0 else made.step(
            target=wanted[mine].flatten(0, 1), losses=[]
        )
        for model, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
            rest(model, How(sleeps="cpu" if attached else "never"))
    if not attached:
        return [one.detach() for model, _ in pairs for one in model.parameters()]
    engines = [offload.engine_of(model) for model, _ in pairs]
    found = [value for engine in engines for _, value in engine.stream_weights()]
    for engine in engines:
        engine.close()
    return found


def sent_by_level(rank: int, ranks: int, how: How) -> list[tuple[int, int]]:
    """Bytes that a step sends over columns, and those of the formula; then the same of rows."""
    model, optimizer = _attached(how)
    engine = offload.engine_of(model)
    group, (rows, shards), found = engine.ranks.group, how.mesh, Counter[bool]()
    begun, full = group._begun, engine.plan.profile.full

    def counted(collective: Any, into: Any, source: Any, on: Any) -> Any:
        if on in (group._column, group._row):
            parts, part = dist.get_world_size(on), min(into.nbytes, source.nbytes)
            size = part if into.nbytes > source.nbytes else part // parts
            found[on is group._row] += size * (parts - 1)
        return begun(collective, into, source, on)

    _steps(model, optimizer, how, rank, ranks, [0, 1])
    before, group._begun = group.sent_bytes, counted
    _steps(model, optimizer, how, rank, ranks, [2])
    assert group.sent_bytes - before == found[True] + found[False]
    uses = [op.value.unit for op in _collectives(engine) if op.verb is Verb.GATHER]
    once, every = (sum(full[unit].weight_bytes for unit in of) for of in (set(uses), uses))
    late = engine.plan.profile.sharding.late
    size = (1 if late else how.micro) * sum(unit.gradient_bytes for unit in full)
    engine.close()
    assert f", those of each row of {shards} first" in str(engine.report())
    wanted = (once + size) * (rows - 1) // ranks, (every + size) * (shards - 1) // shards
    pairs = [(found[row], wanted[row]) for row in (False, True)]
    return pairs[: 1 + (late or how.micro == 1)]  # Else some weights are in slots yet.


def edit(rank: int, ranks: int, how: How) -> int:
    """What is left of a run in which weights are changed between steps."""
    model, optimizer = _attached(how)
    for step in range(3):
        _steps(model, optimizer, how, rank, ranks, [step])
        other = torch.randn(37, 47, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            model(torch.tensor([[1, 2]]))
            model.head.weight.copy_(other)
    found = digest(values_of(model, optimizer))
    offload.engine_of(model).close()
    return found


@torch.no_grad()
def _edit(block: Any, *_: Any) -> None:
    block.down.weight.copy_(torch.tensor(2.0))


def sent(rank: int, ranks: int, how: How) -> tuple[int, int, int]:
    """Bytes that a step sends, those of its program, and those of the formula: each unit's weights
    once for each gathering, its gradient once, to every other rank its part."""
    model, optimizer = _attached(how)
    engine = offload.engine_of(model)
    _steps(model, optimizer, how, rank, ranks, [0, 1])
    before = engine.ranks.group.sent_bytes
    _steps(model, optimizer, how, rank, ranks, [2])
    found = engine.ranks.group.sent_bytes - before
    ops = _collectives(engine)
    assert f"rank {rank} of {ranks}, as ZeRO-" in str(engine.report())
    full = engine.plan.profile.full
    weights = sum(full[op.value.unit].weight_bytes for op in ops if op.verb is Verb.GATHER)
    gradients = sum(unit.gradient_bytes for unit in full)
    engine.close()
    return found, sum(op.bytes for op in ops), (weights + gradients) * (ranks - 1) // ranks


def _collectives(engine: Any) -> list[Any]:
    """The ops of a step that send something to other ranks."""
    phases = compile_program(engine.plan).phases
    ops = [op for name in ("forward", "backward_first") for op in phases[name].ops]
    return [op for op in ops if op.lane is Lane.COMM]


def train_by_fsdp(rank: int, ranks: int, how: How) -> dict[str, torch.Tensor]:
    """The same training by FSDP2 with states in CPU memory and this project's AdamW."""
    model, _ = how.build()
    mesh = init_device_mesh("cpu", (ranks,))
    for one in (*model.blocks, model):
        fully_shard(one, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        if how.config.get("reduce") == "sum":
            one.set_gradient_divide_factor(1.0)
            one.set_force_sum_reduction_for_comms(True)
    optimizer = cpu_adam.CPUAdam(model.parameters(), lr=1e-2)
    for step in range(how.steps):
        for micro in range(how.micro):
            how.loss(model, (step * how.micro + micro) * ranks + rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.full_tensor().detach() for name, value in model.state_dict().items()}
