"""A byte-level GPT: pre-norm RMSNorm, rotary positions, SwiGLU, causal attention.

Every byte is a token, so there is no tokenizer and the loss is in nats per byte. The model holds
parameters only, no buffers: it can be built on the meta device and given memory piece by piece,
each module filled by `init`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256
HEAD_WIDTH = 64
ROPE_BASE = 10_000.0

TEMPERATURE = 0.8
"""Below 1 the likely bytes become likelier."""

SAMPLE_SECONDS_MAX = 10.0
"""A byte takes a whole forward, through every tier: a large model gets no further than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How wide and how deep a GPT is."""

    width: int
    depth: int

    @property
    def heads(self) -> int:
        """Attention heads, each `HEAD_WIDTH` wide."""
        return self.width // HEAD_WIDTH

    @property
    def hidden(self) -> int:
        """Width inside the feed-forward layer: 8/3 of the model's, a multiple of 64."""
        return round(self.width * 8 / 3 / 64) * 64


SIZES: dict[str, Shape] = {
    "10m": Shape(width=384, depth=5),
    "30m": Shape(width=576, depth=7),
    "100m": Shape(width=768, depth=14),
    "200m": Shape(width=1024, depth=16),
    "500m": Shape(width=1280, depth=26),
    "1b": Shape(width=2048, depth=20),
    "3b": Shape(width=3072, depth=26),
    "7b": Shape(width=4096, depth=34),
}
"""Shapes by the parameters they come to, within a tenth."""


class ToResidual(nn.Linear):
    """A projection whose output is added to the residual stream."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = ToResidual(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """`(batch, length, width)` to the same."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = qkv.unbind(2)
        y = F.scaled_dot_product_attention(
            rotate(query, rope), rotate(key, rope), value, is_causal=True
        )
        projected: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return projected


class FeedForward(nn.Module):
    """SwiGLU: a gated hidden layer (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = ToResidual(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, length, width)` to the same."""
        projected: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return projected


class Block(nn.Module):
    """One layer: attention, then feed-forward, each read from a normalised residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.width)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """`(batch, length, width)` to the same."""
        x = x + self.attention(self.attention_norm(x), rope)
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return x


class GPT(nn.Module):
    """Bytes in, for each the logits of the next byte out.

    Args:
        shape: width and depth.
        recompute: keep only each block's input for backward and run the block again there.
    """

    def __init__(self, shape: Shape, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Integers `(batch, length)` to logits `(batch, length, 256)`."""
        x = self.embedding(tokens)
        rope = rotations(tokens.shape[1], x)
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, use_reentrant=False)
            else:
                x = block(x, rope)
        logits: Tensor = self.head(self.norm(x))
        return logits


def init(module: nn.Module) -> None:
    """Fills `module`'s own parameters; what it draws depends on torch's seed alone.

    Projections into the residual stream start at zero, so that each block starts as the identity.
    """
    with torch.no_grad():
        if isinstance(module, ToResidual):
            module.weight.zero_()
        elif isinstance(module, nn.Linear):
            module.weight.normal_(std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            module.weight.normal_()
        elif isinstance(module, nn.RMSNorm):
            module.weight.fill_(1.0)


def rotations(length: int, like: Tensor) -> Tensor:
    """Cosine and sine of each position's rotation, `(2, length, HEAD_WIDTH / 2)`.

    Su et al. 2021, arXiv:2104.09864, section 3.2.2. The angles are computed in float32: in
    bfloat16 neighbouring positions would coincide from 256 on.
    """
    pairs = torch.arange(0, HEAD_WIDTH, 2, dtype=torch.float32, device=like.device)
    positions = torch.arange(length, dtype=torch.float32, device=like.device)
    angles = torch.outer(positions, ROPE_BASE ** (-pairs / HEAD_WIDTH))
    return torch.stack((angles.cos(), angles.sin())).to(like.dtype)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turns each pair of channels of `x`, `(..., length, HEAD_WIDTH)`, by its position's angle."""
    cosine, sine = rope
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)


def generate(model: nn.Module, prompt: bytes, count: int, *, seed: int, window: int) -> bytes:
    """At most `count` bytes after `prompt`; the model sees the last `window` of all.

    The same for the same weights and seed, but where the time was up.
    """
    device = next(model.parameters()).device
    random = torch.Generator().manual_seed(seed % 2**63)
    text, until = list(prompt), time.monotonic() + SAMPLE_SECONDS_MAX
    model.eval()
    with torch.no_grad():
        while len(text) < len(prompt) + count and time.monotonic() < until:
            seen = torch.tensor([text[-window:]], device=device)
            likely = torch.softmax(model(seen)[0, -1].float().cpu() / TEMPERATURE, dim=-1)
            text.append(int(torch.multinomial(likely, 1, generator=random)))
    model.train()
    return bytes(text[len(prompt) :])


def readable(text: bytes) -> str:
    """Text for a terminal: what is no character, or would move the cursor, is replaced."""
    decoded = text.decode("utf-8", "replace").replace("\r\n", "\n").expandtabs(4)
    return "".join(
        one if one == "\n" or one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in decoded
    )
