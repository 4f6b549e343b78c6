"""What torch takes of a device for tensors that each have memory of their own. Pure.

[Note: Blocks]
The caching allocators of CUDA, ROCm and XPU give out blocks of multiples of 512 bytes (`round_size`
in c10/cuda/CUDACachingAllocator.cpp, `kMinBlockSize` in c10/core/AllocatorConfig.h). Of a larger
free block the rest is cut off if it is at least 512 bytes, for blocks up to 1 MiB, and only if it
is more than 1 MiB for larger ones (`should_split`, `kSmallSize`): up to so much is taken beside
what was asked. That bounds `torch.accelerator.memory_allocated`, whatever else the process has
there, as long as the allocator is not told otherwise (`max_split_size_mb` and
`roundup_power2_divisions` of PYTORCH_ALLOC_CONF). What is left of a segment (2, 20 or more MiB, as
the driver gives them) goes to whoever asks next, so it is not counted here. The arena is one block.
"""

from __future__ import annotations

from offload.profile import ITEM_BYTES, Unit
from offload.records import Kind, round_up

STEP_BYTES = 512
SMALL_BYTES_MAX = 1 << 20
"""Of a block from which all that is not asked for is cut off."""

SUM_BYTES = 8
"""Of the sum of the squares of a span of a gradient, a float64."""


def block_bytes(size: int) -> int:
    """Most bytes of the block that a tensor of `size` bytes gets."""
    asked = round_up(size, STEP_BYTES)
    return asked if asked <= SMALL_BYTES_MAX else asked + SMALL_BYTES_MAX


def apart_bytes(unit: Unit, kind: Kind) -> int:
    """Most bytes of the blocks of the weights, or of the gradients, of a unit."""
    return sum(
        block_bytes(one.elements * ITEM_BYTES[one.dtype])
        for one in unit.parameters
        if kind == "weight" or one.trainable
    )


def sums_bytes(unit: Unit) -> int:
    """Bytes of the sums of the squares of all gradients of a unit."""
    return SUM_BYTES * sum(len(chunk.spans) for chunk in unit.chunks)
