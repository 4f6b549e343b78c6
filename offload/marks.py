"""When the model as a whole ran. Resident units announce nothing, so the trace sees its root alone.

[Note: Marks]
A pass over a model with resident units is one more op of the user's, of no unit in particular: a
forward from the root's first hook to its last, a backward from the first gradient that reaches what
the root returned to the end of that backward. Shares of the step count it; the simulator, whose
compute is of units, does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from offload.outputs import tensors_in
from offload.program import EVERY, Lane, Op, Value, Verb

Note = Callable[[Op, float, float], None]
"""Takes an op, its start and its stop."""


def pass_op(verb: Verb) -> Op:
    """A whole pass of the user's compute."""
    return Op(Lane.COMPUTE, verb, Value("weight", EVERY), (), (), 0, 0)


def is_pass(op: Op) -> bool:
    """Whether an op is a whole pass."""
    return op.value.unit == EVERY and op.verb in (Verb.FORWARD, Verb.BACKWARD)


class Marks:
    """Notes the passes of one model."""

    def __init__(self, note: Note):
        """Tell `note`."""
        self._note = note
        self._began = 0.0
        self._graph = -1

    def forward_begins(self) -> None:
        """The root is about to run."""
        self._began = time.perf_counter()

    def forward_ends(self, output: Any) -> None:
        """The root has returned `output`."""
        self._note(pass_op(Verb.FORWARD), self._began, time.perf_counter())
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                register: Any = tensor.register_hook
                register(self._backward_begins)

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        graph: int = torch._C._current_graph_task_id()
        if graph == self._graph:
            return
        self._graph, began = graph, time.perf_counter()

        def ended() -> None:
            self._note(pass_op(Verb.BACKWARD), began, time.perf_counter())

        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(ended)
