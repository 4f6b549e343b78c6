"""What a model and its optimizer were before an attach, to be that again where it fails."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from offload.binding import BoundUnit, make_plain
from offload.executor import Executor
from offload.optimizer import give_back
from offload.program import Value
from offload.resting import RestingParameter


class Before:
    """Where everything lay, and which gradients there were."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None):
        """Look at both as they are."""
        self._model, self._optimizer = model, optimizer
        self._devices = {x: x.device for x in (*model.parameters(), *model.buffers())}
        self.gradients = {p: p.grad for p in model.parameters()}
        self.replaced: dict[nn.Parameter, nn.Parameter] = {}
        """By the new parameter, the one on the meta device in whose place it is."""

    def restore(self, bound: Sequence[BoundUnit], executor: Executor) -> None:
        """Let both be as they were; of the units in `bound` some were moved, with their values."""
        for unit in bound:
            if type(unit.parameters[0]) is RestingParameter:
                self._restore(unit, executor)
        for tensor, device in self._devices.items():
            if tensor.device != device:
                tensor.data = tensor.data.to(device)
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient
        for module in self._model.modules():
            for name, held in module._parameters.items():
                if held is not None:
                    module._parameters[name] = self.replaced.get(held, held)
        if self._optimizer is not None:
            give_back(self._optimizer)
            for group in self._optimizer.param_groups:
                group["params"] = [self.replaced.get(p, p) for p in group["params"]]

    def _restore(self, unit: BoundUnit, executor: Executor) -> None:
        """Give the parameters of a unit their values back, on the device that they came from."""
        on = self._devices.get(unit.parameters[0], executor.device.torch_device)
        pieces = range(len(unit.spec.pieces))
        values = (executor.peek(Value("weight", unit.index, piece)) for piece in pieces)
        buffer = torch.cat([value.to(on) for value in values])
        for parameter, view in zip(unit.parameters, unit.views_of(buffer).views):
            make_plain(parameter, view)
