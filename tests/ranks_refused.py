"""What ranks are refused, as jobs of a `ranks.World`."""

from __future__ import annotations

import errno
import os
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import aio
import offload
from offload.runtime.memory import Memory
from offload.sleeping import SwapArea
from tests.ranks import MEMORY, How, Model, values_of
from tests.ranks_jobs import _attached, _steps


def refused(rank: int, ranks: int, how: How) -> list[str]:
    """What is said of meshes."""
    said, names = list[str](), ("pp", "dp", "tp")
    three = init_device_mesh("cpu", (1, ranks, 1), mesh_dim_names=names)
    descending, *alone = DeviceMesh("cpu", [[1], [0]]), DeviceMesh("cpu", [[0]])
    alone += DeviceMesh("cpu", [0]), dist.new_group([0])
    for mesh in three, descending, *(alone if rank else ()):
        with pytest.raises(ValueError, match="attach:") as refusal:
            offload.attach(*how.build(), mesh=mesh)
        said.append(str(refusal.value))
    return said


def restless(rank: int, ranks: int, how: How) -> tuple[list[str], dict[str, Any]]:
    """A drive that fails on one rank as all go to sleep, memory that another lacks as they wake."""
    model, optimizer = _attached(how)
    _steps(model, optimizer, how, rank, ranks, [0])
    said = list[str]()
    for call, where, of, error in (
        (offload.sleep, 1, (SwapArea, "put"), OSError(errno.EIO, "broken")),
        (offload.wake, 0, (Memory, "take"), MemoryError("others have it")),
    ):
        with pytest.MonkeyPatch.context() as patched:
            if rank == where:
                patched.setattr(*of, Mock(side_effect=error))
            with pytest.raises(type(error) if rank == where else RuntimeError) as told:
                call(model)
        said.append(str(told.value))
        call(model)
    _steps(model, optimizer, how, rank, ranks, [1])
    found = values_of(model, optimizer)
    offload.engine_of(model).close()
    return said, found


def wrapped(rank: int, ranks: int, how: How) -> list[str]:
    """What wrappers of torch say of an attached model, and a look at what is not in it."""
    model, _ = _attached(how)
    said, mesh = list[str](), init_device_mesh("cpu", (ranks,))
    for ask in (
        lambda: DistributedDataParallel(model),
        lambda: fully_shard(model, mesh=mesh),
        lambda: fully_shard(model.blocks[1], mesh=mesh),
        lambda: offload.gathered(model, ["head.weight", "no.bias", torch.ones(1)]).__enter__(),
    ):
        with pytest.raises((offload.ShardError, ValueError)) as error:
            ask()
        said.append(str(error.value))
    offload.engine_of(model).close()
    return said


def kept(rank: int, ranks: int, how: How) -> str:
    """What an attach says that is refused on all ranks, and leaves the model as it was."""
    torch.manual_seed(rank)
    model = Model().to(how.dtype)
    before = [one.detach().clone() for one in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError) as error:
        offload.attach(model, optimizer, offload.Config(**MEMORY))
    for one, wanted in zip(model.parameters(), before, strict=True):
        assert type(one) is nn.Parameter
        assert torch.equal(one, wanted)
    config = offload.Config(**MEMORY, durable=None if rank else "nowhere", nvme_path=".")
    with pytest.raises(ValueError, match=r"rank 0 has Config durable=True, and rank 1 has .*False"):
        offload.attach(model, optimizer, config)
    return str(error.value)


def misfit(rank: int, ranks: int, how: How) -> list[str]:
    """What values of other parameters say, and one that torch spreads over all elements."""
    model, _ = _attached(how)
    how.loss(model, rank).backward()
    block, head, said = model.blocks[0], model.head, []
    for ask in (
        lambda: setattr(head.weight, "grad", torch.zeros(3)),
        lambda: setattr(head.weight, "grad", block.up.weight.grad),
        lambda: head.weight.detach().copy_(block.up.weight.detach()),
    ):
        with pytest.raises((ValueError, RuntimeError)) as error:
            ask()
        said.append(str(error.value))
    with torch.no_grad():
        head.weight.copy_(torch.tensor(2.0))
    assert bool((offload.local(head.weight)[1] == 2).all())
    offload.engine_of(model).close()
    return said


def edited(rank: int, ranks: int, how: How) -> list[tuple[float, float]]:
    """What a forward gives after edits that fall in the part of one rank, and ought to."""
    model, _ = _attached(how)
    plain, found = how.build()[0], []
    with torch.no_grad():
        for elements in (slice(0, 3), slice(-3, None)):
            how.loss(model, 0)
            with offload.gathered(model, "blocks.1.up.weight"):
                model.blocks[1].up.weight.view(-1)[elements].add_(5)
            plain.blocks[1].up.weight.view(-1)[elements].add_(5)
            found.append((how.loss(model, 0).item(), how.loss(plain, 0).item()))
        bias = {"blocks.2.up.bias": torch.full((94,), 2.0)}
        for one in (model, plain):
            one.load_state_dict(bias, strict=False)
        found.append((how.loss(model, 0).item(), how.loss(plain, 0).item()))
    offload.engine_of(model).close()
    return found


def copies(rank: int, ranks: int, how: How) -> None:
    """Edits of what is a copy are refused, and shards of one's own are edited."""
    model, _ = _attached(how)
    weight, whole = model.head.weight, torch.ones(37, 47, dtype=how.dtype)
    with torch.no_grad():
        for edit, value in (
            (weight.data.mul_, 2),
            (weight.data.copy_, whole),
            (whole.copy_, weight.detach()),
        ):
            with pytest.raises(offload.ShardError, match=r"offload.gathered\(model\)"):
                edit(value)
        with offload.gathered(model):
            with offload.gathered(model, "head.weight"):
                weight.fill_(3)
            assert (weight == 3).all()
        assert (offload.local(weight)[1] == 3).all()
        average = weight.detach().clone()
        average.mul_(0.5).add_(weight.detach(), alpha=0.5)
        torch.zeros_like(weight).add_(average)
    offload.engine_of(model).close()


def two_models(rank: int, ranks: int, how: How) -> str:
    """Rank 1 goes on to another model, while rank 0 uses the first one again."""
    one, other = (_attached(how)[0] for _ in range(2))
    with torch.no_grad(), pytest.raises(RuntimeError) as error:
        for _ in range(3):
            how.loss(one, 0)
            how.loss(other, 0)
        how.loss(other if rank else one, 0)
    return str(error.value)


def outside(rank: int, ranks: int, how: How) -> None:
    """A rank calls fewer layers outside the model's forward than before, and then all ask for
    values."""
    model, _ = _attached(how)
    with torch.no_grad():
        for step in range(4):
            x = torch.ones(1, 47, dtype=how.dtype)
            for block in model.blocks[: 2 if rank and step == 3 else 4]:
                x = block(x)
            with offload.gathered(model, ["head.weight"]):
                pass
    offload.engine_of(model).close()


def unreadable(rank: int, ranks: int, how: How, folder: str, on: int) -> tuple[str, float]:
    """A save in which a rank cannot read what it has, and a forward after it."""
    model, optimizer = _attached(how)
    runner = offload.engine_of(model).runner
    with pytest.MonkeyPatch.context() as patched:
        if rank == on:
            patched.setattr(type(runner), "read_home", _unreadable)
        with pytest.raises((OSError, RuntimeError)) as error:
            offload.save(model, optimizer, folder)
    with torch.no_grad():
        loss = how.loss(model, 0).item()
    offload.engine_of(model).close()
    return str(error.value), loss


def _unreadable(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def save_in_vain(rank: int, ranks: int, how: How, folder: str) -> str:
    """Save where the drive of rank 0 is full in the middle; what this rank is told. Then go on. And
    before, where each rank names another folder; and after, load what rank 1 has not."""
    model, optimizer = _attached(how)
    _steps(model, optimizer, how, rank, ranks, [0])
    with pytest.raises(ValueError, match=r"calls: rank 0 at offload.save to .*0, rank 1 at .*1\. "):
        offload.save(model, optimizer, f"{folder}{rank}")
    assert not os.path.exists(f"{folder}{rank}")
    with pytest.MonkeyPatch.context() as patched:
        if rank == 0:
            patched.setattr(aio.Writer, "_send", _full)
        with pytest.raises((OSError, RuntimeError)) as told:
            offload.save(model, optimizer, folder)
    _steps(model, optimizer, how, rank, ranks, [1])
    offload.save(model, optimizer, folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder if rank else os.path.dirname(folder))
        with pytest.raises((OSError, RuntimeError), match=r"asked to load a save; found none"):
            offload.load(model, optimizer, os.path.basename(folder))
    _steps(model, optimizer, how, rank, ranks, [2])
    offload.engine_of(model).close()
    return f"{type(told.value).__name__}: {told.value}"


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def unset(rank: int, ranks: int, how: How) -> str:
    """How many ranks attach takes to be on this host, where no launcher tells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_WORLD_SIZE")
        model, _ = _attached(how)
        offload.engine_of(model).close()
        return os.environ["LOCAL_WORLD_SIZE"]
