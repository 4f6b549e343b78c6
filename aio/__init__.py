"""Files to memory and back: asynchronous O_DIRECT transfers by io_uring, Linux AIO or threads.

    with contextlib.closing(aio.open_backend()) as backend:
        with aio.create_scratch("/mnt/nvme", 1 << 30, backend) as file:
            file.write_from(buffer, offset=0).wait()
            file.read_into(buffer, offset=0).wait()

Layers, upwards: system (calls of the operating system, one seam for simulation), errors, transfer
(tickets), region (bounds, alignment), file (and what a backend is to it), threads (of Python),
native (the compiled engine), libaio (a package's), backends (which of them serves), scratch (files
and others), volume (one stretch of bytes over several drives), chunks (of a volume,
with checksums).
Knows nothing of tensors and imports nothing of `offload` or `cpu_adam`.
"""

from aio.backends import BACKEND_NAMES, Probe, open_backend, probe
from aio.chunks import ChunkEntry, Chunks
from aio.file import Backend, File
from aio.region import Region
from aio.scratch import create_file, create_scratch
from aio.stream import Reader, Writer
from aio.system import ALIGN_BYTES, IO
from aio.threads import ThreadBackend
from aio.transfer import JointTicket, Ticket, wait_all
from aio.volume import (
    UNIT_BYTES,
    Directory,
    NativePart,
    Stripes,
    Volume,
    create_volume,
    place_volume,
    stripes,
)

__all__ = [
    "ALIGN_BYTES",
    "Backend",
    "BACKEND_NAMES",
    "ChunkEntry",
    "Chunks",
    "create_file",
    "create_scratch",
    "create_volume",
    "Directory",
    "File",
    "IO",
    "JointTicket",
    "NativePart",
    "open_backend",
    "place_volume",
    "Probe",
    "probe",
    "Reader",
    "Region",
    "Stripes",
    "stripes",
    "ThreadBackend",
    "Ticket",
    "UNIT_BYTES",
    "Volume",
    "wait_all",
    "Writer",
]
