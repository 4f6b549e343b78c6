"""Optimizer states by parameter: read from records and written to them, wherever they live."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from cpu_adam.formats import StateFormat
from cpu_adam.hyper import Hyper, SGDHyper
from cpu_adam.plain import from_plain, plain_dtypes, to_plain
from cpu_adam.reference import cut, views
from offload.device import CPU
from offload.executor import Executor
from offload.program import Value


class States:
    """The moments (and residues) of an engine's parameters, and their step numbers.

    Whoever reads or writes one has waited for all updates (`Engine.settle`).
    """

    def __init__(self, executor: Executor):
        """Every parameter at step 0, all states zero."""
        self._executor = executor
        self._plan = executor.plan
        self.steps: dict[tuple[int, int], int] = {}
        """Steps taken, by unit and parameter."""
        self.buffers: set[tuple[int, int]] = set()
        """Whose momentum buffer, of SGD, holds anything: the first gradient with momentum does."""

    def format(self, unit: int, parameter: int) -> StateFormat:
        """The state format of a parameter."""
        return self._plan.states.format(self._plan.profile.units[unit].parameters[parameter].dtype)

    def stepped(self, place: tuple[int, int], hyper: Hyper) -> None:
        """The parameter at `place`, a unit and an index, has taken a step."""
        self.steps[place] = self.steps.get(place, 0) + 1
        if isinstance(hyper, SGDHyper) and hyper.momentum:
            self.buffers.add(place)

    def _spans(self, unit: int, parameter: int) -> Iterator[tuple[int, int, slice]]:
        """(chunk, first element in the chunk, elements in the parameter)."""
        for index, chunk in enumerate(self._plan.profile.units[unit].chunks):
            for span in chunk.spans:
                if span.parameter == parameter:
                    there = span.parameter_start
                    yield index, span.chunk_start, slice(there, there + span.elements)

    def read(self, unit: int, parameter: int) -> dict[str, torch.Tensor]:
        """A parameter's state as torch has it, in the parameter's shape and memory of its own.

        It is on the device where its home is, else in CPU memory: all states together need not
        fit the device.
        """
        spec, fmt = self._plan.profile.units[unit], self.format(unit, parameter)
        one = spec.parameters[parameter]
        there_too = self._plan.home("state", unit).tier == "device"
        device = self._executor.device if there_too else CPU
        out = {
            name: device.empty((one.elements,), dtype) for name, dtype in plain_dtypes(fmt).items()
        }
        for chunk, here, there in self._spans(unit, parameter):
            record = self._executor.peek(Value("state", unit, chunk))
            slots = views(record, fmt, spec.chunks[chunk].elements)
            count = there.stop - there.start
            for name, part in to_plain(cut(slots, fmt, here, count), fmt).items():
                out[name][there].copy_(part)
        self._executor.lanes.drain()  # Before an update may write where it reads.
        if (unit, parameter) not in self.buffers:
            out.pop("momentum_buffer", None)
        return {name: tensor.view(one.shape) for name, tensor in out.items()}

    def write(
        self, unit: int, parameter: int, state: Mapping[str, torch.Tensor], steps: int
    ) -> None:
        """Replace a parameter's state, given as `read` gives it; what it lacks becomes zero.

        Raises:
            ValueError: a slot of another shape than the parameter.
        """
        spec, fmt = self._plan.profile.units[unit], self.format(unit, parameter)
        one = spec.parameters[parameter]
        for name in plain_dtypes(fmt):
            if name in state and tuple(state[name].shape) != one.shape:
                raise ValueError(
                    f"state {name} of {one.name} has shape {tuple(state[name].shape)}, "
                    f"the parameter {one.shape}: the state is of another model"
                )
        for chunk, here, there in self._spans(unit, parameter):
            value = Value("state", unit, chunk)
            record = self._executor.peek(value)
            slots = views(record, fmt, spec.chunks[chunk].elements)
            part = {name: whole.reshape(-1)[there] for name, whole in state.items()}
            from_plain(part, cut(slots, fmt, here, there.stop - there.start), fmt)
            self._executor.poke(value, record)
        self.steps[unit, parameter] = steps
        self.buffers.discard((unit, parameter))
        if "momentum_buffer" in state:
            self.buffers.add((unit, parameter))

    def clear(self) -> None:
        """Write zeros where a state has never been written: on nvme."""
        for unit, spec in enumerate(self._plan.profile.units):
            if self._plan.placements[unit].state != "nvme":
                continue
            for chunk in range(len(spec.chunks)):
                self._executor.clear(Value("state", unit, chunk))
