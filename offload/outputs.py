"""What modules return: tensors, in containers that torch knows or in objects of any class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten


def replaced(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`output` with `change` done to its tensors; the same object where that changes none.

    In an object of a class that torch does not know as a container (a dataclass, a cache) the
    attributes that hold changed tensors are set anew, so it stays the object that others hold.
    """
    return _replaced(output, change, set())


def _replaced(tree: Any, change: Callable[[torch.Tensor], torch.Tensor], seen: set[int]) -> Any:
    leaves, changed = tree_leaves(tree), False
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[index] = change(leaf)
            changed = changed or leaves[index] is not leaf
        elif id(leaf) not in seen:
            seen.add(id(leaf))
            for name, value in _attributes(leaf):
                new = _replaced(value, change, seen)
                if new is not value:
                    object.__setattr__(leaf, name, new)  # Also where the dataclass is frozen.
    return tree_unflatten(leaves, tree_structure(tree)) if changed else tree


def tensors_in(output: Any) -> list[torch.Tensor]:
    """All tensors of an output. Those in objects count in dataclasses only.

    Other objects, such as caches, may hold what other modules have put into them.
    """
    if type(output) is torch.Tensor:
        return [output]
    found: list[torch.Tensor] = []
    left, seen = tree_leaves(output), set()
    while left:
        leaf = left.pop(0)
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and id(leaf) not in seen:
            seen.add(id(leaf))
            left += tree_leaves([value for _, value in _attributes(leaf)])
    return found


def _attributes(leaf: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of what an object holds; nothing where it is no holder of data."""
    if isinstance(leaf, (type, nn.Module)) or callable(leaf):
        return
    if is_dataclass(leaf):
        for field in fields(leaf):
            if hasattr(leaf, field.name):
                yield field.name, getattr(leaf, field.name)
    elif hasattr(leaf, "__dict__"):
        yield from list(vars(leaf).items())
