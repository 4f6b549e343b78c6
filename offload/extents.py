"""Which tensors lie in the same memory, and which are whole there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import torch
from torch import nn
from torch._subclasses import FakeTensor

from offload.exposure import use_count

Named = tuple[str, torch.Tensor]

ALONE = use_count(torch.empty(1))
"""Use count of the memory of a tensor of which there is no other."""


def sharing(named: Iterable[Named]) -> Iterator[tuple[Named, Named]]:
    """Pairs of which a write to one would show in the other; of plain dense tensors only."""
    found: list[tuple[int, int, str, torch.Tensor]] = []
    for name, tensor in named:
        plain = type(tensor) in (nn.Parameter, torch.Tensor) and tensor.layout is torch.strided
        if plain and not tensor.is_meta and tensor.numel():
            found.append((*_extent(tensor), name, tensor))
    found.sort(key=lambda entry: entry[:2])
    ahead: list[tuple[int, int, str, torch.Tensor]] = []
    for start, stop, name, tensor in found:
        ahead = [entry for entry in ahead if entry[1] > start]
        for _, _, other, before in ahead:
            if _share(before, tensor):
                yield (other, before), (name, tensor)
        ahead.append((start, stop, name, tensor))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of `tensor` and of the first one after it."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a write to one of two tensors whose extents overlap would show in the other.

    Columns of one matrix lie between each other and share nothing. What is expanded cannot be
    written to: of two such nothing can show.
    """
    if dense(one) and dense(other):
        return True
    if expanded(one):
        one, other = other, one
    if expanded(one):
        return False
    (start, stop), (other_start, other_stop) = _extent(one), _extent(other)
    first = min(start, other_start)
    unit = math.gcd(one.itemsize, other.itemsize, start - other_start)
    touched = torch.zeros((max(stop, other_stop) - first) // unit, dtype=torch.bool)

    def elements_of(tensor: torch.Tensor, start: int) -> torch.Tensor:
        units = tensor.itemsize // unit
        strides = [stride * units for stride in tensor.stride()]
        return touched.as_strided((*tensor.shape, units), (*strides, 1), (start - first) // unit)

    elements_of(one, start).fill_(True)
    return bool(elements_of(other, other_start).any())


def expanded(tensor: torch.Tensor) -> bool:
    """Whether many elements of `tensor` are one in memory, so that torch refuses to write to it."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride()))


def dense(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is all that lies between its first and its last element."""
    start, stop = _extent(tensor)
    return tensor.nbytes == stop - start and not expanded(tensor)


def zero(gradient: torch.Tensor) -> None:
    """Make a gradient zeros, as torch.optim does: a view cannot be detached."""
    if gradient.grad_fn is not None:
        gradient.detach_()
    else:
        gradient.requires_grad_(False)
    gradient.zero_()


def require_apart(updated: Sequence[tuple[str, nn.Parameter, bool]]) -> None:
    """Refuse what is updated by lanes, as the flag says, in memory of another that is updated.

    Raises:
        RuntimeError: there is such.
    """
    if not any(lanes for _, _, lanes in updated):
        return  # Torch's way: one after the other.
    held = [(name, one, lanes) for name, one, lanes in updated if use_count(one) > ALONE]
    by_lanes = {name for name, _, lanes in held if lanes}
    for (one, _), (other, _) in sharing((name, it) for name, it, _ in held if by_lanes):
        if one in by_lanes or other in by_lanes:
            raise RuntimeError(
                f"{one} and {other} share memory (the data of one was set to that of the other, "
                "likely), and step() would update both there at once: give one a clone(), tie "
                "them before attach, or keep their states on the device, Config(optimizer='device')"
            )


def lies_otherwise(tensor: torch.Tensor) -> bool:
    """Whether torch may compute other bits of it than of a contiguous tensor.

    By the strides of a matrix it chooses how to multiply; a vector's elements only lie apart.
    """
    return tensor.dim() > 1 and not tensor.is_contiguous()


def require_values(name: str, gradient: torch.Tensor) -> None:
    """Refuse the gradient of a parameter where it is not one number an element, in memory.

    Raises:
        ValueError: it is sparse, or only imitates one.
    """
    if gradient.layout is not torch.strided:
        refuse_sparse(f"the gradient of {name} is {gradient.layout}")
    if gradient.is_meta or isinstance(gradient, FakeTensor):
        raise ValueError(
            f"the gradient of {name} is a {type(gradient).__name__}, with no values in memory: "
            "likely of a backward that only imitates one, under FakeTensorMode (who estimates "
            "memory does so). Run that before attach; zero_grad() gives up what has come of it"
        )


def refuse_sparse(what: str) -> NoReturn:
    """Refuse gradients that are not dense.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"{what}, and only dense ones can be offloaded: build the embedding with sparse=False"
    )
