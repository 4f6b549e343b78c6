"""Files to memory and back: asynchronous O_DIRECT transfers over preadv and pwritev.

    with aio.Pool(threads=4) as pool, aio.create_scratch("/mnt/nvme", 1 << 30, pool) as file:
        file.write_from(buffer, offset=0).wait()
        file.read_into(buffer, offset=0).wait()

Layers, upwards: system (calls of the operating system, one seam for simulation), errors, ticket,
pool (worker threads), file (alignment, bounds), scratch (files that leave nothing behind).
Simulations, behind the same seam: simulated (faults), drives (of given shape), crash (lost power).
Measuring, not imported here: sweep, load, figures, fio, bench.
Knows nothing of tensors and imports nothing of `offload` or `cpu_adam`.
"""

from aio.crash import CrashIO
from aio.drives import Direction, Drive, DriveIO
from aio.file import Backend, File
from aio.pool import Pool
from aio.scratch import create_scratch
from aio.simulated import MemoryIO, SimulatedIO
from aio.system import ALIGN_BYTES, IO, SystemIO
from aio.ticket import Ticket, wait_any

__all__ = [
    "ALIGN_BYTES",
    "Backend",
    "CrashIO",
    "Direction",
    "Drive",
    "DriveIO",
    "File",
    "IO",
    "MemoryIO",
    "Pool",
    "SimulatedIO",
    "SystemIO",
    "Ticket",
    "create_scratch",
    "wait_any",
]
