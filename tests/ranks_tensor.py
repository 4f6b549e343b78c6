"""What ranks do in tests of tensor parallelism: each function runs on every rank of a `World`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import cpu_adam
import offload
from tests.ranks import MEMORY, Block, How, Model
from tests.ranks_jobs import rest

WIDTH, VOCABULARY, TOKENS = 48, 37, 8


def parallelized(how: How, mesh: Any) -> Any:
    """The model of a run, cut over a mesh of two. Norms are computed by both ranks on all tokens
    and are no DTensors; or by each on half of them, and are, where `how.kind` is `sequence`."""
    torch.manual_seed(3)
    kind = "checkpointed" if how.kind == "checkpointed" else "plain"
    model = Model(kind, WIDTH, VOCABULARY).to(how.dtype)
    layout: Any = Shard(1) if how.kind == "sequence" else Replicate()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=layout),
        "blocks.*.up": ColwiseParallel(input_layouts=layout),
        "blocks.*.down": RowwiseParallel(output_layouts=layout),
        "head": ColwiseParallel(input_layouts=layout, output_layouts=Replicate()),
    }
    if how.kind == "sequence":
        plan["blocks.*.norm"] = SequenceParallel()
    made = parallelize_module(model, mesh, plan)
    if how.kind == "tied":
        made.head.weight = made.embed.weight
    for block in made.blocks if how.kind == "compiled" else ():
        block.compile(backend="eager")
    return made


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    """Of one micro-batch."""
    generator = torch.Generator().manual_seed(100 + number)
    tokens = torch.randint(0, VOCABULARY, (2, TOKENS), generator=generator)
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def meshes(ranks: int) -> Any:
    return init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))


def attached(how: How, ranks: int) -> tuple[Any, Any, Any]:
    """A model and its optimizer over all ranks, and their mesh."""
    mesh = meshes(ranks)
    model = parallelized(how, mesh["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = offload.Config(**MEMORY, **how.config)
    return *offload.attach(model, optimizer, config, mesh=mesh["dp"]), mesh


Found = tuple[list[float], list[float | None], dict[str, torch.Tensor]]
"""Losses, norms, and what a rank has of weights and moments as one of its row."""


def train(rank: int, ranks: int, how: How) -> Found:
    """Train, and give what is left."""
    model, optimizer, mesh = attached(how, ranks)
    losses, norms, rows = [], [], ranks // 2
    for step in range(how.steps):
        for micro in range(how.micro):
            number = (step * how.micro + micro) * rows + mesh["dp"].get_local_rank()
            loss = loss_of(model, number)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        norms.append(optimizer.grad_norm())
        optimizer.zero_grad()
        rest(model, how)
    return losses, norms, _ended(model, optimizer)


def values_of(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Weights and moments, as far as they are on this rank."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = here(parameter.detach()).clone()
        state = optimizer.state[parameter]
        for slot in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {slot}"] = here(state[slot]).float()
    return found


def here(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def train_by_torch(rank: int, ranks: int, how: How, rows: int) -> Found:
    """The same by plain torch: a row of two ranks takes the micro-batches of all rows in turn."""
    mesh = meshes(ranks)["tp"]
    model = parallelized(how, mesh)
    optimizer = cpu_adam.CPUAdam(model.parameters(), lr=1e-2)
    losses, norms, largest = [], [], how.config.get("max_grad_norm")
    for step in range(how.steps):
        sums = dict[nn.Parameter, torch.Tensor]()
        for number in range(step * how.micro * rows, (step + 1) * how.micro * rows):
            loss = loss_of(model, number)
            (loss / rows).backward()
            losses.append(loss.item())
            for one in model.parameters():
                grad: Any = one.grad
                if isinstance(one, DTensor):
                    grad = grad.redistribute(placements=one.placements)
                sums[one] = sums[one] + grad if one in sums else grad
                one.grad = None
        norms.append(_norm(list(sums.values()), mesh) if largest else None)
        for one, grad in sums.items():
            factor = min(1.0, largest / (norms[-1] + 1e-6)) if largest else 1.0
            one.grad = grad * factor
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, values_of(model, optimizer)


def _norm(gradients: list[torch.Tensor], mesh: Any) -> float:
    """The 2-norm of all of them, in double precision."""
    alike = parts = 0.0
    for one in gradients:
        squares = float(here(one).double().square().sum())
        if isinstance(one, DTensor) and one.placements[0].is_shard():
            parts += squares
        else:
            alike += squares
    total = torch.tensor(parts, dtype=torch.float64)
    torch.distributed.all_reduce(total, group=mesh.get_group())
    return math.sqrt(float(total) + alike)


def clip(rank: int, ranks: int, how: How) -> list[float]:
    """Clip by torch's own function, and edit gradients in place; the norms."""
    model, optimizer, mesh = attached(how, ranks)
    norms = []
    for step in range(3):
        loss_of(model, step * (ranks // 2) + mesh["dp"].get_local_rank()).backward()
        found: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        norms.append(float(found.full_tensor()))
        again: Any = nn.utils.get_total_norm([one.grad for one in model.parameters()])
        norms.append(float(again.full_tensor()))
        with torch.no_grad():
            model.head.weight.grad *= 2
        optimizer.step()
        optimizer.zero_grad()
    offload.engine_of(model).close()
    return norms


def touch(rank: int, ranks: int, how: How) -> list[str]:
    """Touches of a DTensor at rest; what those of values say that are on several ranks."""
    model, _, mesh = attached(how, ranks)
    weight, plain = (one.blocks[0].down.weight for one in (model, parallelized(how, mesh["tp"])))
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, DTensor)
    assert (weight.shape, weight.placements) == (plain.shape, plain.placements)
    assert weight.device_mesh == mesh["tp"]
    said, touches = (
        [],
        {
            "product": lambda: weight * 2,
            "local": lambda: weight.to_local() + 0,
            "full": lambda: weight.full_tensor(),
        },
    )
    for one in touches.values() if ranks > 2 else ():
        try:
            one()
            said.append("nothing")
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}")
    with offload.gathered(model):
        assert torch.equal(weight.full_tensor(), plain.full_tensor())
        assert torch.equal((weight * 2).to_local(), plain.to_local() * 2)
    with torch.no_grad():
        weight.mul_(2)
        plain.mul_(2)
        weight.data.add_(1)
        plain.data.add_(1)
    with offload.gathered(model):
        assert torch.equal(weight.full_tensor(), plain.full_tensor())
    model.load_state_dict({**model.state_dict(), "blocks.0.down.weight": plain.detach() + 1})
    with offload.gathered(model):
        assert torch.equal(weight.full_tensor(), plain.full_tensor() + 1)
    assert weight.grad is None
    loss_of(model, 0).backward()
    assert weight.grad.placements == plain.placements
    weight.grad = None
    assert weight.grad is None
    weight.requires_grad_(False)
    weight.requires_grad = True
    model, _ = offload.detach(model)
    assert type(weight) is DTensor
    assert torch.equal(weight.full_tensor(), plain.full_tensor() + 1)
    loss_of(model, 0).backward()
    return said


class Hidden:
    """A result in which no hook sees a tensor, so that nothing tells of its backward."""

    def __init__(self, value: torch.Tensor):
        self.value = value


class Hiding(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return Hidden(super().forward(x))


class Unseen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Hiding(WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).value
        return x


def unseen(rank: int, ranks: int, how: How) -> list[list[torch.Tensor]]:
    """The gradients of a backward for which no unit was brought into use: by torch, and ours."""
    mesh, found = meshes(ranks), list[list[torch.Tensor]]()
    for attaches in (False, True):
        torch.manual_seed(3)
        plan: Any = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        model: Any = parallelize_module(Unseen(), mesh["tp"], plan)
        if attaches:
            optimizer = torch.optim.AdamW(model.parameters())
            config = offload.Config(**MEMORY, **how.config)
            offload.attach(model, optimizer, config, mesh=mesh["dp"])
        model(torch.ones(2, WIDTH)).square().mean().backward()
        found.append([here(one.grad) for one in model.parameters()])
    offload.engine_of(model).close()
    return found


def save(rank: int, ranks: int, how: How, folder: str) -> dict[str, torch.Tensor]:
    """Save after a step, by torch.distributed.checkpoint, and take another one."""
    model, optimizer, mesh = attached(how, ranks)
    _step(model, optimizer, mesh, 0, how.micro)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    with pytest.raises(ValueError, match=r"offload.save or load.*DTensors.*checkpoint\.save"):
        offload.save(model, optimizer, folder)
    _step(model, optimizer, mesh, 1, how.micro)
    return _ended(model, optimizer)


def load(rank: int, ranks: int, how: How, folder: str) -> dict[str, torch.Tensor]:
    """Load what other ranks have saved, detach, attach again, and take the same step."""
    model, optimizer, mesh = attached(how, ranks)
    _step(model, optimizer, mesh, 7, 1)  # So that there are states.
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    model, optimizer = offload.detach(model)
    assert all(type(one) is DTensor for one in model.parameters())
    config = offload.Config(**MEMORY, **how.config)
    model, optimizer = offload.attach(model, optimizer, config, mesh=mesh["dp"])
    _step(model, optimizer, mesh, 1, how.micro)
    return _ended(model, optimizer)


def _step(model: nn.Module, optimizer: Any, mesh: Any, step: int, micro: int) -> None:
    rows = mesh["dp"].size()
    for at in range(micro):
        loss_of(model, (step * micro + at) * rows + mesh["dp"].get_local_rank()).backward()
    optimizer.step()
    optimizer.zero_grad()


def _ended(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    with offload.gathered(model):
        found = values_of(model, optimizer)
    offload.engine_of(model).close()
    return found


def load_by_torch(rank: int, ranks: int, how: How, folder: str) -> dict[str, torch.Tensor]:
    """What plain torch loads of it, into a model that is parallelized."""
    model = parallelized(how, meshes(ranks)["tp"])
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    return {name: here(value) for name, value in state["model"].items()}


def loaded_weights(rank: int, ranks: int, how: How, folder: str) -> dict[str, torch.Tensor]:
    """The same by an attached one."""
    model, _, _ = attached(how, ranks)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    with offload.gathered(model):
        found = {n: here(p.detach()).clone() for n, p in model.named_parameters()}
    offload.engine_of(model).close()
    return found


def refused(rank: int, ranks: int, how: How) -> dict[str, str]:
    """What attach says where DTensors, or the mesh beside them, are others than they should be."""
    mesh, said = meshes(ranks), {}

    def ask(name: str, given: Any, change: Any = None) -> None:
        model = parallelized(how, mesh["tp"])
        if change is not None:
            model.blocks[0].up.weight = nn.Parameter(change(model.blocks[0].up.weight.detach()))
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(ValueError, match=r"^attach: ") as error:
            offload.attach(model, optimizer, offload.Config(**MEMORY), mesh=given)
        assert all(type(one) in (nn.Parameter, DTensor) for one in model.parameters())
        said[name] = str(error.value)

    ask("no mesh", None)
    ask("its own mesh", mesh["tp"])
    ask("the world", torch.distributed.group.WORLD)
    of = mesh["tp"]
    ask("a sum", mesh["dp"], lambda one: DTensor.from_local(one.to_local(), of, [Partial()]))
    empty = torch.zeros(1, 4)
    ask("nothing", mesh["dp"], lambda one: distribute_tensor(empty, of, [Shard(0)]))
    both = [Replicate(), Shard(0)]
    ask("two dimensions", mesh["dp"], lambda one: distribute_tensor(one.full_tensor(), mesh, both))
    return said
