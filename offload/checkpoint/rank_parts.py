"""Values of a model that is cut over ranks, brought to the first rank, which writes them.

[Note: Saves over ranks]
All ranks call a save. A segment of a unit is cut in one range a rank, so the values of a parameter
in order are those of the rank at the first position, then those of the next: each rank reads its
chunks in the order in which they lie, as with one process, and sends what they have of a parameter
in its turn. The window is one chunk. All ranks meet before each unit, so that a save which has
failed on the first ends on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TypeAlias

import torch

from offload.checkpoint.shards import Sets, SetsReader, bytes_of, items
from offload.model.engine import Engine
from offload.planning.profile import Sharding, profile_of
from offload.runtime.entry import EngineError

Parts: TypeAlias = Iterator[tuple[str, str, torch.Tensor]]
"""Values, part by part: the prefix, the name of the parameter, and the part, 1-D."""


def write_together(
    engine: Engine, mine: Parts, sets: Sets, write: Callable[[Parts], object]
) -> None:
    """Let `write` take the parts of sets of all ranks, on the first of them; `mine` are those of
    this one. What it raises is told on the others."""
    if engine.ranks is None:
        write(mine)
        return
    group, failed = engine.ranks.group, list[Exception]()
    parts = _of_all(engine, mine, sets, failed)
    with suppress(_Elsewhere):
        if group.rank == 0:
            try:
                write(parts)
            except (EngineError, _Elsewhere):  # A rank that is gone hears nothing.
                raise
            except Exception as error:
                failed.append(error)
        for _ in parts:
            pass  # Until all ranks know.
    with group.all_or_none():
        for one in failed:
            raise one


def read_together(engine: Engine, reader: SetsReader, read: Callable[[], object]) -> None:
    """Let each rank `read` its part, and compare the checksums of what they have read together.
    What one raises is told on the others."""
    if engine.ranks is None:
        read()
        return
    engine.ranks.meet()  # Nothing is changed unless all of them have come here.
    with engine.ranks.group.all_or_none():
        read()
    reader.check(engine.ranks.group.all_objects(reader.parts))


class _Elsewhere(Exception):
    """A save has failed, and the rank where it did tells of it later."""


def _of_all(engine: Engine, mine: Parts, sets: Sets, failed: list[Exception]) -> Parts:
    """The parts of all ranks in the order of one process, to the first; `mine` are those of this
    rank, and last on the first its buffers."""
    ranks, group, own = engine.ranks, engine.ranks.group, _read(mine, failed)
    full, count = engine.plan.profile.full, group.ranks
    profiles = [profile_of(full, sharding=Sharding(at, count)) for at in range(count)]
    for unit in (*full, None):
        if ranks.meet(bool(failed)):
            raise _Elsewhere
        parts = (
            (rank, prefix, named[one.name]._replace(shape=(items(prefix, piece.elements),)))
            for one in (unit.parameters if unit else ())
            for rank, profile in zip(group.order, profiles)
            for piece in profile.locate(one.name)
            for prefix, named in sets.items()
            if one.name in named
        )
        for rank, prefix, part in parts:
            given = islice(own, int(rank == group.rank))
            if rank == 0:  # Which writes it itself.
                yield from given
                continue
            sent = engine.runner.device.empty((part.bytes,), torch.uint8)
            for _, _, values in given:
                sent.copy_(torch.from_numpy(bytes_of(values.cpu().contiguous())))
            group.broadcast(sent, rank)
            if group.rank == 0:
                yield prefix, part.name, sent
    if group.rank == 0:
        yield from own


def _read(given: Parts, failed: list[Exception]) -> Parts:
    """What is given, up to an error, which `failed` gets: the other ranks wait for the rest."""
    try:
        yield from given
    except Exception as error:
        failed.append(error)
