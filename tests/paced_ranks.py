"""Collectives on the paced accelerator: as NCCL's they have a stream of their own.

A collective waits for what its caller's stream has queued, as of now, reads there, meets the other
ranks through CPU memory, and writes on its own stream. Who waits for it lets the current stream
wait. So a collective that begins too early, or that somebody does not wait for, is a race.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from offload.parallel.group import Group
from tests.paced import Paced
from tests.paced_streams import Event
from tests.stand_in import driven


class Under:
    """A collective that is under way on a stream."""

    def __init__(self, end: Event):
        """That is over at this event."""
        self._end = end

    def is_completed(self) -> bool:
        """Whether the host need not wait: it has met the others."""
        return True

    def wait(self) -> None:
        """Let the current stream wait."""
        self._end.wait()


@contextmanager
def paced_ranks(seed: int) -> Iterator[Paced]:
    """Attach to a paced accelerator, whose native lanes drive the stand-in, over ranks."""
    begun: Any = Group._begun

    with driven(seed, 300) as device, pytest.MonkeyPatch.context() as patch:
        device.change(seed, host_pace=1.0, host_pauses_s=0.0)
        own = device.new_stream()

        def begin(self: Group, collective: Any, into: Any, source: Any, on: Any) -> Any:
            if not (device.holds(into) or device.holds(source)):
                return begun(self, collective, into, source, on)
            before = device.fence(device.stream())
            with own():
                before.wait()
                here = torch.empty(source.shape, dtype=source.dtype).copy_(source)
                came = torch.empty(into.shape, dtype=into.dtype)
                for work in begun(self, collective, came, here, on):
                    work.wait()
                into.copy_(came, non_blocking=True)
                return [Under(device.fence(device.stream()))]

        patch.setattr(Group, "_begun", begin)
        yield device
