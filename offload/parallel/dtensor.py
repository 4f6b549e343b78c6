"""Parameters that are DTensors, as `parallelize_module` of torch makes them.

[Note: DTensors]
A unit is made of local tensors: plan, homes, updates and sums over ranks know their shapes alone.
In use a parameter is a DTensor of torch's own, whose local tensor is the view of the slot. At rest
it is of a class whose local tensor is a snapshot when torch asks for it, to dispatch a function, to
gather or to print: so no function needs a trap, and shape, placements and mesh are always true.

Autograd saves DTensors whose local tensors lie in a slot: a `SavedWeight` stands for each. A
gradient that has other placements than its parameter (a sum of which each rank has a part) is
redistributed when it comes, as in FSDP2, before micro-batches and ranks are summed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from offload.config import Config
from offload.model.parameter import (
    PLAIN,
    ActiveParameter,
    AttachedParameter,
    Binding,
    refuse_hook,
)
from offload.model.snapshots import share
from offload.parallel.group import Group
from offload.runtime.device import Device
from offload.runtime.torch_internals import local_part, set_local_part, with_local_part

_T: Any = torch.Tensor


class RestingDTensor(AttachedParameter, DTensor):
    """A DTensor at rest, see [Note: DTensors]."""

    __slots__ = ()

    @property
    def _local_tensor(self) -> torch.Tensor:  # type: ignore[override]
        return self._offload_access.local()  # type: ignore[no-any-return]

    grad = ActiveParameter.grad
    data: Any = property(_T.data.__get__, lambda p, one: p._offload_access.set_data(one))
    requires_grad: Any = property(
        _T.requires_grad.__get__, lambda p, on: p._offload_access.set_requires_grad(p, on)
    )
    register_post_accumulate_grad_hook: Any = refuse_hook

    def requires_grad_(self, requires_grad: bool = True) -> RestingDTensor:
        """Freeze or unfreeze it."""
        self.requires_grad = requires_grad
        return self


class DTensorBinding(Binding):
    """How a DTensor has its values."""

    plain = active = DTensor
    resting = RestingDTensor

    def __init__(self, parameter: DTensor):
        """Of a parameter, which is not attached yet."""
        self._like: Any = parameter.detach()
        set_local_part(DTensor, self._like, torch.empty(0))
        self._of = weakref.ref(parameter)  # Else `model.to()` swaps it for another, half of it.

    def bind(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Let it have another local tensor."""
        set_local_part(DTensor, parameter, share(values))  # Dynamo takes none with an offset.

    def local(self, value: Any) -> Any:
        """The local tensor of a DTensor, once that has the placements of the parameter."""
        if isinstance(value, DTensor):
            if value.placements != self._like.placements:
                value = value.redistribute(placements=self._like.placements)
            value = local_part(value)
        wait: Callable[[], torch.Tensor] | None = getattr(value, "wait", None)
        return value if wait is None else wait()  # Of a collective that is under way.

    def shown(self, local: torch.Tensor) -> torch.Tensor:
        """A DTensor like the parameter."""
        return with_local_part(DTensor, self._like, local)  # type: ignore[no-any-return]


class TensorGroup(Group):
    """The ranks that have parts of the same parameters."""

    def binding_of(self, parameter: nn.Parameter) -> Binding:
        """How a parameter has its values."""
        return DTensorBinding(parameter) if isinstance(parameter, DTensor) else PLAIN


def tensor_group(
    named: Mapping[str, DTensor], mesh: Any, device: Device, config: Config
) -> TensorGroup:
    """The ranks on whose mesh these parameters lie, and `mesh` does not."""
    name, first = next(iter(named.items()))
    if mesh is None:
        raise ValueError(
            f"attach: parameter {name} is a DTensor; found no mesh: the ranks that have the same "
            'part of it train together, so pass their mesh, mesh["dp"], also where it is one rank'
        )
    for of, one in named.items():
        if why := _fault_of(one, first.device_mesh, device):
            raise ValueError(f"attach: parameter {of} is a DTensor {why}")
    group = first.device_mesh.get_group()
    mine = dist.get_process_group_ranks(group)
    found = mesh.mesh.flatten().tolist() if isinstance(mesh, DeviceMesh) else None
    others = dist.get_process_group_ranks(mesh) if found is None else found
    if both := sorted({*mine} & {*others} - {dist.get_rank()}):
        raise ValueError(
            f"attach: the mesh has ranks {both}, which have other parts of parameter {name}, a "
            "DTensor: a model that is parallelized goes with the other dimension of its mesh, as "
            'in mesh["tp"] and mesh["dp"]; after fully_shard, leave that out, as attach cuts it'
        )
    return TensorGroup(group, device, config.comm_timeout)


def _fault_of(one: DTensor, mesh: DeviceMesh, device: Device) -> str | None:
    """Why a DTensor cannot be attached; None where it can."""
    if one.device_mesh != mesh or mesh.ndim != 1:
        return (
            f"on {one.device_mesh}, and all of a model have to be on the same mesh of one dimension"
        )
    if not all(type(placement) in (Shard, Replicate) for placement in one.placements):
        return f"placed {one.placements}, and only Shard and Replicate have values to keep"
    here = local_part(one)
    if one.is_meta or here.device.type != device.torch_device.type:
        return f"on {one.device}, and its values have to be on {device.torch_device} before attach"
    if not here.is_contiguous():
        return f"whose part here has strides {here.stride()}: give it a contiguous() copy"
    (placement,), ranks = one.placements, mesh.size()
    if isinstance(placement, Shard):
        rows = one.shape[placement.dim]
        if -(-rows // ranks) * (ranks - 1) >= rows:
            return f"of {rows} rows in dimension {placement.dim}: too few for each of {ranks} ranks"
    return None
