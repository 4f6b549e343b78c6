"""Copies of a GradScaler's numbers, to the CPU and elsewhere; without an accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.amp import grad_scaler

from offload.runtime import device as scaler
from offload.runtime.device import make_scalers_wait

HOST, THERE = torch.device("cpu"), torch.device("cuda", 1)


class Number:
    """A number on an accelerator, which keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[torch.device, bool]] = []

    def to(self, *, device: torch.device, non_blocking: bool = False, copy: bool) -> object:
        assert copy
        self.asked.append((device, non_blocking))
        return object()


@pytest.mark.parametrize("name", ["GradScaler", "ShardedGradScaler"])
def test_numbers_are_waited_for_on_their_way_to_the_cpu_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = grad_scaler._MultiDeviceReplicator
    if name == "ShardedGradScaler":
        from torch.distributed.fsdp import sharded_grad_scaler

        kind = sharded_grad_scaler._GeneralMultiDeviceReplicator
    with monkeypatch.context() as patch:
        patch.setattr(grad_scaler._MultiDeviceReplicator, "get", scaler._queued)
        make_scalers_wait()
        make_scalers_wait()  # And is no other where there are two.
        copies: Any = kind.__new__(kind)
        copies.master, copies._per_device_tensors = Number(), {}
        assert copies.get(HOST) is copies.get(HOST)
        assert copies.get(THERE) is copies.get(THERE)
        assert copies._per_device_tensors.keys() == {HOST, THERE}
        assert copies.master.asked == [(HOST, False), (THERE, True)]
