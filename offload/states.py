"""Optimizer states by parameter: read from records and written to them, wherever they live."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from cpu_adam import views
from cpu_adam.formats import StateFormat
from offload.executor import Executor
from offload.program import Value


class States:
    """The moments (and residues) of an engine's parameters, and their step numbers."""

    def __init__(self, executor: Executor):
        """Every parameter at step 0, all states zero."""
        self._executor = executor
        self._plan = executor.plan
        self.steps: dict[tuple[int, int], int] = {}
        """Steps taken, by unit and parameter."""

    def format(self, unit: int, parameter: int) -> StateFormat:
        """The state format of a parameter."""
        return self._plan.states.format(self._plan.profile.units[unit].parameters[parameter].dtype)

    def _spans(self, unit: int, parameter: int) -> Iterator[tuple[int, slice, slice]]:
        """(chunk, elements in the chunk, elements in the parameter)."""
        for index, chunk in enumerate(self._plan.profile.units[unit].chunks):
            for span in chunk.spans:
                if span.parameter == parameter:
                    here, there, count = span.chunk_start, span.parameter_start, span.elements
                    yield index, slice(here, here + count), slice(there, there + count)

    def read(self, unit: int, parameter: int) -> dict[str, torch.Tensor]:
        """The slots of a parameter's state in its shape, each in memory of its own."""
        self._executor.quiesce("state", unit)
        spec, fmt = self._plan.profile.units[unit], self.format(unit, parameter)
        one = spec.parameters[parameter]
        out = {
            slot.name: torch.empty(
                one.elements, dtype=getattr(torch, slot.dtype), device=self._executor.device
            )
            for slot in fmt.slots
        }
        for chunk, here, there in self._spans(unit, parameter):
            record = self._executor.peek(Value("state", unit, chunk))
            for name, view in views(record, fmt, spec.chunks[chunk].elements).items():
                out[name][there].copy_(view[here])
        return {name: tensor.view(one.shape) for name, tensor in out.items()}

    def write(self, unit: int, parameter: int, state: Mapping[str, torch.Tensor]) -> None:
        """Replace slots of a parameter's state; slots that `state` lacks become zero.

        Raises:
            ValueError: a slot of another shape than the parameter.
        """
        self._executor.quiesce("state", unit)
        spec, fmt = self._plan.profile.units[unit], self.format(unit, parameter)
        one = spec.parameters[parameter]
        for slot in fmt.slots:
            if slot.name in state and tuple(state[slot.name].shape) != one.shape:
                raise ValueError(
                    f"state {slot.name} of {one.name} has shape {tuple(state[slot.name].shape)}, "
                    f"the parameter {one.shape}: the state is of another model"
                )
        for chunk, here, there in self._spans(unit, parameter):
            value = Value("state", unit, chunk)
            record = self._executor.peek(value)
            for name, view in views(record, fmt, spec.chunks[chunk].elements).items():
                if name in state:
                    view[here].copy_(state[name].reshape(-1)[there])
                else:
                    view[here].zero_()
            self._executor.poke(value, record)

    def clear(self) -> None:
        """Write zeros where a state has never been written: on nvme."""
        for unit, spec in enumerate(self._plan.profile.units):
            if self._plan.placements[unit].state != "nvme":
                continue
            for chunk in range(len(spec.chunks)):
                self._executor.clear(Value("state", unit, chunk))
