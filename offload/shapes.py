"""Plain data out of JSON as what its type says, or the place at which it is something else. Pure.

Of a type only what our files hold is known: dataclasses (an object of their fields, or a row of
their values), sequences, mappings of texts, tuples, what may be null, numbers, texts and booleans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

COUNT_MAX = 1 << 63
NUMBER_MAX = 1e18
"""More than any time or count, and so that nothing that is made of it is infinite."""

Make = Callable[[Any], Any]
"""Takes what JSON gave."""


class Misfit(ValueError):
    """Something is not what its type says. The message says where, what it is and what is due."""

    def __init__(self, found: Any, due: str):
        """`found` where there should be `due`."""
        super().__init__()
        self.where = ""
        shown = repr(found)
        self._told = f"{shown if len(shown) <= 60 else shown[:57] + '...'}, expected {due}"

    def __str__(self) -> str:
        return f"{self.where.lstrip('.') or 'it'} is {self._told}"

    def inside(self, where: str) -> Misfit:
        """The same, of something around it."""
        self.where = f"{where}{self.where}"
        return self


@cache
def maker(kind: Any) -> Make:
    """What makes a `kind`, or raises `Misfit`."""
    simple = _SIMPLE.get(kind)
    if simple is not None:
        return simple
    if is_dataclass(kind):
        return _dataclass(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        return _row(tuple, [(f"[{k}]", maker(one), False) for k, one in enumerate(inner)])
    if origin is Sequence:
        return _sequence(maker(inner[0]))
    if origin is Mapping and inner[0] is str:
        return _mapping(maker(inner[1]))
    assert inner[1:] == (NoneType,), kind
    given = maker(inner[0])
    return lambda value: None if value is None else given(value)


def _text(value: Any) -> str:
    # Others could move the cursor of a terminal, or end a line.
    if type(value) is not str or not value.isprintable():
        raise Misfit(value, "a line of text")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= NUMBER_MAX:  # Nor what is no number.
        raise Misfit(value, f"a number from -{NUMBER_MAX:g} to {NUMBER_MAX:g}")
    return value  # type: ignore[no-any-return]


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < COUNT_MAX:
        raise Misfit(value, "a whole number from 0")
    return value


def _switch(value: Any) -> bool:
    if type(value) is not bool:
        raise Misfit(value, "true or false")
    return value


_SIMPLE: dict[Any, Make] = {str: _text, float: _number, int: _count, bool: _switch}


def _sequence(one: Make) -> Make:
    def make(value: Any) -> list[Any]:
        if type(value) is not list:
            raise Misfit(value, "a list")
        made = []
        for item in value:
            try:
                made.append(one(item))
            except Misfit as error:
                raise error.inside(f"[{len(made)}]") from None
        return made

    return make


def _mapping(one: Make) -> Make:
    def make(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise Misfit(value, "an object")
        made = {}
        for name, item in value.items():
            try:
                made[_text(name)] = one(item)
            except Misfit as error:
                raise error.inside(f".{name!r}") from None
        return made

    return make


def _row(kind: Callable[[list[Any]], Any], parts: Sequence[tuple[str, Make, bool]]) -> Make:
    """Of a list of as many values, each with its own maker; those that may be missing are last."""
    least = sum(not optional for _, _, optional in parts)

    def make(value: Any) -> Any:
        if type(value) is not list or not least <= len(value) <= len(parts):
            raise Misfit(value, f"a list of {len(parts)}")
        made = []
        for (name, one, _), item in zip(parts, value):
            try:
                made.append(one(item))
            except Misfit as error:
                raise error.inside(name) from None
        return kind(made)

    return make


def _dataclass(kind: Any) -> Make:
    hints = get_type_hints(kind)
    made_of = {field.name: maker(hints[field.name]) for field in fields(kind)}
    due = {one.name for one in fields(kind) if one.default is one.default_factory is MISSING}
    as_row = _row(
        lambda made: kind(*made), [(f".{n}", one, n not in due) for n, one in made_of.items()]
    )

    def make(value: Any) -> Any:
        if type(value) is list and not any(field.kw_only for field in fields(kind)):
            return as_row(value)
        if type(value) is not dict:
            raise Misfit(value, "an object")
        if missing := due - value.keys():
            raise Misfit(None, "a value").inside(f".{min(missing)}")
        if unknown := value.keys() - made_of:
            raise Misfit(value, f"none of that name: {min(unknown)!r}")
        made = {}
        for name, item in value.items():
            try:
                made[name] = made_of[name](item)
            except Misfit as error:
                raise error.inside(f".{name}") from None
        return kind(**made)

    return make
