"""The backwards under way: autograd's number of each, the outermost first.

Nothing tells that a backward has raised but that autograd drops what it was to call at the end. So
of each a weak reference to that is kept; one of which it is gone is over, and is forgotten when the
next begins or ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

_autograd: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]


class Backwards(dict[int, Callable[[], object]]):
    """By number, a weak reference to what autograd calls at the end."""

    def __init__(self) -> None:
        """None is under way."""
        self._thread = 0
        """Where the outermost one runs."""

    @property
    def outermost(self) -> int | None:
        """The number of the one around all others; None where none is under way."""
        return next(iter(self), None)

    @property
    def elsewhere(self) -> bool:
        """Whether they run on another thread."""
        mine = self._thread == threading.get_ident()
        return not mine and any(ended() is not None for ended in list(self.values()))

    def around(self, graph: int) -> list[int]:
        """Those in which one is."""
        return [one for one, ended in self.items() if one != graph and ended() is not None]

    def forget(self) -> None:
        """Forget those that have raised."""
        for one in [one for one, ended in self.items() if ended() is None]:
            del self[one]

    def began(self, graph: int, ended: Callable[[], None]) -> None:
        """One has begun on this thread; `ended` is called when it ends, unless it raises."""
        if not self:
            self._thread = threading.get_ident()
        self[graph] = weakref.ref(ended)
        _autograd.queue_callback(ended)

    def ended(self, graph: int) -> None:
        """One has ended, and with it those inside that raised."""
        self.pop(graph, None)
        self.forget()
