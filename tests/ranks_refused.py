"""What ranks are refused, as jobs of a `ranks.World`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import offload
from tests.ranks import MEMORY, How, Model
from tests.ranks_jobs import _attached


def refused(rank: int, ranks: int, how: How) -> list[str]:
    """What knows no other ranks, asked for on all of them; and meshes."""
    model, _ = _attached(how)
    with pytest.raises(RuntimeError) as error:
        offload.sleep(model)
    offload.engine_of(model).close()
    said = [str(error.value)]
    three = init_device_mesh("cpu", (1, ranks, 1), mesh_dim_names=("pp", "dp", "tp"))
    others = DeviceMesh("cpu", [[1], [0]]), DeviceMesh("cpu", [[0]])
    for mesh in (three, *others)[: 2 + rank]:
        with pytest.raises(ValueError, match="attach:") as refusal:
            offload.attach(*how.build(), mesh=mesh)
        said.append(str(refusal.value))
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
