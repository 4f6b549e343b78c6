"""What `torch.accelerator` has no word for: pinned memory, events that block, NUMA nodes.

The only file that calls CUDA by name; ROCm answers to the same names in torch. Any other kind of
accelerator gets `Driver`, which does without.

[Note: Pending errors]
A call of the CUDA runtime that fails returns its error and also leaves it pending in the thread,
where the next launch of a kernel finds it and blames an op that has done nothing wrong. So after
each such failure a kernel is launched that finds the error and is thrown away. (Each copy of the
runtime in a process has pending errors of its own, and a launch asks the right one: torch's.)

[Note: Threads and devices]
A thread begins with device 0 as its current one, and a call of the runtime that names no device
makes a context there, half a gigabyte that stays. Memory may be given back by any thread, as the
garbage collector does. So such calls are made with our device as the current one.

[Note: Blocking events]
`torch.Event` takes `blocking=True` and drops it (torch/csrc/Event.cpp), so who waits for one on the
host spins a core that the update needs. `torch.cuda.Event` keeps it. Its methods take streams of
`torch.cuda` alone and look at no type, and without a stream they take that of the thread's current
device, which need not be ours: so a stream is always given, and always of that class.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from offload.config import format_bytes
from offload.task import Fence


class PinError(OSError):
    """Memory was not registered; the message says what refused it and how."""

    def __init__(self, message: str, likely: str = ""):
        """With what is likely the cause, and what to try, where there is anything to say."""
        super().__init__(message)
        self.likely = likely


_LIKELY = {
    1: "memory of this kind cannot be registered here, as under WSL or in some virtual machines",
    2: "no memory, or no page tables for so much, is left to pin: other programs or ranks hold "
    "it, or a container's limit is near; lower Config.cpu_memory",
    712: "something else has registered memory there; nothing of ours does",
    801: "this platform registers no memory, as under WSL or in some virtual machines",
}
"""By the runtime's code, the same in CUDA and ROCm."""


class Driver:
    """An accelerator of which no more is known than `torch.accelerator` tells."""

    registers = False
    """Whether there is a call that registers memory."""

    def __init__(self, device: torch.device):
        """For one device, with its index."""
        self.device = device

    def stream(self) -> Any:
        """The calling thread's current stream on the device; equal to itself only."""
        return torch.accelerator.current_stream(self.device)

    def fence(self, stream: Any) -> Fence:
        """What is queued now on a stream that `stream` gave."""
        event = torch.Event(self.device, enable_timing=False)
        event.record(stream)
        return event

    def pin(self, address: int, size: int) -> None:
        """Register CPU memory, so that copies of it run beside the host and beside compute.

        Raises:
            PinError: it is not registered.
        """
        raise PinError(f"torch has no call that registers memory for {self.device.type}")

    def unpin(self, address: int) -> None:
        """Take back what `pin` did at this address."""

    def numa_node(self) -> int | None:
        """The NUMA node of the host's memory that is nearest; None where there is but one."""
        return None

    def refuse_capture(self) -> None:
        """Refuse to work while what the thread queues is recorded, to be done again later.

        Raises:
            RuntimeError: it is.
        """


def built_for() -> str | None:
    """The platform that this torch was built for, with its version; None where the CPU alone."""
    version: Any = torch.version
    numbers = {"CUDA": version.cuda, "ROCm": getattr(version, "hip", None)}
    return next((f"{name} {number}" for name, number in numbers.items() if number), None)


def initialize() -> None:
    """Start the platform: where no device is found, it says why.

    Raises:
        RuntimeError, AssertionError: as torch has it.
    """
    start: Any = torch.cuda.init
    start()


def driver_of(device: torch.device) -> Driver:
    """The driver of an accelerator."""
    return _Cuda(device) if device.type == "cuda" else Driver(device)


class _Cuda(Driver):
    """CUDA, or ROCm under its names."""

    registers = True

    def stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def fence(self, stream: Any) -> Fence:
        return _CudaFence(self.device, stream)

    def pin(self, address: int, size: int) -> None:
        runtime: Any = _runtime()
        with torch.cuda.device(self.device):
            code = runtime.cudaHostRegister(address, size, 0)  # Default: mapped and portable.
            if int(code) != 0:
                self._drain()
                why = f"returned {int(code)}, {runtime.cudaGetErrorString(code)}"
                likely = _LIKELY.get(int(code), "")
                raise PinError(f"cudaHostRegister of {format_bytes(size)} {why}", likely)

    def unpin(self, address: int) -> None:
        with torch.cuda.device(self.device):
            if int(_runtime().cudaHostUnregister(address)) != 0:
                self._drain()

    def refuse_capture(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "an offloaded model ran while a CUDA graph is captured (torch.cuda.graph, "
                "make_graphed_callables): a replay would read whatever lies in the slots by then, "
                "and waits for copies are in no graph. Capture nothing that the attached model "
                "takes part in"
            )

    def numa_node(self) -> int | None:
        found: Any = torch.cuda.get_device_properties(self.device)
        try:
            name = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
            node = int((_PCI_DEVICES / name / "numa_node").read_text())
        except (AttributeError, OSError, ValueError):
            return None
        return node if node >= 0 else None

    def _drain(self) -> None:
        """Take the error of the last call out of this thread, see [Note: Pending errors]."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.device).add_(1)


class _CudaFence:
    """An event on a stream; who waits for it on the host sleeps, see [Note: Blocking events]."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: torch.device, stream: Any):
        make: Any = torch.cuda.Event
        self._device = device
        self._event = make(blocking=True)
        self._event.record(stream)

    def synchronize(self) -> None:
        self._event.synchronize()

    def wait(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        return bool(self._event.query())


_PCI_DEVICES = Path("/sys/bus/pci/devices")


def _runtime() -> Any:
    cudart: Any = torch.cuda.cudart
    return cudart()
