"""When the model as a whole ran, for the trace.

[Note: Pass trace]
Resident units have no hooks, so the trace would not see their compute. Instead a pass over a model
that has any is recorded as one op of the user's compute, of no unit: a forward from the root's
pre-hook to its hook, a backward from the first gradient of the root's outputs to the end of that
backward. The breakdown of a step counts it; the simulator, whose compute is by unit, does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from offload.model.outputs import tensors_in
from offload.program.ops import ALL_UNITS, Lane, Op, Value, Verb
from offload.runtime.torch_internals import call_at_end, graph_task

Note = Callable[[Op, float, float], None]
"""Takes an op, its start and its stop."""


def pass_op(verb: Verb) -> Op:
    """The op of a forward or backward of the whole model."""
    return Op(Lane.COMPUTE, verb, Value("weight", ALL_UNITS), (), (), 0, 0)


def is_pass(op: Op) -> bool:
    """Whether an op is one of the whole model."""
    return op.value.unit == ALL_UNITS and op.verb in (Verb.FORWARD, Verb.BACKWARD)


class PassTrace:
    """Records the passes of one model."""

    def __init__(self, note: Note):
        """Record by calling `note`."""
        self._note = note
        self._began = 0.0
        self._graph = -1

    def forward_begins(self) -> None:
        """The root is about to run."""
        self._began = time.perf_counter()

    def forward_ends(self, output: Any) -> None:
        """The root has run, and returns `output`."""
        self._note(pass_op(Verb.FORWARD), self._began, time.perf_counter())
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                register: Any = tensor.register_hook
                register(self._backward_begins)

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        graph = graph_task()
        if graph == self._graph:
            return
        self._graph, began = graph, time.perf_counter()

        def ended() -> None:
            self._note(pass_op(Verb.BACKWARD), began, time.perf_counter())

        call_at_end(ended)
