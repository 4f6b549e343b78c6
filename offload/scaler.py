"""What torch's GradScaler reads in CPU memory is there before it is read.

[Note: Scaler]
`torch.amp.GradScaler` gives each device that has gradients copies of two numbers: what to multiply
by, and whether anything was not finite. It queues them and waits for none, which is right between
accelerators. A copy to CPU memory, pinned and not waited for, may be under way while the CPU's
kernel already multiplies by what lay there before, and then write over the overflow that was noted.
Gradients of offloaded parameters lie in CPU memory, the scaler is that of whatever loop or trainer
there is, and between its copies and its kernels nothing of ours is called. So where there is an
accelerator, torch's own class waits for its copies to the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import grad_scaler

_Copies: Any = getattr(grad_scaler, "_MultiDeviceReplicator", None)
"""Torch's, which has a copy of a number for each device; None where it is no longer called so."""

_queued: Any = getattr(_Copies, "get", None)


def wait_for_numbers() -> None:
    """From here on scalers of this process wait for what they copy to the CPU."""
    if _queued is not None:
        _Copies.get = _get


def _get(copies: Any, device: torch.device) -> Any:
    known = copies._per_device_tensors
    if device.type == "cpu" and device not in known:
        known[device] = copies.master.to(device=device, copy=True)
    return _queued(copies, device)
