"""The compute device as the engine uses it: memory, copies, and what orders them.

[Note: Order on a device]
What is given to a device is queued on the calling thread's current stream and done later: in order
on one stream, in any order on two, and the host does not wait. The engine orders it in three ways:

* A lane works on a stream of its own, and an op is over when that stream is through (`drain`). So
  what a lane has done is there for every thread and every stream.
* The user's compute is over when the host is through with it. What its streams have still to do are
  its fences (`fence`): a lane lets the host wait for them, the user's next compute only its stream.
* What the engine itself does at a home on the user's thread, it waits for (`drain`).

A `Device` without accelerator does everything at once, and has nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.config import format_bytes
from offload.driver import Driver, driver_of
from offload.scaler import wait_for_numbers
from offload.task import Fence


class Device:
    """The CPU as the compute device: device memory is CPU memory, and what returns is done."""

    is_host = True
    """Whether its memory is the CPU's, and nothing of it is under way after a call."""
    driver: Driver | None = None
    """What more is known of an accelerator."""

    def __init__(self, torch_device: torch.device):
        """As torch names it."""
        self.torch_device = torch_device

    def free_bytes(self) -> int | None:
        """Free memory in bytes, or None where it is the CPU's."""
        return None

    # -- memory -------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor in its memory."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def zeros(self, size: int) -> torch.Tensor:
        """`size` zero bytes in its memory, there for every stream."""
        made = self.empty((size,), torch.uint8).zero_()
        self.drain()
        return made

    def trim(self) -> None:
        """Give back to the system what torch keeps of memory that was let go."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in its memory, and not in the CPU's."""
        return False

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between memories, of the same bytes, on the current stream."""
        into.copy_(source, non_blocking=True)

    # -- order, see [Note: Order on a device] -------------------------------------------------

    def enter(self) -> None:
        """Let the calling thread, a lane's, work on this device, on a stream of its own."""

    def stream(self) -> object:
        """The current stream of the calling thread; equal to itself only."""
        return None

    def fence(self, stream: object) -> Fence | None:
        """What is queued now on a stream; None where nothing can be."""
        return None

    def drain(self) -> None:
        """Let the host wait for all that is queued on the calling thread's current stream."""

    def drain_all(self) -> None:
        """Let the host wait for all that is queued on any stream: before memory is given back."""

    def refuse_capture(self) -> None:
        """Refuse to work while what the thread queues is recorded, to be done again later.

        Raises:
            RuntimeError: it is.
        """


class Accelerator(Device):
    """Any device of `torch.accelerator`."""

    is_host = False

    def __init__(self, torch_device: torch.device):
        """As torch names it, with its index."""
        super().__init__(torch_device)
        self.driver: Driver = driver_of(torch_device)
        wait_for_numbers()

    def free_bytes(self) -> int | None:
        """Free memory in bytes."""
        free, _ = getattr(torch, self.torch_device.type).mem_get_info(self.torch_device)
        return int(free)

    def zeros(self, size: int) -> torch.Tensor:
        """`size` zero bytes in its memory, there for every stream.

        Raises:
            MemoryError: it has no such piece free.
        """
        try:
            return super().zeros(size)
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"{format_bytes(size)} of {self.torch_device} were refused ({error}): likely "
                "other programs, or tensors of this one, hold it; lower Config.device_memory"
            ) from error

    def trim(self) -> None:
        """Give back to the system what torch keeps of memory that was let go."""
        torch.accelerator.empty_cache()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in its memory."""
        return tensor.device.type == self.torch_device.type

    def enter(self) -> None:
        """Let the calling thread, a lane's, work on this device, on a stream of its own."""
        torch.accelerator.set_device_index(self.torch_device.index or 0)
        torch.accelerator.set_stream(torch.Stream(self.torch_device))

    def stream(self) -> object:
        """The current stream of the calling thread."""
        return self.driver.stream()

    def fence(self, stream: object) -> Fence | None:
        """An event on a stream; who waits for it does not spin a core."""
        return self.driver.fence(stream)

    def drain(self) -> None:
        """Let the host wait for all that is queued on the calling thread's current stream."""
        event = self.fence(self.stream())
        assert event is not None
        event.synchronize()

    def drain_all(self) -> None:
        """Let the host wait for all that is queued on any stream.

        Torch's call ends by making that device current which was, and so makes a context on the
        first one, for good, in a thread that never chose a device: see `driver`.
        """
        with torch.accelerator.device_index(self.torch_device.index):
            torch.accelerator.synchronize(self.torch_device)

    def refuse_capture(self) -> None:
        """Refuse to work while what the thread queues is recorded."""
        self.driver.refuse_capture()


CPU = Device(torch.device("cpu"))
"""The CPU."""


def compute_device() -> Device:
    """The accelerator that torch finds, else the CPU.

    One that cannot tell how much of its memory is free, as MPS, has no streams for lanes either:
    there the CPU computes.
    """
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None and hasattr(getattr(torch, found.type, None), "mem_get_info"):
            index = torch.accelerator.current_device_index()
            return Accelerator(torch.device(found.type, index))
    return CPU
