"""The optimizer update: gradient + record -> record + weight, knowing nothing of files or tiers.

`formats` says which slots the optimizer state of a chunk has and where they lie in its record;
`reference` is the update itself as readable torch ops. What is imported here is the wall that
faster kernels stand behind: they equal the reference bit for bit.
"""

from cpu_adam.formats import FORMATS, Slot, StateFormat, format_for
from cpu_adam.reference import (
    AdamHyper,
    accumulate,
    join,
    rebase,
    split,
    sum_of_squares,
    update,
    views,
)

__all__ = [
    "FORMATS",
    "AdamHyper",
    "Slot",
    "StateFormat",
    "accumulate",
    "format_for",
    "join",
    "rebase",
    "split",
    "sum_of_squares",
    "update",
    "views",
]
