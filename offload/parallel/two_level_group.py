"""Ranks in rows: what goes between rows, over a slow network, is sent once a row.

[Note: Two levels]
A mesh of R rows of S ranks is what torch calls (replicate, shard): a row is a node, or as many
ranks as are near each other. A model is cut over all of them even so, and nothing is there twice:
the rank at (r, s) has part r of the R parts of part s of S, so its position is s * R + r.

Weights are gathered over a column, whose ranks have part s together, and then over a row: a rank
sends others of its column 1 / S of what it would without rows. A gradient takes the way back. It is
exchanged in a row, where each rank adds the S parts that come, in their order, by the rounding of a
micro-batch. These sums are exchanged in the column, and their owner adds the R that come to what
it keeps. So R x S ranks sum as one process does that sums groups of S micro-batches first, and then
the groups. The parts are added up in the memory that the gradient came from: what was sent from it
is not needed again.

What a column has of a unit stays on the device where the plan has room for that and moves nothing
else to a slower tier. The next gathering then goes around in the row alone, until weights change:
a rank says so where a pass begins, and all ranks let go of what they have. So they do at one place
in their order, and no rank waits in a column where another does not.

Both collectives begin at one place, so that all ranks begin all of them in one order. On a device
the stream waits for the first, on the host this thread does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cpu_adam import accumulate
from offload.parallel.group import Group, Handles, own_group
from offload.runtime.device import Device


class TwoLevelGroup(Group):
    """See [Note: Two levels]."""

    def __init__(self, mesh: DeviceMesh, device: Device, timeout_s: float):
        """Of a mesh with several rows of several ranks, see `levels_of`."""
        column, row = mesh.get_group(0), mesh.get_group(1)
        super().__init__(row, device, timeout_s, mesh.mesh.flatten().tolist())
        by_position = mesh.mesh.T.flatten().tolist()
        self.order = [dist.get_group_rank(self._talk, one) for one in by_position]
        self.folds, self._shards = mesh.shape
        self._shard = dist.get_rank(row)
        self._column, self._row = (
            own_group(one, self._backend, timeout_s) for one in (column, row)
        )
        self._meet(self._group, self._column, self._row)

    def gather(
        self,
        into: torch.Tensor,
        part: torch.Tensor,
        column: torch.Tensor | None = None,
        in_column: bool = False,
    ) -> Handles:
        """Begin to gather a part from each rank, see `Group`."""
        mine = into.chunk(self._shards)[self._shard] if column is None else column
        if not in_column:
            self.wait(self._gather(mine, part, self._column))
        return self._gather(into, mine, self._row)

    def exchange(self, into: torch.Tensor, source: torch.Tensor) -> Handles:
        """Begin to send each rank its part of a gradient, summed over rows; `source` is lost."""
        self.wait(self._exchange(into, source, self._row))
        first, *others = into.chunk(self._shards)
        partial = source.chunk(self._shards)[0]
        partial.copy_(first)
        for one in others:
            accumulate(partial, one)
        return self._exchange(first, partial, self._column)


def levels_of(mesh: DeviceMesh) -> list[Any]:
    """The process groups of the dimensions of a mesh that have several ranks, of one at least; of
    none on a rank outside of it.
    """
    names, ranks = mesh.mesh_dim_names or ("replicate", "shard"), mesh.mesh
    if mesh.ndim > 2:
        raise ValueError(
            f"attach: asked for a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}; found that "
            "one is needed, over whose ranks the model is cut, or two, as (replicate, shard): pass "
            f"such a slice of it, mesh[{names[0]!r}] or mesh[{names[0]!r}, {names[1]!r}]"
        )
    if mesh.ndim == 2 and any(bool((ranks.diff(dim=at) < 0).any()) for at in (0, 1)):
        raise ValueError(
            f"attach: asked for a mesh of ranks {ranks.tolist()}; found that they descend in a row "
            "or column, where torch's process groups let them ascend: list them as "
            "torch.distributed.init_device_mesh does"
        )
    if mesh.get_coordinate() is None:
        return []
    several = [at for at, size in enumerate(mesh.shape) if size > 1]
    return [mesh.get_group(at) for at in several or [0]]
