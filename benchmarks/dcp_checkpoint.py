"""Makes the checkpoint in tests/data/dcp: FSDP2 of torch 2.13 on two processes on the CPU.

    python benchmarks/dcp_checkpoint.py tests/data/dcp

Vectors and matrices with an odd number of columns are cut by rows, the others by columns.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from benchmarks.deepspeed_checkpoints import Net, optimizer_of

RANKS, STEPS, PORT = 2, 3, 29_640


def columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % RANKS == 0 else None


def make(rank: int, out: str) -> None:
    """Trains and saves as one of the processes."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)), shard_placement_fn=columns)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        tokens = torch.randint(0, 11, (2, 5), generator=generator)
        logits = model(tokens).view(-1, 11)
        nn.functional.cross_entropy(logits, tokens.roll(1, 1).view(-1)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    found = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    others = {"epoch": 2, "lr_scheduler": scheduler.state_dict()}
    dcp.save({**found, **others}, checkpoint_id=out)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(make, (sys.argv[1],), nprocs=RANKS)
