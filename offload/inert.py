"""Hooks that copies of a module do not take along."""

from __future__ import annotations

from typing import Any


class InertInCopies:
    """A hook of which copies and pickles of the module, which are attached to nothing, get none."""

    def __deepcopy__(self, memo: object) -> Any:
        return _inert

    def __reduce__(self) -> Any:
        return (_get_inert, ())


def _inert(*_: object) -> None:
    """What the hook is in a copy."""


def _get_inert() -> Any:
    return _inert
