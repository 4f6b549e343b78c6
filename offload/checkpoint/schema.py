"""What a file of JSON may say: a schema, and the one function that holds data against it.

A schema is a predicate (its docstring says what it lets pass), a dict of schemas by key (`key?` may
be missing, others may not, and no more may come), `Each` for a dict of any names, `[schema]` for a
list of any length, a tuple of schemas for one of as many, or `Maybe` for what may be null. Nothing
that a file says is used before it has passed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

COUNT_MAX = 1 << 62

Predicate = Callable[[Any], bool]


class Refusal(ValueError):
    """What was read is refused, in a sentence."""


@contextmanager
def told(where: str, asked: str, cause: str) -> Iterator[None]:
    """Turn what damage can raise, which is anything, into a sentence, a `Refusal`."""
    try:
        yield
    except (Refusal, OSError):
        raise
    except Exception as error:
        found = "" if type(error) is ValueError else f"{type(error).__name__}: "
        found += " ".join(str(error).split())[:300]
        raise Refusal(f"{where}: asked to read {asked}; found {found}; likely {cause}") from error


class Each(NamedTuple):
    """A dict of any names: what its keys are, and its values."""

    names: Predicate
    values: Any


class Maybe(NamedTuple):
    """Null, or what is of a schema."""

    schema: Any


def check(value: Any, schema: Any, where: str) -> None:
    """Refuse what is not of a schema, and say where, and what was expected there."""
    if callable(schema):
        if not schema(value):
            raise ValueError(f"{where} is {shown(value)}; expected {schema.__doc__}")
        return
    if isinstance(schema, Maybe):
        if value is not None:
            check(value, schema.schema, where)
        return
    kind: Any = dict if isinstance(schema, (dict, Each)) else list
    if not isinstance(value, kind):
        raise ValueError(f"{where} is {shown(value)}; expected a {kind.__name__}")
    if isinstance(schema, Each):
        for name, one in value.items():
            check(name, schema.names, f"a key of {where}")
            check(one, schema.values, f"{where}[{shown(name)}]")
    elif kind is list:
        each = schema if isinstance(schema, tuple) else schema * len(value)
        if len(each) != len(value):
            raise ValueError(f"{where} is {shown(value)}; expected a list of {len(each)}")
        for at, (one, of) in enumerate(zip(value, each)):
            check(one, of, f"{where}[{at}]")
    else:
        fields = {name.rstrip("?"): one for name, one in schema.items()}
        if missing := [name for name in schema if name[-1] != "?" and name not in value]:
            raise ValueError(f"{where} has no {missing[0]}")
        if more := value.keys() - fields.keys():
            raise ValueError(f"{where} has {shown(min(more))}, which this release does not know")
        for name, one in value.items():
            check(one, fields[name], f"{where}.{name}")


def shown(value: Any) -> str:
    """A value for a message, of one line and not long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # Nested too deep, or an integer of too many digits.
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."


def count(value: Any) -> bool:
    """a whole number from 0 to 2^62"""
    return type(value) is int and 0 <= value <= COUNT_MAX


def flag(value: Any) -> bool:
    """true or false"""
    return type(value) is bool


def text(value: Any) -> bool:
    """text"""
    return isinstance(value, str)


def file_name(value: Any) -> bool:
    """the name of a file beside it"""
    plain = text(value) and len(value) < 256 and os.path.basename(value) == value
    return plain and value not in ("", ".", "..")


def accepted(expected: str, take: Callable[[Any], object]) -> Predicate:
    """The predicate that lets pass what a function takes without an error, which is `expected`."""

    def accepts(value: Any) -> bool:
        try:
            take(value)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            return False
        return True

    accepts.__doc__ = expected
    return accepts
