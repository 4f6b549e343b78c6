"""Files to memory and back: asynchronous O_DIRECT transfers over preadv and pwritev.

    with aio.Pool(threads=4) as pool, aio.create_scratch("/mnt/nvme", 1 << 30, pool) as file:
        file.write_from(buffer, offset=0).wait()
        file.read_into(buffer, offset=0).wait()

Layers, upwards: system (calls of the operating system, one seam for simulation), errors, ticket,
pool (worker threads), region (alignment, bounds), file, scratch (files that leave nothing behind),
joint (tickets of several transfers), volume (one stretch of bytes over several drives).
Knows nothing of tensors and imports nothing of `offload` or `cpu_adam`.
"""

from aio.file import Backend, File
from aio.joint import JointTicket, wait_all, wait_any
from aio.pool import Pool
from aio.region import Region
from aio.scratch import create_scratch
from aio.simulated import MemoryIO, SimulatedIO
from aio.system import ALIGN_BYTES, IO, SystemIO
from aio.ticket import Ticket
from aio.volume import UNIT_BYTES, Directory, Stripes, Volume, create_volume, stripes

__all__ = [
    "ALIGN_BYTES",
    "Backend",
    "Directory",
    "File",
    "IO",
    "JointTicket",
    "MemoryIO",
    "Pool",
    "Region",
    "SimulatedIO",
    "Stripes",
    "SystemIO",
    "Ticket",
    "UNIT_BYTES",
    "Volume",
    "create_scratch",
    "create_volume",
    "stripes",
    "wait_all",
    "wait_any",
]
