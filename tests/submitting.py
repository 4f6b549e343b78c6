"""The ops of phases as tests see them, whichever runner has written them down."""

from __future__ import annotations

from typing import Any

from offload.program.ops import Op


def ops_of(phase: Any) -> list[Op]:
    """The ops of a phase, in order."""
    return [op for op, _ in phase] if isinstance(phase, list) else list(phase.ops)
