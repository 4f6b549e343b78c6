"""Files to memory and back: asynchronous O_DIRECT transfers by io_uring, Linux AIO or threads.

    with contextlib.closing(aio.open_backend()) as backend:
        with aio.create_scratch("/mnt/nvme", 1 << 30, backend) as file:
            file.write_from(buffer, offset=0).wait()
            file.read_into(buffer, offset=0).wait()

Layers, upwards: system (calls of the operating system, one seam for simulation), errors, ticket,
counters, part (memory and its place), region (bounds, alignment), file, request (what waits for
threads of Python), queued (how that begins and ends), pool (these threads), native (the compiled
engine), libaio (a package's), backends (which of them serves), scratch (files that leave nothing
behind), joint (tickets of several transfers), volume (one stretch of bytes over several drives).
Simulations, behind the same seam: simulated (faults), drives (of given shape), crash (lost power).
Measuring, not imported here: sweep, load, figures, fio, bench.
Knows nothing of tensors and imports nothing of `offload` or `cpu_adam`.
"""

from aio.backends import BACKEND_NAMES, Probe, open_backend, probe
from aio.counters import Counters
from aio.crash import CrashIO
from aio.drives import Direction, Drive, DriveIO
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
    "BACKEND_NAMES",
    "Counters",
    "CrashIO",
    "create_scratch",
    "create_volume",
    "Direction",
    "Directory",
    "Drive",
    "DriveIO",
    "File",
    "IO",
    "JointTicket",
    "MemoryIO",
    "open_backend",
    "Pool",
    "Probe",
    "probe",
    "Region",
    "SimulatedIO",
    "Stripes",
    "stripes",
    "SystemIO",
    "Ticket",
    "UNIT_BYTES",
    "Volume",
    "wait_all",
    "wait_any",
]
