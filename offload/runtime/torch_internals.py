"""The private names of torch that the engine uses: all of them, and no other file names one.

Each stands here with its reason and with what serves where a release of torch lacks it. A test
counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import nn
from torch.utils import _python_dispatch as _modes

no_trap: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""A context in which `__torch_function__` of subclasses is not called: the engine reads and sets
what a parameter at rest really holds. Nothing else serves."""


def graph_task() -> int:
    """Autograd's number of the innermost backward on this thread; -1 where none runs. It tells a
    recompute from a forward, and one backward from another. Nothing else serves."""
    return int(torch._C._current_graph_task_id())


def call_at_end(callback: Callable[[], None]) -> None:
    """Let the backward that runs on this thread call `callback` when it ends, unless it raises.
    Nothing else serves."""
    engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(callback)


def saving_hooks() -> tuple[Any, Any] | None:
    """The saved-tensor hooks that are active on this thread: pack and unpack. Torch calls the
    innermost pair alone, so the engine's own call these. Where the name is missing checkpoints
    around a unit keep nothing of what is saved inside."""
    with suppress(AttributeError):
        return torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore
    return None


in_dispatch_mode: Callable[[], bool] = _modes.is_in_torch_dispatch_mode
without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _modes._disable_current_modes
"""Whether a `TorchDispatchMode` of the user's is active, and a context without any: a FLOP counter,
or selective checkpointing, would take the engine's copies for operations of the model."""


innermost_transform: Callable[[], object] = getattr(
    torch._C._functorch, "peek_interpreter_stack", lambda: None
)
"""The transform of `torch.func` that is active, if any: offloaded tensors cannot go through one.
Where the name is missing nothing is refused, and torch raises errors of its own."""


def introduce(kind: type[torch.Tensor], *, in_lists: bool = False) -> None:
    """Let torch.compile end its graph where it meets a tensor of a class: it would trace the
    stand-in. Where the name is missing it looks for a `__torch_function__` that it can trace, finds
    none, and ends its graph, too. `in_lists`: let torch's clipping put them in lists, as norms of
    an accelerator are rounded otherwise there; where that name is missing it does not."""
    known: set[Any] = getattr(torch._dynamo.config, "nontraceable_tensor_subclasses", set())
    known.add(kind)
    if in_lists:
        with suppress(AttributeError):
            torch.utils._foreach_utils._foreach_supported_types.append(kind)  # type: ignore


compiler: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""What of torch.compile looks at the frames of this thread, if anything. Nothing else serves."""

fits_in_place: Any = getattr(torch, "_has_compatible_shallow_copy_type", None)
"""What `nn.Module.to()` asks before it assigns `p.data`, or puts another parameter in its place;
answering it refuses a conversion by name. Where it is missing `step()` refuses."""


def data_parallel() -> nn.Module | None:
    """The `DistributedDataParallel` that calls the model now, if any: it would never see gradients
    of offloaded parameters. Where the name is missing none is seen."""
    return getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


version: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]
"""How often a tensor was changed in place, as torch's own checks ask it. Nothing else serves."""


def gradient_hooks(parameter: torch.Tensor) -> Any:
    """What `register_post_accumulate_grad_hook` has put on a parameter, where a streamed one has no
    gradient. Where the name is missing hooks from before attach find None."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


def share_step_hooks(source: torch.optim.Optimizer, into: torch.optim.Optimizer) -> None:
    """Let an optimizer call what is registered before and after another one's step, too. Where the
    names are missing it does not."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        getattr(into, name, {}).update(getattr(source, name, {}))


number_copies: Any = getattr(torch.amp.grad_scaler, "_MultiDeviceReplicator", None)
"""The class by which `GradScaler` gives each device a copy of its numbers, see [Note: Scaler] of
`device`. Where it is missing copies to the CPU may be read before they have arrived: an accelerator
wants gradients on the device there."""


wrapper: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
"""Make a tensor of a subclass with a shape and no memory, as DTensor does. Nothing else serves."""


def local_part(value: Any) -> Any:
    """What is here of a DTensor, with no collective and of no graph; anything else as it is. FSDP2
    takes it so, too: `to_local()` gives an alias. Nothing else serves."""
    return getattr(value, "_local_tensor", value)


def set_local_part(kind: Any, value: torch.Tensor, local: torch.Tensor) -> None:
    """Let a DTensor, which is that class or one below, have another local tensor."""
    kind._local_tensor.__set__(value, local)


def with_local_part(kind: Any, value: Any, local: torch.Tensor) -> Any:
    """A DTensor like another one, with a local tensor of its own, which stays the object that it
    is: `from_local()` takes a view, and a shard over ranks has none."""
    return kind(local, value._spec, requires_grad=False)


def group_store(group: Any) -> Any:
    """The store that the ranks of a process group share.

    In it a rank that fails tells why, and a collective that fails says only that it did. Nothing
    else serves.

    Raises:
        RuntimeError: the group was destroyed.
    """
    from torch.distributed import distributed_c10d

    chosen = distributed_c10d._get_default_group() if group is None else group
    if chosen not in distributed_c10d._world.pg_map:
        raise RuntimeError("the process group was destroyed")
    return distributed_c10d._world.pg_map[chosen][1]
