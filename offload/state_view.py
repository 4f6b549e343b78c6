"""`optimizer.state` of an offloaded optimizer: copies, which refuse to be changed."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

_INSTEAD = (
    "what optimizer.state[p] gives are copies of states that live elsewhere, so the change would "
    "be lost: clone() it, change that, and assign the whole, optimizer.state[p] = {**optimizer."
    'state[p], "exp_avg": changed}'
)

_OPERATORS: tuple[str, ...] = ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow")
_OPERATORS += ("and", "or", "xor", "lshift", "rshift")
_IN_PLACE = {"__setitem__", "__set__", *(f"__i{name}__" for name in _OPERATORS)}
"""Names of functions that change their first argument, beside those that end in an underscore."""


class StateCopy(torch.Tensor):
    """A copy of a state, and views of it: reading is free, changing is refused."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func`; what shares memory with a copy is one too.

        Raises:
            RuntimeError: it would change a copy.
        """
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        changes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        changed = [args[0] if changes and args else None, kwargs.get("out")]
        if any(isinstance(one, StateCopy) for into in changed for one in _each(into)):
            raise RuntimeError(f"{name}: {_INSTEAD}")
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            if name in ("numpy", "__array__"):
                found.flags.writeable = False
            whole = args[0] if args and isinstance(args[0], StateCopy) else None
            if whole is None or not isinstance(found, torch.Tensor):
                return found
            shares = found.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            return found.as_subclass(cls) if shares else found.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            plain: Any = self.as_subclass(torch.Tensor)
            return plain.__reduce_ex__(protocol)


def _each(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else (value,)


class StatesOfOne(dict[str, Any]):
    """The states of one parameter: a dictionary of copies that refuses to be changed.

    To set what is there already is no change: trainers move states to where they are.
    """

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(_INSTEAD)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self or not _alike(value, self[name]):
            self._refuse()

    __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    update = setdefault = pop = popitem = clear = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return (dict, (dict(self),))


def _alike(value: object, kept: torch.Tensor) -> bool:
    """Whether a value is bit for bit what is kept, wherever it lies."""
    if not isinstance(value, torch.Tensor):
        return False
    if value.shape != kept.shape or value.dtype != kept.dtype:
        return False
    bits = (one.detach().cpu().reshape(-1).view(torch.uint8) for one in (value, kept))
    return torch.equal(*bits)


class _Stateful(Protocol):
    """What has the states: the optimizer."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters of its groups."""

    def in_places(self) -> list[nn.Parameter]:
        """The same in the order in which their states lie."""

    def steps_of(self, parameter: nn.Parameter) -> int:
        """Steps that a parameter has had."""

    def state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Copies of a parameter's states."""

    def replace_states(self, found: Sequence[tuple[nn.Parameter, Mapping[str, Any]]]) -> None:
        """Take over other states."""


class StateView(MutableMapping[nn.Parameter, Mapping[str, Any]]):
    """What torch code reads as `optimizer.state`: read from the records when asked."""

    def __init__(self, optimizer: _Stateful, *, plain: bool):
        """Of the parameters of `optimizer`; `plain` copies may be changed, and are nobody's."""
        self._optimizer = optimizer
        self._plain = plain

    def __getitem__(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        found = self._optimizer.state_of(parameter)
        if self._plain:
            return found
        return StatesOfOne({name: one.as_subclass(StateCopy) for name, one in found.items()})

    def __iter__(self) -> Iterator[nn.Parameter]:
        """In the order in which states lie: whoever reads all of them reads every chunk once."""
        return iter([p for p in self._optimizer.in_places() if self._optimizer.steps_of(p)])

    def items(self) -> ItemsView[nn.Parameter, Mapping[str, Any]]:
        """The parameters and their states, read one by one; for `plain` in the groups' order."""
        if not self._plain:
            return super().items()
        found = {parameter: self[parameter] for parameter in self}
        return {one: found[one] for one in self._optimizer.parameters() if one in found}.items()

    def __len__(self) -> int:
        return len(self._stepped())

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is one for one in self._stepped())

    def _stepped(self) -> list[nn.Parameter]:
        return [p for p in self._optimizer.parameters() if self._optimizer.steps_of(p)]

    def __setitem__(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        self._optimizer.replace_states([(parameter, state)])

    def __delitem__(self, parameter: nn.Parameter) -> None:
        self._optimizer.replace_states([(parameter, {})])
