"""The ops of phases as tests see them, whichever runner has written them down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offload.program.ops import Op
from offload.runtime.native import Native

_phase: Any = Native.phase


def _noted(native: Native, ops: Sequence[Op], works: Any) -> Any:
    phase = _phase(native, ops, works)
    phase.ops = list(ops)
    return phase


setattr(Native, "phase", _noted)  # noqa: B010


def ops_of(phase: Any) -> list[Op]:
    """The ops of a phase, in order."""
    return [op for op, _ in phase] if isinstance(phase, list) else list(phase.ops)
