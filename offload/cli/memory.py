"""Memory of a training run that the engine does not plan: activations, and what runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from offload.cli import gpt
from offload.cli.settings import Train
from offload.config import format_bytes
from offload.device import compute_device
from offload.machine import host_free_bytes

_SMALLER = "lower --batch (and raise --micro-batches instead), or --seq-len, or give --recompute"


def check(settings: Train) -> None:
    """Refuses a micro-batch whose activations cannot fit, in place of dying of it later.

    Raises:
        ValueError: it needs more than is free, at the very least.
    """
    shape, value_bytes = gpt.SIZES[settings.size], getattr(torch, settings.dtype).itemsize
    needed = gpt.activation_bytes_least(shape, value_bytes, settings.recompute)
    needed *= settings.batch * settings.seq_len
    free = compute_device().free_bytes()
    free = host_free_bytes() if free is None else free
    if needed > free:
        raise ValueError(
            f"--batch {settings.batch} windows of --seq-len {settings.seq_len} need "
            f"{format_bytes(needed)} of memory for activations at the least, and "
            f"{format_bytes(free)} are free: {_SMALLER}"
        )


@contextlib.contextmanager
def short(where: str) -> Iterator[None]:
    """Names what to try where torch or numpy are refused memory.

    Raises:
        MemoryError: they were.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # Of the CPU torch raises a plain RuntimeError.
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if known or "DefaultCPUAllocator" in str(error):
            raise MemoryError(f"no memory is left {where}: {_SMALLER}") from error
        raise
