"""The state of a span as torch's own optimizers have it: a number per element for each moment.

What checkpoints and people read. For most formats these are the slots of the record; `compact` is
decoded, and encoded again to the nearest code, which brings back the very bits that were decoded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cpu_adam import compact
from cpu_adam.checks import check_residue
from cpu_adam.formats import StateFormat


def plain_dtypes(format: StateFormat) -> dict[str, torch.dtype]:
    """The dtype of each part of the plain state, by name."""
    coded = _MOMENTS if format.coded else ()
    return {
        slot.name: torch.float32 if slot.name in coded else getattr(torch, slot.dtype)
        for slot in format.slots
        if slot.elements_per_item == 1
    }


@torch.no_grad()
def to_plain(record_views: Mapping[str, Tensor], format: StateFormat) -> dict[str, Tensor]:
    """The plain state of a span, 1-D each; parts that need no decoding are the slots themselves.

    record_views: the slots of the span, which starts a group.
    """
    decoded = compact.decode(record_views) if format.coded else {}
    return {name: decoded.get(name, record_views[name]) for name in plain_dtypes(format)}


def scales(record_views: Mapping[str, Tensor], format: StateFormat) -> dict[str, Tensor]:
    """What a coded record has by group of 128 elements. With it `from_plain` writes the very record
    that `to_plain` has read; without it one that decodes to the same moments."""
    return {s.name: record_views[s.name] for s in format.slots if s.elements_per_item > 1}


@torch.no_grad()
def from_plain(
    state: Mapping[str, Tensor], record_views: Mapping[str, Tensor], format: StateFormat
) -> None:
    """Write the slots of a span from its plain state; what `state` lacks becomes zero.

    state: 1-D tensors of the span's length, of any floating dtype (the residue: integers; one that
    an optimizer of torch has made floating is as good as none). Raises ValueError, before anything
    is written, for a residue that is not of 16 bits.
    """
    dtypes = plain_dtypes(format)
    given = {
        name: value
        for name, dtype in dtypes.items()
        if (value := state.get(name)) is not None
        and value.is_floating_point() == dtype.is_floating_point
    }
    for name in given.keys() & {name for name, dtype in dtypes.items() if dtype == torch.int16}:
        check_residue(given[name])
    coded = _MOMENTS if format.coded else ()
    if coded:
        whole = {name: torch.zeros_like(record_views[name], dtype=dtypes[name]) for name in coded}
        for name in given.keys() & whole.keys():
            whole[name].copy_(given[name])
        compact.restore(whole, record_views, state)
    for name in dtypes.keys() - set(coded):
        if name in given:
            record_views[name].copy_(given[name])
        else:
            record_views[name].zero_()


_MOMENTS = ("exp_avg", "exp_avg_sq")
