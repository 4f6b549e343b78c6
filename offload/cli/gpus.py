"""What GPUs compute in a second, as their makers say it, and what people call them."""

from __future__ import annotations

import re

GPUS = {
    "b200": 2250e12,
    "h200": 989e12,
    "h100": 989e12,
    "a100": 312e12,
    "mi300x": 1307e12,
    "l40s": 362e12,
    "l40": 181e12,
    "l4": 121e12,
    "a40": 150e12,
    "a30": 165e12,
    "a10": 125e12,
    "a10g": 70e12,
    "a6000": 155e12,
    "v100": 125e12,
    "t4": 65e12,
    "rtx5090": 210e12,
    "rtx5080": 113e12,
    "rtx5070": 62e12,
    "rtx4090": 165e12,
    "rtx4080": 97e12,
    "rtx4070": 58e12,
    "rtx4060": 30e12,
    "rtx3090": 71e12,
    "rtx3080": 60e12,
    "rtx3070": 41e12,
    "rtx3060": 25e12,
}
"""Dense FLOP per second of the tensor cores, bf16 (v100, t4: fp16, they have no bf16), sums in
float32, no sparsity: half of a data sheet's figure "with sparsity".

The vendors' data sheets; of GeForce NVIDIA's architecture papers (Ampere GA102, Ada, RTX
Blackwell), and where these lack a card (rtx3060, rtx4060, rtx4070) SMs x boost clock x 512, which
gives the papers' figures of the others, too.
"""

TFLOPS_MAX = 100_000.0
"""More is a mistake in the unit."""

_MADE_BY = re.compile(r"nvidia|geforce|tesla|amd|instinct|[\s_-]")


def named(text: str) -> str | None:
    """The row of `GPUS` that is meant, however it is spelt; None where it is none.

    >>> named("RTX 3090"), named("NVIDIA GeForce rtx-4060"), named("4070"), named("RTX A6000")
    ('rtx3090', 'rtx4060', 'rtx4070', 'a6000')
    """
    short = _MADE_BY.sub("", text.lower())
    spelt = (short, f"rtx{short}", short.removeprefix("rtx"))
    return next((name for name in spelt if name in GPUS), None)


def flops_of(text: str) -> float | None:
    """FLOP per second of a GPU, or of a number of TFLOP/s; None where it is neither.

    >>> flops_of("rtx 3070"), flops_of("40.5"), flops_of("40 TFLOP/s"), flops_of("0")
    (41000000000000.0, 40500000000000.0, 40000000000000.0, None)
    """
    if (name := named(text)) is not None:
        return GPUS[name]
    found = re.fullmatch(
        r"(\d{1,9}(?:\.\d{1,6})?)\s?(?:t|tflops?|tflop/s)?", text.strip().lower(), re.ASCII
    )
    tflops = float(found[1]) if found else 0.0
    return tflops * 1e12 if 1 <= tflops <= TFLOPS_MAX else None


def shown(text: str) -> str:
    """What a GPU that `flops_of` knows is called in a sentence.

    >>> shown("rtx 3070"), shown("40.50")
    ('RTX3070', 'a GPU of 40.5 TFLOP/s')
    """
    name = named(text)
    return f"a GPU of {(flops_of(text) or 0) / 1e12:g} TFLOP/s" if name is None else name.upper()
