"""Parameters in use: views of a slot, with torch's own operations at torch's own speed.

[Note: In use]
Nothing comes between torch and a parameter in use but what is asked of it by name: its gradient,
which is kept elsewhere, and `data` and `detach()`, which give away a view of the slot. Outside the
forward or backward that it is used in (an exception or Ctrl-C may have broken that off) these put
it at rest first, so that nobody is given what another unit's weights will come to. A change in
place is found when the unit is put at rest, by torch's count of changes. Changes by way of `data`
are not counted, so where that was asked for, or the pass was broken off, weights are compared.
"""

from __future__ import annotations

from typing import Any

import torch

from offload.interrupt import wholly
from offload.resting import Home, OffloadedParameter

_T: Any = torch.Tensor


class ServedParameter(OffloadedParameter):
    """A parameter whose values lie in a slot, see [Note: In use]."""

    _offload_home: Home

    @property
    def data(self) -> torch.Tensor:
        """The values; changes count."""
        return wholly(self._offload_home.look, _T.data.__get__, to_write=True)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        wholly(self._offload_home.set_data, values)

    def detach(self) -> torch.Tensor:
        """The values, apart from the graph; changes count."""
        return wholly(self._offload_home.look, _T.detach, to_write=False)

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The gradient kept for the parameter; None inside backward."""
        if torch.compiler.is_compiling():  # It looks at everything, and wants nothing of it.
            return None
        return wholly(self._offload_home.gradient)

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        wholly(self._offload_home.set_gradient, gradient)

    @grad.deleter
    def grad(self) -> None:
        wholly(self._offload_home.set_gradient, None)
