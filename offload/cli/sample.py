"""A sample of what a model has learned: text that it goes on with, byte by byte."""

from __future__ import annotations

import time

import torch
from torch import nn

TEMPERATURE = 0.8
"""Below 1 the likely bytes become likelier."""

SECONDS_MAX = 10.0
"""A byte takes a whole forward, through every tier: a large model gets no further than this."""


def generate(model: nn.Module, prompt: bytes, count: int, *, seed: int, window: int) -> bytes:
    """At most `count` bytes after `prompt`; the model sees the last `window` of all.

    The same for the same weights and seed, but where the time was up.
    """
    device = next(model.parameters()).device
    random = torch.Generator().manual_seed(seed % 2**63)
    text, until = list(prompt), time.monotonic() + SECONDS_MAX
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
