"""A stock PyTorch training loop; only the line with `offload.attach` is not plain torch."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import offload

WIDTH, HEADS, DEPTH = 256, 4, 4
STEPS, BATCH, LENGTH = 100, 8, 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens):
        x = self.bytes(tokens) + self.positions(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def windows(text):
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
    window = text[starts + torch.arange(LENGTH + 1)].long().to(device)
    return window[:, :-1], window[:, 1:]


def loss_on(text):
    inputs, targets = windows(text)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


torch.manual_seed(0)
device = torch.device("cpu")
if torch.accelerator.is_available():
    device = torch.accelerator.current_accelerator()
library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in library)), dtype=torch.uint8)
training, held_out = text[: -len(text) // 20], text[-len(text) // 20 :]

model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = offload.attach(model, optimizer, offload.Config(optimizer="cpu"))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

for step in range(1, STEPS + 1):
    loss = loss_on(training)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if step % 10 == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}")

with torch.no_grad():
    mean = sum(loss_on(held_out).item() for _ in range(20)) / 20
print(f"held-out loss {mean:.3f} nats per byte")
