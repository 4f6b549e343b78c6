"""Optimizer states by parameter: read from records and written to them, wherever they live."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from cpu_adam.checks import check_residue
from cpu_adam.formats import StateFormat, format_for
from cpu_adam.hyper import Hyper, SGDHyper
from cpu_adam.parameter_state import OPTIONAL, check_rule
from cpu_adam.reference import cut, views
from cpu_adam.torch_state import from_plain, plain_dtypes, scales, to_plain
from offload.planning.profile import Parameter, Piece
from offload.program.ops import Value
from offload.runtime.device import CPU
from offload.runtime.memory import host_tensor
from offload.runtime.runner import ChunkCache, Runner
from offload.runtime.store import ahead

ParameterKey = tuple[int, int]
"""A unit and the index of a parameter in it."""

Given = tuple[ParameterKey, Mapping[str, torch.Tensor], int]
"""A parameter, the slots of a state of it as `States.read` gives them, and its steps."""


StatePart = tuple[Piece, Mapping[str, torch.Tensor]]
"""A piece of a parameter, and the slots of its state, 1-D; a slot that is lacking becomes zero."""


class States:
    """The moments (and residues) of an engine's parameters, and their step numbers, for callers
    that have waited for all updates (`Engine.settle`)."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self._chunks = ChunkCache(runner)
        self._plan = runner.plan
        self.steps: dict[ParameterKey, int] = {}
        self.buffers: set[ParameterKey] = set()
        """Parameters whose momentum buffer (SGD) holds anything: after a step with momentum."""

    def format(self, unit: int, parameter: int) -> StateFormat:
        """The state format of a parameter."""
        return self._plan.states.format(self._plan.profile.units[unit].parameters[parameter].dtype)

    def stepped(self, owner: ParameterKey, hyper: Hyper) -> None:
        """A parameter has taken a step."""
        self.steps[owner] = self.steps.get(owner, 0) + 1
        if isinstance(hyper, SGDHyper) and hyper.momentum:
            self.buffers.add(owner)

    def _pieces(self, unit: int, parameter: int) -> Iterable[Piece]:
        one = self._plan.profile.units[unit].parameters[parameter]
        return self._plan.profile.locate(one.name) if one.trainable else ()

    def read(self, unit: int, parameter: int) -> dict[str, torch.Tensor]:
        """A parameter's state as torch has it, in memory of its own: on the device where its home
        is, else of the CPU, as all states together need not fit the device."""
        spec, fmt = self._plan.profile.units[unit], self.format(unit, parameter)
        one = spec.parameters[parameter]
        there_too = self._plan.home("state", unit).tier == "device"
        device = self._runner.device if there_too else CPU
        out = {
            name: device.empty((one.elements,), dtype) for name, dtype in plain_dtypes(fmt).items()
        }
        for piece in self._pieces(unit, parameter):
            for name, part in self.part(
                piece, self._chunks.read(Value("state", unit, piece.chunk))
            ).items():
                out[name][piece.parameter_start : piece.parameter_stop].copy_(part)
        self._runner.drain()  # Before an update may write where it reads.
        if (unit, parameter) not in self.buffers:
            out.pop("momentum_buffer", None)
        return {name: tensor.view(one.shape) for name, tensor in out.items()}

    def part(
        self, piece: Piece, record: torch.Tensor, *, scaled: bool = False
    ) -> dict[str, torch.Tensor]:
        """A piece of a parameter's state as torch has it, 1-D, from the record of its chunk;
        `scaled` with the scales of its groups."""
        chunk = self._plan.profile.units[piece.unit].chunks[piece.chunk]
        fmt = self.format(piece.unit, piece.parameter)
        slots = cut(views(record, fmt, chunk.elements), fmt, piece.chunk_start, piece.elements)
        return to_plain(slots, fmt) | (scales(slots, fmt) if scaled else {})

    def write(self, given: Sequence[Given]) -> None:
        """Replace states that `check_state` let pass, each chunk once."""
        self._chunks.forget()
        parts: dict[Value, list[StatePart]] = {}
        for one in given:
            (unit, parameter), state, _ = one
            for piece in self._pieces(unit, parameter):
                there = slice(piece.parameter_start, piece.parameter_stop)
                part = {name: all_.reshape(-1)[there] for name, all_ in state.items()}
                parts.setdefault(Value("state", unit, piece.chunk), []).append((piece, part))
        whole = {unit: self._plan.profile.by_chunk(unit) for unit in {v.unit for v in parts}}
        for value in sorted(parts, key=lambda value: (value.unit, value.chunk)):
            self.write_chunk(value, parts[value], len(whole[value.unit][value.chunk]))
        for owner, state, steps in given:
            self.count(owner, steps, state)

    def count(self, owner: ParameterKey, steps: int, slots: Container[str]) -> None:
        """A parameter has taken so many steps, and has these slots."""
        self.steps[owner] = steps
        self.buffers.discard(owner)
        if "momentum_buffer" in slots:
            self.buffers.add(owner)

    def write_chunk(self, value: Value, parts: Sequence[StatePart], pieces: int) -> None:
        """Put parts in their places of a chunk of so many `pieces`, read where some of it stays."""
        chunk = self._plan.profile.units[value.unit].chunks[value.chunk]
        if len(parts) == pieces and self._plan.home("state", value.unit).tier == "nvme":
            record = host_tensor(self._runner.memory.extent(value)[1])
        else:
            record = self._chunks.read(value)
        for piece, part in parts:
            fmt = self.format(piece.unit, piece.parameter)
            slots = cut(views(record, fmt, chunk.elements), fmt, piece.chunk_start, piece.elements)
            from_plain(part, slots, fmt)
        self._chunks.write(value, record)

    def clear(self) -> None:
        """Write zeros where a state was never written: on nvme."""
        units, extent = enumerate(self._plan.profile.units), self._runner.memory.extent
        every = (Value("state", unit, at) for unit, one in units for at in range(len(one.chunks)))
        never = [value for value in every if self._chunks.written(value) is None]
        zeros = host_tensor(max((extent(value)[1] for value in never), default=0))
        for _ in ahead(lambda one: self._runner.write_home(one, zeros[: extent(one)[1]]), never):
            pass


def check_state(rule: str, of: Parameter, state: Mapping[str, Any]) -> None:
    """Refuse what is no state of a parameter under the update's `rule`."""
    given = [name for name, value in state.items() if value is not None]
    if given and not of.trainable:
        raise ValueError(
            f"asked for a state of {of.name}; found that it was frozen when the model was "
            "attached, so no state has a place: freeze it after attach, or drop its state "
            "(del optimizer.state[parameter]); nothing was loaded"
        )
    check_rule(rule, state)
    needed = [slot.name for slot in format_for("float32", rule=rule).slots]
    needed = [name for name in needed if name not in OPTIONAL] + ["step"] * (rule == "adam")
    missing = [name for name in needed if name not in given]
    if given and missing:
        raise ValueError(
            f"asked to load the state of a parameter, with {', '.join(needed)}; found "
            f"{', '.join(given)}, without {', '.join(missing)}; likely cause: a state put "
            f"together by hand, or of another optimizer; try: all of it, step as "
            f"torch.tensor(float(steps)), or no state, which begins anew; nothing was loaded"
        )
    for name, value in state.items():
        if name == "step" or value is None:
            continue
        if tuple(value.shape) != of.shape:
            raise ValueError(
                f"state {name} of {of.name} has shape {tuple(value.shape)}, the parameter "
                f"{of.shape}: it is of another model; nothing was loaded"
            )
        if name == "residue" and not value.is_floating_point():
            check_residue(value)
