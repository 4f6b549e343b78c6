"""An accelerator for tests on the CPU: PyTorch's operations on it are queued and done later.

[Note: A paced accelerator]
Device memory is CPU memory that is known to be the device's. An operation that touches it, of the
user's model, of autograd or of the engine, is caught below autograd (`TorchDispatchMode`): its
outputs are allocated, full of NaN; what computes them is queued on the thread's current stream and
reads and writes memory when it is done there, in logical time (see `paced_streams`). So a copy has
really not moved a byte before it is done, and a missing wait gives wrong bits, or a race that is
recorded. Views are metadata and made at once; what needs values on the host (`item`, a copy to CPU
memory that may block) waits for its stream, as on CUDA.

Memory of the CPU is watched too: operations on it, the compiled update and the store's transfers
are held against the copies that are under way.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import cpu_adam.native
from offload.parallel.flat_shard import FlatShard
from offload.program.ops import Value
from offload.runtime.device import Device
from offload.runtime.store import Store
from tests.paced_autograd import Nodes
from tests.paced_streams import Access, Event, Stream, Timeline

FREE_BYTES = 64 << 20


class Paced(Device):
    """The device, and what of PyTorch runs on it."""

    is_host = False

    def __init__(self) -> None:
        """Nothing is queued; the host is slow and the delays are those of seed 0."""
        super().__init__(torch.device("cpu"))
        self.timeline = Timeline()
        self.nodes = Nodes(self.timeline)
        self.change(0, host_pace=1.0, host_pauses_s=0.0)
        self._local = threading.local()
        self._aside: list[Event] = []
        self._modes: list[_Mode] = []
        self.spins: list[str] = []
        """Operations that wait for the device as torch does, whose host spins."""
        self._storages: dict[int, tuple[StorageWeakRef, Any]] = {}
        """By address of what torch keeps of a storage: its memory; None where that is torch's."""

    def change(self, seed: int, *, host_pace: float, host_pauses_s: float) -> None:
        """Go on by other delays; lanes' threads sleep up to `host_pauses_s` wherever they can."""
        self.timeline.change(seed, host_pace)
        self._pauses_s = host_pauses_s

    # -- offload.device.Device ----------------------------------------------------------------

    def identity(self) -> str:
        return "paced"

    def free_bytes(self) -> int:
        return FREE_BYTES

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return self._made(tuple(made.shape), made.stride(), dtype)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def enter(self) -> None:
        self._local.is_lane = True
        self.timeline.current = self.timeline.new_stream()
        self._modes.append(_Mode(self))  # Torch before 2.11 loses one that nobody else holds.
        self._modes[-1].__enter__()

    def stream(self) -> Stream:
        return self.timeline.current

    def new_stream(self) -> Callable[[], AbstractContextManager[object]]:
        return functools.partial(self.unordered, self.timeline.new_stream())

    def fence(self, stream: object) -> Event:
        assert isinstance(stream, Stream)
        return Event(self.timeline, stream)

    def drain(self) -> None:
        self.pause()
        self.fence(self.stream()).synchronize()

    def drain_all(self) -> None:
        self.timeline.host_waits_for_all()

    def pause(self) -> None:
        """Let a lane's thread be late."""
        if self._pauses_s and getattr(self._local, "is_lane", False):
            time.sleep(self._pauses_s * self.timeline.random())

    # -- what runs on it ----------------------------------------------------------------------

    def _made(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A new tensor in its memory, full of NaN."""
        elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride))
        memory = np.full(max(elements, 1) * dtype.itemsize, 255, np.uint8)
        tensor = torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride).detach()
        return self._adopt(tensor, memory)

    def _adopt(self, tensor: torch.Tensor, memory: Any) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # The weak reference keeps the key from being another's.
        self._storages[storage._cdata] = StorageWeakRef(storage), memory
        if len(self._storages) > 4096:
            known = self._storages.items()
            self._storages = {key: one for key, one in known if not one[0].expired()}
        return tensor

    def _as_of_now(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the device sees: the memory and the shape as of now, and a number by value.

        It does not hold on to the storage, whose holders the engine counts.
        """
        known = self._storages.get(tensor.untyped_storage()._cdata)
        memory = known[1] if known is not None else None
        if memory is not None:
            flat = torch.frombuffer(memory, dtype=tensor.dtype)
            return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return tensor.data if tensor.dim() or known is not None else tensor.data.clone()

    def accesses(
        self, tensors: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> list[Access]:
        """The memory of `tensors`, of which some are `written`."""
        found = []
        for tensor in tensors:
            if tensor.numel():
                storage = tensor.untyped_storage()
                _, memory = self._storages.get(storage._cdata, (None, None))
                key = id(memory) if memory is not None else storage._cdata
                first = tensor.storage_offset() * tensor.itemsize
                steps = zip(tensor.shape, tensor.stride())
                elements = 1 + sum((size - 1) * step for size, step in steps)
                stop = first + elements * tensor.itemsize
                writes = any(tensor is one for one in written)
                holder = storage if memory is None else memory
                found.append(Access(key, first, stop, writes, holder))
        return found

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()` as on a device, see `paced_autograd`."""
        self.nodes.backward(loss, _Mode(self))

    @contextmanager
    def aside(self, *, waited_for: bool = True) -> Iterator[None]:
        """What the user does inside runs on a stream of its own, after what is before it.

        What follows waits for it, or else from `wait_for_those_aside` on.
        """
        outer, inner = self.stream(), self.timeline.new_stream()
        before = self.fence(outer)
        with self.unordered(inner):
            before.wait()
            yield
        if waited_for:
            self.fence(inner).wait()
        else:
            self._aside.append(self.fence(inner))

    def wait_for_those_aside(self) -> None:
        while self._aside:
            self._aside.pop().wait()

    @contextmanager
    def unordered(self, inner: Stream | None = None) -> Iterator[None]:
        """What the user does inside runs on another stream, in no order with what is around."""
        outer = self.stream()
        self.timeline.current = inner or self.timeline.new_stream()
        try:
            yield
        finally:
            self.timeline.current = outer

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func` returns, as soon as PyTorch on a device would return it."""
        self.nodes.note()
        kind = _kind_of(func)
        if kind.is_view:
            return func(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        written = _tensors([_argument(where, args, kwargs) for where in kind.written])
        on_device = [tensor for tensor in tensors if self.holds(tensor)]
        if not on_device or kind.needs_values:
            if on_device:
                if self.stream().items:
                    self.spins.append(str(func))
                self.drain()
            self.timeline.host_touches(str(func), self.accesses(tensors, written))
            found = func(*args, **kwargs)
            for tensor in _tensors(found) if on_device else ():
                self._adopt(tensor, None)
            return found
        is_copy = func is torch.ops.aten.copy_.default
        for tensor in () if is_copy else written:
            if not self.holds(tensor):  # Of a factory that was told the device as torch names it.
                self._adopt(tensor, None)
        there = _mapped(self._as_of_now, (args, kwargs))
        results, made = (None, []) if kind.returns else self._allocate(func, there)
        random = None
        if kind.is_random:
            with _generator:
                random = torch.get_rng_state()
                _outputs(func, there)  # The generator is where it will be.
        run = functools.partial(_compute, func, *there, made, random)
        lets_go = _argument((2, "non_blocking"), args, kwargs)
        blocks = is_copy and len(on_device) == 1 and not lets_go
        if blocks and self.stream().items:
            self.spins.append(str(func))
        self.timeline.queue(str(func), self.accesses([*tensors, *made], [*written, *made]), run)
        if blocks:
            self.drain()
        return _given(kind, args, kwargs) if kind.returns else results

    def _allocate(self, func: Any, there: Any) -> tuple[Any, list[torch.Tensor]]:
        """The outputs, and those of them that are tensors."""
        results = _mapped(lambda face: self._made(*face), _outputs(func, there), _Face)
        return results, _tensors(results)


class _Mode(TorchDispatchMode):
    def __init__(self, device: Paced):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FlatShard in types:
            return NotImplemented  # It does what is asked of its values, which come here again.
        with torch._C.DisableTorchFunctionSubclass():
            return self._device.dispatch(func, args, kwargs or {})


# -- arguments --------------------------------------------------------------------------------


def _mapped(function: Callable[[Any], Any], value: Any, kind: type = torch.Tensor) -> Any:
    """`value` with `function` of all that is of `kind` in its lists, tuples and dicts."""
    if isinstance(value, kind):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)([_mapped(function, one, kind) for one in value])
    if type(value) is dict:
        return {name: _mapped(function, one, kind) for name, one in value.items()}
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(found.append, value)
    return found


# -- operations --------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """What the schema of an operation says."""

    is_view: bool
    needs_values: bool
    """Of the host: it returns numbers, or a shape that values decide."""
    is_random: bool
    written: tuple[tuple[int, str], ...]
    """Position and name of the arguments that it writes."""
    returns: tuple[tuple[int, str], ...]
    """Those of them that it returns; it then returns nothing else."""


@functools.cache
def _kind_of(func: Any) -> _Kind:
    schema = func._schema
    aliased = [
        (number, argument.name, argument.alias_info)
        for number, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
    ]
    written = tuple((n, name) for n, name, alias in aliased if alias.is_write)
    returns = [
        next(
            (n, name)
            for n, name, alias in aliased
            if alias.before_set == returned.alias_info.before_set
        )
        for returned in schema.returns
        if returned.alias_info is not None and returned.alias_info.is_write
    ]
    assert len(returns) in (0, len(schema.returns)), f"{func} returns old and new"
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return _Kind(
        bool(aliased) and not written,
        bool(tags & set(func.tags)),
        torch.Tag.nondeterministic_seeded in func.tags,
        written,
        tuple(returns),
    )


def _argument(where: tuple[int, str], args: Any, kwargs: Any) -> Any:
    number, name = where
    return args[number] if number < len(args) else kwargs.get(name)


def _given(kind: _Kind, args: Any, kwargs: Any) -> Any:
    given = tuple(_argument(where, args, kwargs) for where in kind.returns)
    return given[0] if len(given) == 1 else given


class _Face(NamedTuple):
    """What is known of a tensor before its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Face:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


_known: dict[Any, Any] = {}

_generator = threading.RLock()
"""Held around each use of torch's generator: a lane that waits lets the clock run on its thread,
and there the device may come to a random operation while the host draws."""


def _outputs(func: Any, there: Any) -> Any:
    """What an operation returns, faces for tensors: found once, with zeros for inputs."""
    faces = _mapped(_Face.of, there)
    key = (func, repr(_mapped(type, faces, float)))  # No shape depends on a fraction.
    if key not in _known or torch.Tag.nondeterministic_seeded in func.tags:
        args, kwargs = _mapped(_zeros, faces, _Face)
        with torch.no_grad(), _generator:
            _known[key] = _mapped(_Face.of, func(*args, **kwargs))
    return _known[key]


def _zeros(face: _Face) -> torch.Tensor:
    if 0 in face.shape:
        return torch.zeros(face.shape, dtype=face.dtype)
    span = 1 + sum((size - 1) * stride for size, stride in zip(face.shape, face.stride))
    return torch.zeros(span, dtype=face.dtype).as_strided(face.shape, face.stride)


def _compute(func: Any, args: Any, kwargs: Any, made: Sequence[torch.Tensor], random: Any) -> None:
    """What the device does when it comes to it."""
    with _disable_current_modes(), torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        if random is None:
            results = func(*args, **kwargs)
        else:
            with _generator:
                before = torch.get_rng_state()
                torch.set_rng_state(random)
                results = func(*args, **kwargs)
                torch.set_rng_state(before)
        for into, output in zip(made, _tensors(results)):
            into.data.copy_(output)


# -- tests with it -----------------------------------------------------------------------------


@contextmanager
def paced(device: Paced | None = None) -> Iterator[Paced]:
    """Attach to a paced accelerator, and let this thread's operations run on it."""
    device = Paced() if device is None else device
    kernel_for = cpu_adam.native._kernel_for

    def host_kernel(*tensors: torch.Tensor) -> Any:
        if any(device.holds(tensor) for tensor in tensors):
            return None
        device.pause()
        device.timeline.host_touches("the compiled update", device.accesses(tensors, tensors))
        return kernel_for(*tensors)

    def watched(transfer: Callable[..., None], writes: bool) -> Callable[..., None]:
        def run(store: Store, value: Value, memory: torch.Tensor, *rest: Any) -> None:
            device.pause()
            touched = device.accesses([memory], [memory] if writes else [])
            device.timeline.host_touches(f"the store's {transfer.__name__}", touched)
            transfer(store, value, memory, *rest)

        return run

    @contextmanager
    def without_other_modes() -> Iterator[None]:
        """As the engine takes off the modes of users; this one is the device."""
        with _disable_current_modes(), _Mode(device):
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload.attachment.compute_device", lambda: device)
        patch.setattr("offload.runtime.entry.without_dispatch_modes", without_other_modes)
        patch.setattr(cpu_adam.native, "_kernel_for", host_kernel)
        patch.setattr(Store, "read", watched(Store.read, True))
        patch.setattr(Store, "write", watched(Store.write, False))
        with _Mode(device):
            yield device
