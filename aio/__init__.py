"""Files to memory and back: asynchronous O_DIRECT transfers by io_uring, Linux AIO or threads.

    with contextlib.closing(aio.open_backend()) as backend:
        with aio.create_scratch("/mnt/nvme", 1 << 30, backend) as file:
            file.write_from(buffer, offset=0).wait()
            file.read_into(buffer, offset=0).wait()

Layers, upwards: system (calls of the operating system, one seam for simulation), errors, ticket,
counters, pool (threads of Python), native (the compiled engine), libaio (a package's), file
(alignment, bounds), backends (which of them serves), scratch (files that leave nothing behind).
Knows nothing of tensors and imports nothing of `offload` or `cpu_adam`.
"""

from aio.backends import BACKEND_NAMES, Probe, open_backend, probe
from aio.counters import Counters
from aio.file import Backend, File
from aio.pool import Pool
from aio.scratch import create_scratch
from aio.simulated import MemoryIO, SimulatedIO
from aio.system import ALIGN_BYTES, IO, SystemIO
from aio.ticket import Ticket, wait_any

__all__ = [
    "ALIGN_BYTES",
    "BACKEND_NAMES",
    "Backend",
    "Counters",
    "File",
    "IO",
    "MemoryIO",
    "Pool",
    "Probe",
    "SimulatedIO",
    "SystemIO",
    "Ticket",
    "create_scratch",
    "open_backend",
    "probe",
    "wait_any",
]
