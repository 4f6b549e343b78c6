"""What brings the values of residents to the lanes that update them, and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from offload.executor import BytesOf, Executor
from offload.program import Op, Verb
from offload.task import Fence, Run


class Carrier:
    """Moves the values of a unit between torch's memory and the lanes; it knows no parameter.

    So nobody holds a model by what lanes have still to do for it.
    """

    def __init__(self, executor: Executor, **flat: dict[int, torch.Tensor]):
        """Of the weights and gradients in `flat`, by kind and parameter."""
        self._executor, self._flat = executor, flat
        self.fence: Fence | None = None
        """What the user's stream had still to do at `step()`."""

    def __call__(self, op: Op, bytes_of: BytesOf) -> Run | None:
        """What an op of a chunk does that moves a value from or to torch's memory; None of others.

        Of the parameters that do not take part, and between parameters, nothing is moved.
        """
        (kind, unit, chunk), plan = op.value, self._executor.plan
        if op.verb is not Verb.MOVE or plan.in_arena(kind, unit):
            return None
        home = plan.home(kind, unit)
        leaves = op.reads[0].place == home
        if not leaves and op.writes[0].place != home:
            return None
        flat, spec = self._flat[kind], plan.profile.units[unit]
        stage = op.writes[0] if leaves else op.reads[0]

        def run() -> Iterator[Fence | None]:
            yield self.fence
            inside = bytes_of(stage)
            for span in spec.chunks[chunk].spans:
                if span.parameter in flat:
                    lies = flat[span.parameter]
                    mine = lies[span.parameter_start : span.parameter_start + span.elements]
                    start = span.chunk_start * mine.itemsize
                    staged = inside[start : start + mine.nbytes].view(mine.dtype)
                    into, source = (staged, mine) if leaves else (mine, staged)
                    self._executor.device.copy(into, source)

        return run
