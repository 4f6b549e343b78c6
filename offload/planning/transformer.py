"""A decoder of alike blocks, as far as sizes and work go: a model that need not be there. Pure.

[Note: Work of a block]
Matrix products alone are counted, as the published results do: 24 b s h^2 + 4 b s^2 h of a block's
forward for b sequences of s tokens and width h, twice that of its backward, and its forward once
more where it is recomputed; 2 b s h V of the head, which is never recomputed (Narayanan et al.
2021, arXiv:2104.04473, section 5.1, equation 3). Attention is counted whole, causal or not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.planning.planner import Grain
from offload.planning.profile import (
    Parameter,
    Profile,
    Sharding,
    Unit,
    lay_out_unit,
    profile_of,
)

SHAPES: dict[str, tuple[int, int]] = {
    "1b": (16, 2048),
    "7b": (32, 4096),
    "13b": (40, 5120),
    "30b": (48, 7168),
    "70b": (88, 8192),
    "175b": (96, 12288),
    "530b": (105, 20480),
    "1t": (128, 25600),
    "2t": (160, 32768),
    "10t": (200, 65536),
    "20t": (205, 90112),
}
"""Layers and width of models by their parameters, from 175b on as they were published."""

PARTS = (1, 2, 4)
"""Units that a block can be: all of it; attention and feed-forward; each matrix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformer:
    """A model of blocks of 12 h^2 + 13 h parameters between an embedding and a head."""

    layers: int
    hidden: int
    vocabulary: int = 51200
    parts: int = 1
    """Units of a block, see `PARTS`."""
    recompute: bool = True
    """Whether blocks run once more in backward."""

    @classmethod
    def named(cls, text: str) -> Transformer:
        """One of `SHAPES`, or layers x width as `96x12288`; else raises ValueError."""
        found = SHAPES.get(text.lower())
        if found is None and (match := re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,6})", text)):
            found = int(match[1]), int(match[2])
        if found is None:
            raise ValueError(
                f"model {text!r}: expected {', '.join(SHAPES)}, or layers x width such as 96x12288"
            )
        return cls(layers=found[0], hidden=found[1])

    @property
    def parameters(self) -> int:
        """All of them, those of embedding and head too."""
        block = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * block + 2 * self.vocabulary * self.hidden

    def profile(self, cut: Grain, sharding: Sharding, *, gradient_dtype: str = "param") -> Profile:
        """Its units in bfloat16."""
        names = "qkv", "out", "up", "down"
        matrices = [[part * self.hidden**2] for part in (3, 1, 4, 4)]
        matrices[0].append(13 * self.hidden)  # Biases and norms.
        each = len(names) // self.parts
        ends = [[self.vocabulary * self.hidden]]
        parts = [matrices[at : at + each] for at in range(0, len(names), each)]

        def unit(name: str, sizes: Sequence[Sequence[int]], *, backward: bool = True) -> Unit:
            flat = [size for some in sizes for size in some]
            wanted = [Parameter(f"{name}.{i}", (n,), "bfloat16", True) for i, n in enumerate(flat)]
            return lay_out_unit(
                name,
                wanted,
                gradient_dtype=gradient_dtype,
                backward=backward,
                chunk_elements=cut.elements,
                ranks=sharding.ranks,
            )

        made = [unit(names[at * each], some) for at, some in enumerate(parts)]
        first, last = unit("embedding", ends, backward=False), unit("head", ends)
        full = [first, *made * self.layers, last]
        units = [replace(one, name=f"{one.name}.{at}") for at, one in enumerate(full)]
        return profile_of(units, chunk_stages=cut.stages, sharding=sharding)

    def forward_flops(self, unit: int, tokens: int, sequence: int) -> float:
        """Work of a unit's forward, see [Note: Work of a block]."""
        hidden, last = float(self.hidden), self.layers * self.parts + 1
        if unit in (0, last):
            return 2 * self.vocabulary * hidden * tokens if unit else 0.0
        part, attention = (unit - 1) % self.parts, 4.0 * sequence * hidden * tokens
        shares = {1: (12,), 2: (4, 8), 4: (3, 1, 4, 4)}[self.parts]
        return 2 * shares[part] * hidden**2 * tokens + (attention if part == 0 else 0.0)

    def flops(self, tokens: int, sequence: int) -> float:
        """Work of forward and backward of so many tokens."""
        units = range(self.layers * self.parts + 2)
        forward = sum(self.forward_flops(unit, tokens, sequence) for unit in units)
        head = self.forward_flops(units[-1], tokens, sequence)
        return 3 * forward + (forward - head if self.recompute else 0.0)

    def activation_bytes(self, tokens: int) -> int:
        """About what backward needs of so many tokens in bfloat16: the inputs of blocks, and 34 h
        for each token of a block that is at work (Korthikanti et al. 2022, arXiv:2205.05198,
        equation 2, without scores of attention), or of all blocks."""
        once, kept = 34 * self.hidden * tokens, 2 * self.hidden * tokens
        logits = 6 * self.vocabulary * tokens
        return max(logits, once) + self.layers * (kept if self.recompute else once)
