"""The state of one parameter as torch.optim keeps it: made, checked, and taken from a checkpoint.

A state is a dict of tensors in the parameter's own shape under torch's names (`exp_avg`, ...), with
one key more where a bfloat16 weight is only half of its master: `residue`. Under FSDP2 parameters
and states are DTensors; what is updated is the part of each that this process holds (`local`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from cpu_adam.checks import check_residue
from cpu_adam.formats import FORMATS, Slot, StateFormat, format_for
from cpu_adam.hyper import STEPS
from cpu_adam.memory import PLAIN, are_native, is_wrapper, on_huge_pages
from cpu_adam.reference import cut
from cpu_adam.torch_state import from_plain

STEP = "step"
"""Key of the number of steps that a parameter has taken: a 0-d float32 tensor, as in torch. As
there it stops at 2**24; the bias is long gone then, but `compact` dithers no more, all steps having
one number."""
OPTIONAL = ("residue", "momentum_buffer")
"""Slots that a checkpoint may lack: no residue is a master that equals its weight, and SGD's
buffer begins with its first gradient."""

ENCODED_ELEMENTS = 1 << 20
"""Elements encoded at a time, to bound temporaries: a multiple of every group."""

_GATHERABLE = {torch.int16: torch.int32}
"""Dtypes that neither gloo nor NCCL can send, and the ones that hold the same numbers."""


def local(x: Tensor) -> Tensor:
    """The part of a tensor that this process holds: of a DTensor its local one, else itself.

    Waits for one that a collective is still to deliver.
    """
    if type(x) in PLAIN or not hasattr(x, "to_local"):
        return x
    part: Tensor = x.to_local()
    if type(part) not in PLAIN and hasattr(part, "wait"):
        part = part.wait()
    return part


def whole_step(value: Any) -> float:
    """A number of steps. Raises ValueError unless it is a whole number from 0 to below 2**48."""
    try:
        step = float(local(value) if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):  # Of several elements, or without memory.
        step = math.nan
    if not (0 <= step < STEPS and step == int(step)):
        raise ValueError(
            f"asked for the number of steps that a parameter has taken, a whole number from 0 to "
            f"below 2**48; found {value!r}; likely cause: a damaged checkpoint or an edited state; "
            f"try: torch.tensor(0.0) for a state that begins anew, without its moments"
        )
    return step


def check_slot(parameter: Tensor, slot: Slot, value: Any) -> None:
    """Raise ValueError unless what a state has for a slot is of this parameter, in CPU memory."""
    want = getattr(torch, slot.dtype)
    weight, coarse = local(parameter), slot.elements_per_item > 1
    shape = (slot.items(weight.numel()),) if coarse else tuple(weight.shape)
    found = type(value).__name__
    if isinstance(value, Tensor):
        here = local(value)
        found = f"{found} of {here.dtype} {tuple(here.shape)} on {here.device}"
        if here.layout == torch.strided and here.is_cpu and here.dtype == want:
            are_native([here])
            if tuple(here.shape) == shape:
                return
    raise ValueError(
        f"asked for a step with {key_of(slot)} as {want} {shape} in CPU memory; found {found}; "
        f"likely cause: the parameter was given another shape, or its state was edited; try: "
        f"optimizer.state.pop(parameter), which begins anew"
    )


def key_of(slot: Slot) -> str:
    """The key of a slot in a state. A byte of code must not be taken for the moment itself."""
    return f"{slot.name}_code" if slot.dtype in ("int8", "uint8") else slot.name


def check_parameter(parameter: Tensor, states: str, rule: str) -> StateFormat:
    """The format of a parameter's state. Raises ValueError where it cannot be updated here."""
    found = ""
    if parameter.is_complex():
        found = f"a parameter of {parameter.dtype}"
        cause = "a layer with complex weights"
        remedy = "hold torch.view_as_real(weight) as the parameter"
    elif parameter.device.type != "cpu":
        found = f"a parameter on {parameter.device}"
        cause = "the model was moved to an accelerator or is not materialised yet"
        remedy = "torch.optim there, which offload.attach updates alike; or CPUOffloadPolicy()"
    elif is_wrapper(local(parameter)):
        found = f"a {type(local(parameter)).__name__}, which has no memory of its own"
        cause = "a tensor subclass that wraps others, or a fake tensor"
        remedy = "torch.optim for it, or the tensors that it wraps as parameters"
    if found:
        raise ValueError(
            f"asked for the update of parameters in CPU memory, real and strided; found {found}; "
            f"likely cause: {cause}; try: {remedy}"
        )
    format = format_for(str(parameter.dtype).removeprefix("torch."), states, rule)
    if format.coded and local(parameter) is not parameter:
        raise ValueError(
            f"asked for {states!r} states of a DTensor; found one of shape "
            f"{tuple(parameter.shape)}, sharded over processes; likely cause: FSDP2, whose "
            f"shards cut groups of {format.group_elements} elements that share their scales; try: "
            f"states='exact'"
        )
    return format


def fresh(parameter: Tensor, slot: Slot) -> Tensor:
    """Zeros for a slot: of the parameter's shape (and placement), or one item per group, 1-D."""
    dtype = getattr(torch, slot.dtype)
    if slot.elements_per_item > 1:
        return torch.zeros(slot.items(parameter.numel()), dtype=dtype, device=parameter.device)
    made = torch.empty_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
    on_huge_pages(local(made)).zero_()
    return made


def check_state_dict(given: Any) -> tuple[list[dict[str, Any]], Mapping[Any, Any]]:
    """Groups and states of what an optimizer's `state_dict` returned, else raise ValueError."""
    try:
        groups, states = list(given["param_groups"]), given["state"]
        if isinstance(states, Mapping) and all(isinstance(x["params"], list) for x in groups):
            return groups, states
    except (KeyError, TypeError):
        pass
    found = f"the keys {list(given)}" if isinstance(given, Mapping) else f"a {type(given).__name__}"
    raise ValueError(
        f"asked to load a dict with the 'state' of parameters and 'param_groups' with 'params'; "
        f"found {found[:200]}; likely cause: a checkpoint of which this is a part, or a model's; "
        f"try: what optimizer.state_dict() returned"
    )


def check_kind(options: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise ValueError where a saved group is of another kind of optimizer than `options` are.

    Its learning rate would be taken over; states tell only where it has any (SGD may have none).
    """
    for mine, other in (("betas", "momentum"), ("momentum", "betas")):
        if mine in options and mine not in saved and other in saved:
            raise ValueError(
                f"asked to load parameter groups with {mine}; found some with {other} and no "
                f"{mine}; likely cause: a checkpoint of another kind of optimizer; try: begin "
                f"anew, or load it into the kind that it was saved of"
            )


def loaded(
    parameter: Tensor, format: StateFormat, saved: Mapping[str, Any], counts_steps: bool
) -> dict[str, Any]:
    """A state from a checkpoint of ours or torch's: copies, in the dtypes of the format.

    counts_steps: whether a state says of how many steps its moments are. What the format has no
    slot for is copied as it is. Moments as numbers become the nearest codes where the format keeps
    codes. Raises ValueError where the state is of another parameter, optimizer or format.
    """
    slots = {key_of(slot): slot for slot in format.slots}
    check_rule(format.rule, saved)
    state: dict[str, Any] = {}
    codes = [slot.name for slot in format.slots if key_of(slot) != slot.name]
    if codes and all(isinstance(saved.get(name), Tensor) for name in codes):
        state.update(_encoded(parameter, format, saved, codes))
        saved = {key: value for key, value in saved.items() if key not in codes}
    for key, value in saved.items():
        if key == STEP:
            state[key] = torch.tensor(whole_step(value), dtype=torch.float32, device="cpu")
        elif key == "residue" and isinstance(value, Tensor) and value.is_floating_point():
            continue  # An optimizer of torch made it so, and its lower bits are gone.
        elif key not in slots:
            state[key] = copy.deepcopy(value)
        elif value is not None:
            state[key] = _taken(parameter, key, slots[key], value)
    needed = [*slots, STEP] if counts_steps else [*slots]
    missing = [key for key in needed if key not in state and key not in OPTIONAL]
    if state and missing:
        raise ValueError(
            f"asked to load a state with {', '.join(needed)}; found one with "
            f"{', '.join(map(str, saved))}, without {', '.join(missing)}; likely cause: the "
            f"checkpoint is of another optimizer or state format; try: load it into the kind of "
            f"optimizer that saved it"
        )
    return state


def check_rule(rule: str, saved: Mapping[str, Any]) -> None:
    """Raise ValueError where a saved state has moments that the rule does not know."""
    foreign = sorted(_OF_MOMENTS - _moments(rule) & saved.keys())
    if foreign:
        raise ValueError(
            f"asked to load a state of {rule}; found one with {', '.join(foreign)}, which "
            f"{rule} does not have; likely cause: a checkpoint of another optimizer; try: "
            f"the kind of optimizer that saved it, or a new one without its state"
        )


def _moments(rule: str) -> set[str]:
    """Keys under which any format of a rule has what is kept of gradients."""
    slots = (slot for format in FORMATS.values() if format.rule == rule for slot in format.slots)
    return {key for slot in slots for key in (slot.name, key_of(slot))} - {"residue"}


_OF_MOMENTS = {key for format in FORMATS.values() for key in _moments(format.rule)}


def _encoded(
    parameter: Tensor, format: StateFormat, saved: Mapping[str, Any], codes: Iterable[str]
) -> dict[str, Tensor]:
    """Moments as numbers, such as torch has them, in codes and scales, with a residue of zeros."""
    numbers = Slot("moment", "float32", 4)
    moments = {name: _taken(parameter, name, numbers, saved[name]).view(-1) for name in codes}
    state = {key_of(slot): fresh(parameter, slot) for slot in format.slots}
    flat = {slot.name: state[key_of(slot)].view(-1) for slot in format.slots}
    elements = parameter.numel()
    for first in range(0, elements, ENCODED_ELEMENTS):
        count = min(ENCODED_ELEMENTS, elements - first)
        here = {name: x[first : first + count] for name, x in moments.items()}
        from_plain(here, cut(flat, format, first, count), format)
    return state


def saved(state: Any) -> Any:
    """A state as a state dict has it: what is sharded in a dtype that can be gathered."""
    if not isinstance(state, dict):
        return state
    wide = {
        key: value.to(_GATHERABLE[value.dtype])
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dtype in _GATHERABLE and local(value) is not value
    }
    return {**state, **wide} if wide else state


def _taken(parameter: Tensor, key: str, slot: Slot, value: Any) -> Tensor:
    """A copy of a saved tensor that fits the slot."""
    want = getattr(torch, slot.dtype)
    shape = tuple(parameter.shape)
    if slot.elements_per_item > 1:
        shape = (slot.items(parameter.numel()),)
    same_kind = isinstance(value, Tensor) and (local(value) is value) == (
        slot.elements_per_item > 1 or local(parameter) is parameter
    )
    if not same_kind or tuple(value.shape) != shape or not _fits(value.dtype, want):
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"asked to load {key} as {want} {shape}{'' if same_kind else ', sharded alike'}; found "
            f"{found} ({type(value).__name__}); likely cause: the checkpoint is of another model "
            f"or sharding; try: torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    if local(parameter) is not parameter:
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        value = value.redistribute(mesh, placements)
    if want == torch.int16:
        check_residue(local(value))
    copied = torch.empty_like(
        value, dtype=want, device="cpu", memory_format=torch.contiguous_format
    )
    on_huge_pages(local(copied))
    copied.copy_(value.detach())
    return copied


def _fits(found: torch.dtype, want: torch.dtype) -> bool:
    """Numbers may change their precision on the way, codes must be what `saved` made of them."""
    if want.is_floating_point:
        return found.is_floating_point
    return found in (want, _GATHERABLE.get(want))
