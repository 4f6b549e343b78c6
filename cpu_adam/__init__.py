"""The optimizer update: gradient + record -> record + weight, knowing nothing of files or tiers.

`formats` says which slots the optimizer state of a chunk has and where they lie in its record;
`reference` is the update itself as readable torch ops, the definition. What is imported here equals
it bit for bit: compiled kernels (`native`) where they are built and the tensors lie in CPU memory,
the reference elsewhere. `kernel` tells which is in use and why.
"""

from cpu_adam.choice import Kernel, kernel, set_threads, threads
from cpu_adam.formats import FORMATS, Slot, StateFormat, format_for
from cpu_adam.native import (
    Span,
    UpdateTable,
    accumulate,
    join,
    rebase,
    split,
    sum_of_squares,
    update,
)
from cpu_adam.reference import AdamHyper, views

__all__ = [
    "FORMATS",
    "AdamHyper",
    "Kernel",
    "Slot",
    "Span",
    "StateFormat",
    "UpdateTable",
    "accumulate",
    "format_for",
    "join",
    "kernel",
    "rebase",
    "set_threads",
    "split",
    "sum_of_squares",
    "threads",
    "update",
    "views",
]
