"""The optimizers under FSDP2: parameters and states are DTensors in CPU memory, by gloo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from cpu_adam import CPUSGD, CPUAdam, CPULion
from tests.optimizers import assert_near, assert_same

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="no gloo"
)
STEPS = 4


def model_of(dtype: torch.dtype) -> nn.Sequential:
    """Five rows do not divide by two processes, one row leaves one of them none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 6), nn.Linear(6, 1)).to(dtype)


def sharded_model(dtype: torch.dtype, mesh: Any) -> nn.Sequential:
    model = model_of(dtype)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return model


def train(model: nn.Module, optimizer: Any, first: int = 0, steps: int = STEPS) -> None:
    """The same batch on every process, so that the mean of the gradients is the gradient."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(16, 8, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def whole(x: torch.Tensor) -> torch.Tensor:
    if not hasattr(x, "full_tensor"):
        return x.detach()
    if x.dtype == torch.int16:  # gloo cannot send them
        return x.int().full_tensor().short()
    found: torch.Tensor = x.full_tensor()
    return found


def check_unsharded(mesh: Any, dtype: torch.dtype, build: Callable[..., Any]) -> None:
    """Every bit of weights and states is that of training on one process."""
    model, single = sharded_model(dtype, mesh), model_of(dtype)
    optimizer, other = build(model.parameters()), build(single.parameters())
    train(model, optimizer)
    train(single, other)
    for p, q in zip(model.parameters(), single.parameters()):
        assert_same([whole(p)], [q.detach()])
        assert optimizer.state[p].keys() == other.state[q].keys()
        for key, value in optimizer.state[p].items():
            if key != "step":
                assert value.placements == p.placements
            assert_same([whole(value)], [other.state[q][key]])


def check_torch(mesh: Any) -> None:
    results = []
    for build in (CPUAdam, torch.optim.AdamW):
        model = sharded_model(torch.float32, mesh)
        train(model, build(model.parameters(), lr=1e-3))
        results.append([whole(p) for p in model.parameters()])
    # Each gradient differs by what the weights before it did.
    assert_near(results[0], results[1], 1e-2, STEPS)


def check_state_dicts(mesh: Any, dtype: torch.dtype, full: bool) -> None:
    """Saved by one model and loaded by another, training goes on with the same bits."""
    options = StateDictOptions(full_state_dict=full)
    first, second = sharded_model(dtype, mesh), sharded_model(dtype, mesh)
    one, two = CPUAdam(first.parameters(), lr=1e-2), CPUAdam(second.parameters())
    train(first, one)
    second.load_state_dict(first.state_dict())
    state = copy.deepcopy(get_optimizer_state_dict(first, one, options=options))
    set_optimizer_state_dict(second, two, state, options=options)
    train(first, one, STEPS, 2)
    train(second, two, STEPS, 2)
    for p, q in zip(first.parameters(), second.parameters()):
        assert_same([whole(p)], [whole(q)])
        for key, value in one.state[p].items():
            assert_same([whole(two.state[q][key])], [whole(value)])


def check_from_torch(mesh: Any) -> None:
    """A state of torch's optimizer under FSDP2 is taken over as it lies in each process."""
    model = sharded_model(torch.float32, mesh)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, theirs)
    mine = CPUAdam(model.parameters())
    mine.load_state_dict(theirs.state_dict())
    for p in model.parameters():
        assert_same([whole(mine.state[p]["exp_avg"])], [whole(theirs.state[p]["exp_avg"])])
    train(model, mine, STEPS, 1)


def check_waiting(mesh: Any) -> None:
    """A gradient that a collective is still to deliver is waited for."""
    parameter = nn.Parameter(distribute_tensor(torch.ones(1024), mesh, [Replicate()]))
    optimizer = CPUSGD([parameter], lr=1.0)
    partial = DTensor.from_local(torch.ones(1024), mesh, [Partial()])
    parameter.grad = partial.redistribute(mesh, [Replicate()], async_op=True)
    optimizer.step()
    assert (parameter.to_local() == 1 - mesh.size()).all()


def check_refusals(mesh: Any) -> None:
    model = sharded_model(torch.bfloat16, mesh)
    with pytest.raises(ValueError, match=r"of a DTensor.*FSDP2.*states='exact'"):
        CPUAdam(model.parameters(), states="compact")
    single = model_of(torch.bfloat16)
    train(single, optimizer := CPUAdam(single.parameters()))
    with pytest.raises(ValueError, match=r"sharded alike.*set_optimizer_state_dict"):
        CPUAdam(model.parameters()).load_state_dict(optimizer.state_dict())


def check_all(mesh: Any) -> None:
    for build in (CPUAdam, CPULion, lambda p: CPUSGD(p, lr=1e-2, momentum=0.9)):
        check_unsharded(mesh, torch.float32, build)
    check_unsharded(mesh, torch.bfloat16, CPUAdam)
    check_torch(mesh)
    check_state_dicts(mesh, torch.bfloat16, full=True)
    check_state_dicts(mesh, torch.bfloat16, full=False)
    check_from_torch(mesh)
    check_refusals(mesh)
    check_waiting(mesh)


def work(rank: int, path: str, processes: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=60),
    )
    try:
        check_all(init_device_mesh("cpu", (processes,)))
    finally:
        distributed.destroy_process_group()


def test_one_process(tmp_path: Path) -> None:
    work(0, str(tmp_path / "meeting"), 1)


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, (str(tmp_path / "meeting"), 2), nprocs=2)
