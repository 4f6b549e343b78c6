"""What modules return: tensors, in tuples, lists and mappings, or in objects of any class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn


def replaced(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`output` with `change` done to its tensors.

    Lists, mappings and objects (a dataclass, a cache) stay the objects that others hold: what they
    hold is set anew. A tuple is another one where any of it is changed.
    """
    return _replaced(output, change, set())


def _replaced(tree: Any, change: Callable[[torch.Tensor], torch.Tensor], seen: set[int]) -> Any:
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        new = [_replaced(one, change, seen) for one in tree]
        if all(a is b for a, b in zip(new, tree)):
            return tree
        return type(tree)(*new) if hasattr(tree, "_fields") else tuple(new)
    if id(tree) in seen:
        return tree
    seen.add(id(tree))
    for name, value in list(_held(tree)):
        new_value = _replaced(value, change, seen)
        if new_value is value:
            continue
        if isinstance(tree, (list, MutableMapping)):
            tree[name] = new_value
        else:
            object.__setattr__(tree, name, new_value)  # Also where the dataclass is frozen.
    return tree


def tensors_in(output: Any) -> list[torch.Tensor]:
    """All tensors of an output; of objects those in dataclasses.

    Other objects, such as caches, may hold what other modules have put into them.
    """
    if type(output) is torch.Tensor:
        return [output]
    found: list[torch.Tensor] = []
    left, seen = [output], set[int]()
    while left:
        one = left.pop(0)
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, tuple):
            left += one
        elif (isinstance(one, (list, MutableMapping)) or is_dataclass(one)) and id(one) not in seen:
            seen.add(id(one))
            left += [value for _, value in _held(one)]
    return found


def _held(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Names and values of what an object holds; nothing where it is no holder of data."""
    if isinstance(holder, list):
        yield from enumerate(holder)
    elif isinstance(holder, MutableMapping):
        yield from holder.items()
    elif isinstance(holder, (type, nn.Module, str, bytes, int, float)) or callable(holder):
        return
    elif is_dataclass(holder):
        for field in fields(holder):
            if hasattr(holder, field.name):
                yield field.name, getattr(holder, field.name)
    elif hasattr(holder, "__dict__"):
        yield from vars(holder).items()
