"""A transformer, as far as sizes and work go: a model that need not be there. Pure.

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
from itertools import product
from typing import Any

from offload.planning.planner import Grain
from offload.planning.profile import Parameter, Profile, Sharding, lay_out_unit, profile_of

_SIZES = """
    1b=16x2048 7b=32x4096 13b=40x5120 30b=48x7168 70b=88x8192 175b=96x12288 530b=105x20480
    1t=128x25600 2t=160x32768 10t=200x65536 20t=205x90112
"""
SHAPES = dict(one.split("=") for one in _SIZES.split())
"""Layers and width of models by their parameters, from 175b on as they were published."""

PARTS = (1, 2, 4)
"""Units that a block can be: all of it; attention and feed-forward; each matrix."""

VOCABULARY = 51200


@dataclass(frozen=True, slots=True)
class UnitWork:
    """A unit, and what a token does in it."""

    name: str
    flat: Sequence[Parameter]
    used: float
    """Elements that a token meets."""
    attends: float = 0.0
    """How often it is all of a layer's attention."""
    block: bool = True
    """Whether it lies in a block, which may be recomputed."""
    backward: bool = True
    """Whether its backward needs its weights."""


@dataclass(frozen=True, slots=True)
class Transformer:
    """Layers of some width between an embedding and a head."""

    layers: int
    hidden: int
    vocabulary: int
    units: Sequence[UnitWork]
    recompute: bool = True
    """Whether blocks run once more in backward."""
    parts: int = 1
    """Units of a GPT's block, see `PARTS`."""

    @property
    def parameters(self) -> int:
        """All of them, those of embedding and head too."""
        return sum(one.elements for unit in self.units for one in unit.flat)

    def profile(self, cut: Grain, sharding: Sharding, *, gradient_dtype: str = "param") -> Profile:
        """Its units as they are laid out."""
        how: Any = {"chunk_elements": cut.elements, "ranks": sharding.ranks}
        units = [
            lay_out_unit(u.name, u.flat, gradient_dtype=gradient_dtype, backward=u.backward, **how)
            for u in self.units
        ]
        return profile_of(units, chunk_stages=cut.stages, sharding=sharding)

    def flops_of(self, unit: int, backward: bool, tokens: int, sequence: int) -> float:
        """Work of a unit's forward, or of its backward and what that recomputes; see [Note: Work
        of a block]. Of frozen weights no gradients are computed."""
        one = self.units[unit]
        times = 1 + one.flat[0].trainable + (self.recompute and one.block) if backward else 1
        return times * 2 * tokens * (one.used + one.attends * 2 * sequence * self.hidden)

    def flops(self, tokens: int, sequence: int) -> float:
        """Work of forward and backward of so many tokens."""
        both = product(range(len(self.units)), (False, True))
        return sum(self.flops_of(*one, tokens, sequence) for one in both)

    def activation_bytes(self, tokens: int) -> int:
        """About what backward needs of so many tokens in bfloat16: the inputs of blocks, and 34 h
        for each token of a block that is at work (Korthikanti et al. 2022, arXiv:2205.05198,
        equation 2, without scores of attention), or of all blocks."""
        once, kept = 34 * self.hidden * tokens, 2 * self.hidden * tokens
        logits = 6 * self.vocabulary * tokens
        return max(logits, once) + self.layers * (kept if self.recompute else once)


def gpt(text: str, *, parts: int = 1, recompute: bool = True, trains: bool = True) -> Transformer:
    """A GPT in bfloat16, of blocks of 12 h^2 + 13 h parameters in so many `PARTS`: one of `SHAPES`,
    or layers x width as `96x12288`. Raises ValueError for any other text."""
    shape = SHAPES.get(text.lower(), text)
    if not (match := re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,6})", shape)):
        raise ValueError(
            f"model {text!r}: expected {', '.join(SHAPES)}, layers x width such as 96x12288, or a "
            "folder of this machine with a config.json of Hugging Face"
        )
    layers, hidden = map(int, match.groups())

    def flat(name: str, sizes: Sequence[int]) -> list[Parameter]:
        return [Parameter(f"{name}.{i}", (n,), "bfloat16", trains) for i, n in enumerate(sizes)]

    shares, block = {"qkv": 3, "out": 1, "up": 4, "down": 4}, list[UnitWork]()
    for inside in zip(*[iter(shares)] * (len(shares) // parts)):
        sizes, first = [shares[name] * hidden**2 for name in inside], inside[0] == "qkv"
        used = sum(sizes)
        sizes[1:1] = [13 * hidden] * first  # Biases and norms.
        block.append(UnitWork(inside[0], flat(inside[0], sizes), used, attends=float(first)))
    size = VOCABULARY * hidden
    units = [
        UnitWork("embedding", flat("embedding", [size]), 0.0, block=False, backward=False),
        *(replace(one, name=f"{one.name}.{layer}") for layer in range(layers) for one in block),
        UnitWork("head", flat("head", [size]), size, block=False),
    ]
    return Transformer(layers, hidden, VOCABULARY, units, recompute, parts)
