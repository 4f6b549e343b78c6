"""The optimizer update: gradient + record -> record + weight, knowing nothing of files or tiers.

`formats` says which slots the optimizer state of a chunk has and where they lie in its record;
`reference` is the update itself as readable torch ops, the definition, with `rules` (Adam, Lion,
SGD) and the codes of `compact`. What is imported here equals it bit for bit: compiled kernels
(`native`) where they are built and the tensors lie in CPU memory, a device's where somebody
launches them, the reference elsewhere. `kernel` tells which of the first is in use and why.
`crc32c` is for whoever stores records and wants to know that they came back; `CPUAdam` and its like
are optimizers for torch, of their own.
"""

from cpu_adam.checksum import crc32c
from cpu_adam.choice import Kernel, kernel, set_threads, threads
from cpu_adam.formats import FORMATS, Slot, StateFormat, format_for
from cpu_adam.hyper import AdamHyper, LionHyper, SGDHyper
from cpu_adam.native import (
    accumulate,
    join,
    split,
    sum_of_squares,
    update,
    update_parts,
)
from cpu_adam.optimizers import CPUSGD, CPUAdam, CPULion
from cpu_adam.reference import views
from cpu_adam.spans import Part

__all__ = [
    "CPUAdam",
    "CPULion",
    "CPUSGD",
    "FORMATS",
    "AdamHyper",
    "Kernel",
    "LionHyper",
    "Part",
    "SGDHyper",
    "Slot",
    "StateFormat",
    "accumulate",
    "crc32c",
    "format_for",
    "join",
    "kernel",
    "set_threads",
    "split",
    "sum_of_squares",
    "threads",
    "update",
    "update_parts",
    "views",
]
