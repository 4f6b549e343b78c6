"""Many ranks train one model: what each asks of the others, and in which order.

`attach` imports it where there are several ranks, and only there.
"""

from __future__ import annotations

import atexit
import os
import socket
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from offload.config import Config
from offload.model.engine import Engine, engine_of
from offload.parallel.flat_shard import FlatShard
from offload.parallel.gradients import SummedGradients
from offload.parallel.group import Group
from offload.parallel.ranks import Ranks
from offload.parallel.two_level_group import TwoLevelGroup, levels_of
from offload.runtime.device import Device
from offload.runtime.entry import ended_by
from offload.runtime.torch_internals import local_part


def join(mesh: Any, device: Device, config: Config) -> Group | None:
    """The ranks of a mesh, by default of the world; None where it has one."""
    groups = levels_of(mesh) if isinstance(mesh, DeviceMesh) else [mesh]
    if mesh == dist.GroupMember.NON_GROUP_MEMBER:  # What `new_group` gives to other ranks.
        groups = []
    elif not isinstance(mesh, (DeviceMesh, dist.ProcessGroup, NoneType)):
        raise TypeError(
            f"attach: mesh is a {type(mesh).__name__}: pass a DeviceMesh of one or two dimensions, "
            "torch.distributed.init_device_mesh(kind, (ranks,)), or a process group"
        )
    if not groups or dist.get_rank(groups[0]) < 0:
        raise ValueError(
            "attach: this rank is not part of the mesh: attach on the ranks of the mesh alone"
        )
    ranks, world = prod(map(dist.get_world_size, groups)), dist.get_world_size()
    if config.durable is not None and ranks != world:
        raise ValueError(
            f"Config.durable: asked for commits of {ranks} of the {world} ranks; found that those "
            "of others would be at other steps: let all ranks share the model, or call "
            "offload.save(model, optimizer, folder) on them"
        )
    if ranks == 1:
        return None
    kind, of = (TwoLevelGroup, mesh) if groups[1:] else (Group, groups[0])
    made = kind(of, device, config.comm_timeout)
    names = ("states", "gradient_dtype", "max_grad_norm", "reduce", "micro_batches", "shard")
    fields = {name: getattr(config, name) for name in names}
    fields |= {"durable": config.durable is not None, "resume": config.resume}
    told = [f"Config {name}={value!r}" for name, value in fields.items()]
    made.require_alike(f"torch {torch.__version__}", *told)
    here = socket.gethostname()
    # As torchrun sets it, where another launcher does not: by it a host is shared.
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(made.all_objects(here).count(here)))
    return made


@contextmanager
def gathered(
    model: nn.Module,
    names: Iterable[str | torch.Tensor] | None = None,
    *,
    source: int | None = None,
) -> Iterator[None]:
    """A context in which parameters of a model show all of their values; all ranks enter it.

    Without names `optimizer.state_dict()` has all values, too, so that what saves both on one rank
    (`accelerator.save_state`, `torch.save`) finds them; all ranks ask for it.

    Args:
        model: attached; with one rank nothing changes.
        names: of the parameters, or they themselves, all of them by default: each takes its full
            size in memory.
        source: the rank whose edits count for all; by default each rank makes the same ones.

    Raises:
        ValueError: the model is not attached, or has no such parameter.
    """
    engine, known = engine_of(model), dict[Any, tuple[int, int]]()
    for unit in engine.units:
        for index, (one, parameter) in enumerate(zip(unit.spec.parameters, unit.parameters)):
            known[one.name] = known[parameter] = unit.index, index
    if names is None:
        asked: list[Any] = list(known)
    else:
        asked = [names] if isinstance(names, (str, torch.Tensor)) else list(names)
    if missing := [one for one in asked if one not in known]:
        shown = (one if isinstance(one, str) else f"a {type(one).__name__}" for one in missing)
        raise ValueError(
            f"offload.gathered: the model does not have {', '.join(shown)}: give parameters of it, "
            "or names of model.named_parameters(), of a tied one the first"
        )
    if engine.ranks is None:
        yield
        return
    with engine.lock:
        engine.boundary()
        places = sorted({known[one] for one in asked})
        with engine.ranks.gathered(places, source, names is None):
            yield
        engine.boundary()


def local(parameter: torch.Tensor) -> tuple[range, torch.Tensor]:
    """Which elements of a parameter, or of its `grad` or a state, are on this rank, in row-major
    order, and their values; of a DTensor in its local tensor. Edits of a gradient in memory count;
    those of a weight are of a copy, and torch refuses those of a state.
    """
    found = local_part(parameter if isinstance(parameter, FlatShard) else parameter.detach())
    if isinstance(found, FlatShard):
        return found.local()
    return range(found.numel()), found.view(-1)


def together(group: Group, engine: Engine, config: Config) -> tuple[Ranks, SummedGradients]:
    """What the engines of all ranks do together, whose models are seen to be the same."""
    group.require_alike(f"parameters whose checksum is {group.checksum}")
    if not engine.runner.device.is_host:  # Else collectives are waited for by themselves.
        engine.runner.look = group.look
    atexit.register(_tell_end, weakref.ref(group))
    gradients = SummedGradients(group, engine, config.reduce)
    return Ranks(gradients.collectives, engine.snapshots), gradients


def _tell_end(of: weakref.ref[Group]) -> None:
    """Tell the other ranks of an exception that has ended the program."""
    ended = ended_by()
    if ended is not None and (group := of()) is not None:
        group.fail(ended)
