"""Values of a model that is cut over ranks, brought to the first rank, which writes them.

[Note: Saves over ranks]
All ranks call a save. A segment of a unit is cut in one range a rank, so its values in order are
those of the first rank, then those of the second: each rank reads its chunks in the order in which
they lie, as with one process, and sends them in its turn. The window is one chunk. All ranks meet
before each unit, so that a save which has failed on the first ends on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from offload.checkpoint.shards import WEIGHTS, SetsReader, Tensor, bytes_of, items
from offload.model.engine import Engine
from offload.planning.profile import Piece, Sharding, profile_of
from offload.runtime.entry import EngineError

States = Mapping[str, Mapping[str, Any]]
"""By parameter that has stepped: its `steps`, and the dtypes of its `slots`."""

Parts: TypeAlias = Iterator[tuple[str, str, torch.Tensor]]
"""Values, part by part: the prefix, the name of the parameter, and the part, 1-D."""


def meet(engine: Engine) -> None:
    """Wait for all ranks, before what they do together.

    Raises:
        EngineError: they do something else.
    """
    if engine.ranks is not None:
        engine.ranks.failed(False)


def write_together(
    engine: Engine,
    mine: Parts | None,
    states: States,
    frozen: bool,
    write: Callable[[Parts], object],
) -> None:
    """Let `write` take the parts of all ranks, on the first of them, of which these are `mine`, or
    none, where it needs none.

    Raises:
        OSError and others: what `write` raised; on other ranks a RuntimeError that tells it.
    """
    if engine.ranks is None:
        write(mine or iter(()))
        return
    failed = list[Exception]()
    parts = iter(()) if mine is None else _of_all(engine, mine, states, frozen, failed)
    if engine.ranks.group.rank == 0:
        try:
            write(parts)
        except EngineError:  # Of a rank that is gone, which hears nothing.
            raise
        except Exception as error:
            failed.append(error)
    for _ in parts:
        pass  # Until all ranks know.
    _tell(engine, failed, "could not write what all ranks gave it")


def read_together(engine: Engine, reader: SetsReader, read: Callable[[], object]) -> None:
    """Let each rank `read` its part, and compare the checksums of what they have read together.

    Raises:
        OSError and others: what `read` raised; on other ranks a RuntimeError that tells it.
        OSError: EIO, on all ranks, where a checksum is another.
    """
    if engine.ranks is None:
        read()
        return
    meet(engine)
    failed = list[Exception]()
    try:
        read()
    except Exception as error:
        failed.append(error)
    _tell(engine, failed, "could not read its part")
    reader.check(engine.ranks.group.tell_objects(reader.parts))


def _tell(engine: Engine, failed: list[Exception], what: str) -> None:
    """Raise on all ranks where any of them has failed."""
    told = engine.ranks.group.tell_objects([f"{type(one).__name__}: {one}" for one in failed])
    if failed:
        raise failed[0]
    for rank, each in enumerate(told):
        for text in each:
            raise RuntimeError(f"rank {rank} {what}: {text}")


def _of_all(
    engine: Engine, mine: Parts, states: States, frozen: bool, failed: list[Exception]
) -> Parts:
    """The parts of all ranks in the order of one process, to the first; `mine` are those of this
    rank, and last on the first its buffers."""
    ranks, device = engine.ranks, engine.runner.device
    full, count = engine.plan.profile.full, ranks.group.ranks
    profiles = [profile_of(full, sharding=Sharding(rank, count)) for rank in range(count)]
    for unit, whole in enumerate(full):
        if ranks.failed(bool(failed)):
            return
        for at, segment in enumerate(whole.segments):
            for rank, profile in enumerate(profiles) if frozen or segment.trainable else ():
                for _, pieces in sorted(profile.by_chunk(unit).items()):
                    first = whole.parameters[pieces[0].parameter]
                    if first.segment != at:
                        continue
                    sizes = list(_sizes(engine, pieces, states))
                    if rank == 0:  # Which writes them itself.
                        yield from (next(mine) for _ in sizes if ranks.group.rank == 0)
                        continue
                    sent = device.empty((sum(size for *_, size in sizes),), torch.uint8)
                    slots = torch.split(sent, [size for *_, size in sizes])
                    for slot in slots if rank == ranks.group.rank else ():
                        slot.copy_(torch.from_numpy(bytes_of(next(mine)[2].cpu().contiguous())))
                    ranks.group.spread(sent, rank)
                    if ranks.group.rank == 0:
                        yield from ((*of[:2], slot) for of, slot in zip(sizes, slots))
    if ranks.group.rank == 0:
        yield from mine


def _sizes(engine: Engine, pieces: list[Piece], states: States) -> Iterator[tuple[str, str, int]]:
    """What a rank gives of a chunk, in order: the prefix, the name, and how many bytes."""
    for piece in pieces:
        one = engine.plan.profile.full[piece.unit].parameters[piece.parameter]
        slots = states[one.name]["slots"] if one.name in states else {}
        for prefix, dtype in {WEIGHTS: one.dtype, **slots}.items():
            part = Tensor(one.name, dtype, (items(prefix, piece.elements),))
            yield prefix, one.name, part.bytes
