"""A small GPT over several ranks, under torchrun; the loop is that of one process.

    torchrun --nproc-per-node 2 examples/ranks.py [DIRECTORY]

Only what is of torch.distributed itself is new: the process group, and data that differs by rank. A
directory is where the trained model is saved.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import offload

WIDTH, DEPTH, STEPS, BATCH, LENGTH = 128, 4, 30, 8, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.mix(self.norm(x))[0]
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        x = self.bytes(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


device = "cpu"
if torch.accelerator.is_available():
    device = torch.accelerator.current_accelerator()
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
rank = dist.get_rank()

torch.manual_seed(0)  # All ranks build the same model; attach compares.
model = Model().to(device, torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
torch.manual_seed(rank + 1)  # Each rank draws other batches.
model, optimizer = offload.attach(
    model,
    optimizer,
    offload.Config(params="cpu", gradients="cpu", optimizer="cpu", max_grad_norm=1.0),
)

text = torch.frombuffer(bytearray(Path(__file__).read_bytes() * 20), dtype=torch.uint8)
for step in range(STEPS):
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
    window = text[starts + torch.arange(LENGTH + 1)].long().to(device)
    loss = F.cross_entropy(model(window[:, :-1]).float().flatten(0, 1), window[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.3f}, norm {optimizer.grad_norm():.3f}")

if len(sys.argv) > 1:  # All ranks call it; any number of ranks, or one, can load it.
    offload.save(model, optimizer, sys.argv[1])
dist.destroy_process_group()
