"""The compute device as the engine uses it: memory, copies, and what orders them.

[Note: Order on a device]
Work for a device is queued on the calling thread's current stream. One stream runs in order, two
streams in any order, so the engine orders them:

* A lane of the native runner has a stream of its own, and an op of it is over when the device has
  come to its end there. So every thread and every stream sees what a lane has done.
* The user's compute is over when the device is through with it, on each stream that it has used.
  So no op of a lane, nor anything else, needs to know of streams.
* Work of the engine at a home, on the user's thread, is drained at once.

[Note: Blocking events]
A host thread that waits for an event spins on a core, which the update needs, unless the event is
`torch.cuda.Event(blocking=True)`. It defaults to the current device, so it is given a stream.

[Note: Pending errors]
A CUDA runtime call that fails also leaves its error pending in the thread, and the next kernel
launch reports it as its own. So after such a call a kernel is launched and its error ignored.

[Note: Current device]
A runtime call that names no device makes a context on the thread's current one, by default device
0: half a gigabyte for good. Memory may be freed on any thread, as the garbage collector runs there,
so such calls first make this device the current one.

[Note: Scaler]
`torch.amp.GradScaler` copies its scale and its overflow flag to each device with gradients, without
waiting. A copy to pinned CPU memory can then race with the CPU kernel that reads the scale, and
overwrite the overflow that the kernel has flagged. Gradients of offloaded parameters are on the
CPU, so with an accelerator torch's own class is patched to wait for copies to the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.planning.tiers import format_bytes
from offload.runtime.torch_internals import number_copies

Fence = torch.cuda.Event
"""Work that the device has still to finish; `synchronize` waits for it."""


class Device:
    """The CPU as the compute device: its memory is CPU memory, and every call is synchronous."""

    is_host = True
    driver: Accelerator | None = None
    """What registers CPU memory: an accelerator."""

    def __init__(self, torch_device: torch.device):
        self.torch_device = torch_device

    def name(self) -> str:
        """What its maker calls it."""
        return "CPU"

    def free_bytes(self) -> int | None:
        """Free memory; None if it is the CPU's."""
        return None

    def idle_bytes(self) -> int:
        """Bytes of its memory that nobody uses, not even at torch's highest use so far."""
        return 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor in its memory."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def zeros(self, size: int) -> torch.Tensor:
        """`size` zero bytes in its memory, visible to every stream."""
        made = self.empty((size,), torch.uint8).zero_()
        self.drain()
        return made

    def trim(self) -> None:
        """Return the freed memory that torch caches to the system."""

    def identity(self) -> str:
        """What tells it from others of its host; empty where nothing does."""
        return ""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in its memory; never for the CPU."""
        return False

    def stream(self) -> object:
        """The calling thread's current stream, see [Note: Order on a device]."""
        return None

    def new_stream(self) -> Callable[[], contextlib.AbstractContextManager[object]]:
        """What makes contexts in which a thread queues its work on another stream, always one."""
        return contextlib.nullcontext

    def fence(self, stream: object) -> Fence | None:
        """An event behind what is queued on a stream now; None for the CPU."""
        return None

    def handle(self, stream: object) -> int:
        """The number by which a native driver knows a stream."""
        raise NotImplementedError

    def open(self, native: Any) -> Any:
        """The driver by which native lanes use the device; None for the CPU.

        Raises:
            RuntimeError: there is none that can serve, with the reason.
        """
        if not self.is_host:
            raise RuntimeError(f"native lanes have no driver for {self.torch_device.type}")

    def drain(self) -> None:
        """Wait, on the host, for what is queued on the calling thread's current stream."""

    def drain_all(self) -> None:
        """Wait, on the host, for what is queued on any stream: before memory is freed."""

    def refuse_capture(self) -> None:
        """Refuse to work in a capture, whose replay would not run the engine.

        Raises:
            RuntimeError: the calling thread's current stream is being captured.
        """


CPU = Device(torch.device("cpu"))


def compute_device() -> Device:
    """The device of CUDA, or ROCm, that is current, else the CPU."""
    if not torch.cuda.is_available():
        return CPU
    make_scalers_wait()
    return Accelerator(torch.device("cuda", torch.cuda.current_device()))


class PinError(OSError):
    """Memory was not registered; the message has the driver's answer, likely cause and cure."""


_LIKELY = {
    2: "no memory, or no page tables for so much, is left to pin: other programs or ranks hold "
    "it, or a container's limit is near; lower Config.cpu_memory",
    712: "another library has registered this memory already",
}
"""The likely cause by error code, the same in CUDA and ROCm."""

_LIKELY_OTHERWISE = "none can be registered here, as under WSL or in some virtual machines"


def built_for() -> str | None:
    """The platform that torch was built for, with its version; None if only for the CPU."""
    version: Any = torch.version
    numbers = {"CUDA": version.cuda, "ROCm": getattr(version, "hip", None)}
    return next((f"{name} {number}" for name, number in numbers.items() if number), None)


def initialize() -> None:
    """Initialize CUDA or ROCm: raises torch's RuntimeError or AssertionError if none is found."""
    start: Any = torch.cuda.init
    start()


LIBRARY_VARIABLE = "OFFLOAD_LIBCUDA"
"""Environment variable: the library of CUDA's driver, where it is not found by its name."""


class Accelerator(Device):
    """A device of CUDA, or of ROCm, which torch offers under the same names."""

    is_host = False

    def __init__(self, torch_device: torch.device):
        super().__init__(torch_device)
        self.driver = self

    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def free_bytes(self) -> int | None:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def idle_bytes(self) -> int:
        highest = torch.cuda.max_memory_allocated(self.torch_device)
        kept = torch.cuda.memory_reserved(self.torch_device) - highest
        return max(0, (self.free_bytes() or 0) + kept)

    def zeros(self, size: int) -> torch.Tensor:
        """See `Device.zeros`. Raises MemoryError if so much is not free in one block."""
        try:
            return super().zeros(size)
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"{format_bytes(size)} of {self.torch_device} were refused ({error}): likely "
                "other programs, or tensors of this one, hold it; lower Config.device_memory"
            ) from error

    def trim(self) -> None:
        """See `Device.trim` and [Note: Current device]."""
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()

    def identity(self) -> str:
        return str(torch.cuda.get_device_properties(self.torch_device).uuid)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def stream(self) -> Any:
        return torch.cuda.current_stream(self.torch_device)

    def new_stream(self) -> Callable[[], contextlib.AbstractContextManager[object]]:
        make: Any = torch.cuda.Stream
        return functools.partial(torch.cuda.stream, make(self.torch_device))

    def fence(self, stream: Any) -> Any:
        """See `Device.fence` and [Note: Blocking events]."""
        make: Any = torch.cuda.Event
        event = make(blocking=True)
        event.record(stream)
        return event

    def handle(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    def open(self, native: Any) -> Any:
        if getattr(torch.version, "hip", None):
            raise RuntimeError("native lanes have no driver for ROCm")
        library = os.environ.get(LIBRARY_VARIABLE, "libcuda.so.1")
        return native.open_cuda(library, self.torch_device.index or 0)

    def pin(self, address: int, size: int) -> None:
        """Register CPU memory, so that copies of it overlap the host and compute.

        Raises:
            PinError: it was refused.
        """
        runtime: Any = _runtime()
        with torch.cuda.device(self.torch_device):
            code = runtime.cudaHostRegister(address, size, 0)  # Default: mapped and portable.
            if int(code) != 0:
                self._clear_error()
                raise PinError(
                    f"cudaHostRegister of {format_bytes(size)} returned {int(code)}, "
                    f"{runtime.cudaGetErrorString(code)}; likely "
                    f"{_LIKELY.get(int(code), _LIKELY_OTHERWISE)}"
                )

    def unpin(self, address: int) -> None:
        """Undo `pin` at this address."""
        with torch.cuda.device(self.torch_device):
            if int(_runtime().cudaHostUnregister(address)) != 0:
                self._clear_error()

    def drain(self) -> None:
        self.fence(self.stream()).synchronize()

    def drain_all(self) -> None:
        """See `Device.drain_all` and [Note: Current device]."""
        with torch.cuda.device(self.torch_device):
            torch.cuda.synchronize(self.torch_device)

    def refuse_capture(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "an offloaded model ran while a CUDA graph is captured (torch.cuda.graph, "
                "make_graphed_callables): a replay would neither fetch weights nor wait for them. "
                "Capture nothing that the attached model takes part in"
            )

    def _clear_error(self) -> None:
        """See [Note: Pending errors]."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.torch_device).add_(1)


def _runtime() -> Any:
    cudart: Any = torch.cuda.cudart
    return cudart()


_queued: Any = getattr(number_copies, "get", None)


def make_scalers_wait() -> None:
    """Make all scalers of the process wait for copies to the CPU, see [Note: Scaler]."""
    if _queued is not None:
        number_copies.get = _get_after_copy


def _get_after_copy(copies: Any, device: torch.device) -> Any:
    known = copies._per_device_tensors
    if device.type == "cpu" and device not in known:
        known[device] = copies.master.to(device=device, copy=True)
    return _queued(copies, device)
