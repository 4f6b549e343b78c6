"""What is in a directory that this project wrote, and what of it is broken: nothing is changed."""

from __future__ import annotations

import errno
import os
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import aio
from offload.checkpoint.commit_reader import (
    COMMIT,
    PREVIOUS,
    RANK,
    PartReader,
    read_commit,
    record_files,
)
from offload.checkpoint.commits import last_of_all, made_in, rank_directories
from offload.checkpoint.directory import RUN, decoded, read_run
from offload.checkpoint.schema import shown
from offload.checkpoint.shards import PART_ELEMENTS, WEIGHTS, SetsReader
from offload.planning.tiers import format_bytes

INDEX, SINGLE = ".safetensors.index.json", f"{WEIGHTS}.safetensors"


@dataclass
class Inspection:
    """What was found in a directory."""

    rows: dict[str, str] = field(default_factory=dict)
    """What is there, to be read by people."""
    broken: list[str] = field(default_factory=list)
    """What is damaged or missing, a sentence each."""
    unchecked: int = 0
    """Tensors without a checksum: they could be read, and nothing says whether they are right."""


def inspect(directory: str | os.PathLike[str]) -> Inspection:
    """Read all of a directory that `offload.save` wrote, and hold each checksum against it.

    Takes some hundred MiB of memory, whatever the size.

    Raises:
        OSError: there is no such directory, or nothing in it that is known.
    """
    where = os.fspath(directory)
    names = sorted(os.listdir(where))
    if COMMIT in names or PREVIOUS in names:
        return _inspect_run(where)
    if any(name in (RUN, SINGLE) or name.endswith(INDEX) for name in names):
        return _inspect_save(where)
    if ranks := rank_directories(where):
        return _inspect_ranks(where, ranks)
    told = f"asked to inspect it; found no {COMMIT}, no {RUN}, no {SINGLE} and no index of others"
    likely = "another directory"
    if ".metadata" in names:
        likely = "of torch.distributed.checkpoint; offload convert reads it"
    elif any(name.startswith("offload-") for name in names):
        likely = "the drive of a durable run: give its directory, that of Config(durable)"
    told += f": likely {likely}"
    raise FileNotFoundError(errno.ENOENT, told, where)


def _inspect_save(where: str) -> Inspection:
    found, run = Inspection(), dict[str, Any]()
    wanted = {WEIGHTS, *(n.removesuffix(INDEX) for n in os.listdir(where) if n.endswith(INDEX))}
    if len(wanted) == 1 and not os.path.lexists(os.path.join(where, RUN)):
        found.rows[f"no {RUN}"] = "weights alone, as Hugging Face keeps them"
    else:
        try:
            run = read_run(where)
        except (OSError, ValueError) as error:
            found.broken.append(told(error))
        else:
            found.rows["step"] = str(run["step"])
            found.rows["besides"] = ", ".join(sorted({"scheduler", "random"} & run.keys())) or "-"
            found.rows["user data"] = shown(decoded(run["user"]))
    if saved := run.get("optimizer"):
        counts = f"groups: {len(saved['groups'])}, parameters with states: {len(saved['states'])}"
        found.rows["optimizer"] = f"{saved['rule']}, {counts}"
        wanted = wanted.union(*(state["slots"] for state in saved["states"].values()))
    with closing(aio.open_backend()) as backend:
        for prefix in sorted(wanted):
            try:
                with closing(SetsReader(where, [prefix], backend)) as reader:
                    _check_set(prefix, reader, found)
            except (OSError, ValueError) as error:
                found.broken.append(f"{prefix}: {told(error)}")
    return found


def _inspect_run(where: str) -> Inspection:
    """Of a durable run: its commit, and where that is broken, the one before."""
    found = Inspection()
    for name in COMMIT, PREVIOUS:
        try:
            commit, layout = read_commit(where, name)
            with closing(PartReader(where, commit, layout)) as reader:
                wrong = reader.check()
        except (OSError, ValueError) as error:
            found.broken.append(told(error))
            continue
        found.broken += wrong
        run = commit["run"]
        if not found.rows:
            found.rows["step"] = str(run["step"])
            found.rows["user data"] = shown(decoded(run["user"]))
            number = f"{len(layout['parameters'])} parameters in {len(layout['chunks'])} chunks"
            found.rows["commit"] = f"{layout['rule']}, {layout['states']}: {number}"
            files = record_files(where, layout)
            with suppress(OSError, ValueError):  # Of another layout, until the second commit.
                files += record_files(where, read_commit(where, PREVIOUS)[1])
            found.rows["records"] = ", ".join(dict.fromkeys(files))
        if not wrong and name == COMMIT:
            break
        if not wrong:
            found.rows["before it"] = (
                f"step {run['step']} in {PREVIOUS} is whole: rename it to {COMMIT} to go on from it"
            )
    return found


def _inspect_ranks(where: str, ranks: dict[int, str]) -> Inspection:
    """Of a durable run over ranks, whose directories these are."""
    found, count = Inspection(), len(ranks)
    made = {rank: made_in(path) for rank, path in ranks.items()}
    try:
        if (last := last_of_all(made, where)) is not None:
            step, count = made[0][last][1]["run"]["step"], last.ranks
            found.rows["goes on from"] = f"step {step}, the last that {count} ranks have committed"
    except OSError as error:
        found.broken.append(told(error))
    for rank, path in sorted(ranks.items()):
        name = f"{RANK}{rank}"
        if rank >= count:
            found.rows[name] = "of more ranks, before: no part of that"
        one = _inspect_run(path)
        found.rows |= {f"{name}: {key}": row for key, row in one.rows.items()}
        found.broken += one.broken
    return found


def _check_set(prefix: str, reader: SetsReader, found: Inspection) -> None:
    """Read all tensors of a set, and say what they are."""
    places = reader.places[prefix]
    for name, place in places.items():
        found.unchecked += place.crc is None
        try:
            for start, count in place.tensor.parts(PART_ELEMENTS):
                reader.values(prefix, name, start, count)
        except OSError as error:
            found.broken.append(f"{prefix}: {told(error)}")
    total = sum(place.tensor.bytes for place in places.values())
    dtypes = ", ".join(sorted({place.tensor.dtype for place in places.values()}))
    found.rows[f"set {prefix}"] = f"{len(places)} tensors, {format_bytes(total)}, {dtypes}"


def told(error: OSError | ValueError) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return " ".join(f"{error.filename}: {error.strerror}".split())
    return " ".join(str(error).split())
