"""Commits of a run over ranks: one directory each, and one commit that all of them go on from.

[Note: Commits of ranks]
Rank R commits to `rank-R`. Commits are numbered, and no rank writes over anything that commit
n - 1 names before all have made commit n: a counter in the store of the process group tells. So
wherever a run ends, the last commit that all have made is on each of them the last one or the one
before, whose files stay as long.

A commit of ranks has a part of each parameter. Who goes on reads from all directories, so the
number of ranks, the units and the budgets may be others than before.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import chain, product
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from offload.checkpoint.commit_reader import COMMIT, PREVIOUS, RANK, CommitReader, read_commit
from offload.checkpoint.commits import RunDirectory, forget, refuse_unsafe
from offload.checkpoint.shards import Tensor

ELSEWHERE = (
    "the directories of other ranks are on other machines; let Config.durable be one that all share"
)


class Made(NamedTuple):
    """A commit that a rank has made of its part."""

    number: int
    run: str
    """What tells this run from others."""
    ranks: int


def made_in(directory: str) -> list[Made]:
    """The commits in the directory of a rank whose files are there."""
    found = []
    for name in (COMMIT, PREVIOUS):
        with suppress(OSError, ValueError):  # Of its last one who owns it has told.
            found.append(Made(**read_commit(directory, name)[0]["run"]["part"]))
    return found


def last_of_all(made: Mapping[int, list[Made]], where: str) -> Made | None:
    """The last commit that all ranks of its have made; None where a run has none yet. Refused where
    some have it, and others neither that nor the one before."""
    every = sorted({one for some in made.values() for one in some}, reverse=True)
    for one in every:
        if all(one in made.get(rank, []) for rank in range(one.ranks)):
            return one
    if not every or every[0].number == 1:
        return None  # It ended in its first commit.
    last = every[0]
    lacks = [rank for rank in range(last.ranks) if last not in made.get(rank, [])]
    told = (
        f"asked to go on from commit {last.number} of {last.ranks} ranks; found neither that nor "
        f"the one before of rank {', '.join(map(str, lacks))}: likely its directory "
        f"{RANK}{lacks[0]} is on another machine, or of another run; bring it here, or begin "
        "anew under another name"
    )
    raise FileNotFoundError(errno.ENOENT, told, where)


def run_directory(path: str, group: Any, *, resume: bool) -> RunDirectory:
    """The directory that this process commits to: with several ranks its own in `path`, at the last
    commit that all of them have made. One that is refused is on all ranks."""
    if group is None:
        return RunDirectory(path, resume=resume)
    together = Together(os.path.abspath(path), group, resume=resume)
    together.directory.together = together
    return together.directory


class Together:
    """What the commits of all ranks have in common."""

    def __init__(self, path: str, group: Any, *, resume: bool):
        """See `run_directory`."""
        self._path, self._group = path, group
        self.all_or_none = partial(group.all_or_none, undo=id)
        self.directory: RunDirectory = group.all_or_none(
            partial(self._open, resume), RunDirectory.close
        )
        try:
            self.found = last_of_all(self._made(), path)
            chosen = self.found and self.found._asdict()
            self.all_or_none(partial(self.directory.go_back, chosen))
            self.all_or_none(self._forget_others)
        except BaseException:
            self.directory.close()
            raise
        number, name = (self.found.number, self.found.run) if self.found else (0, "")
        self._run = name or group.all_objects(secrets.token_hex(8))[0]
        self._first = self._all = self._number = number

    def _at(self, rank: int) -> str:
        return os.path.join(self._path, f"{RANK}{rank}")

    def _open(self, resume: bool) -> RunDirectory:
        os.makedirs(self._path, 0o700, exist_ok=True)
        refuse_unsafe(self._path)
        if os.path.exists(os.path.join(self._path, COMMIT)):
            raise FileExistsError(
                errno.EEXIST,
                "asked for a durable run over ranks; found one of one process; give another name, "
                "and take it over by offload.save there and offload.load here",
                self._path,
            )
        return RunDirectory(self._at(self._group.rank), resume=resume, of_rank=True)

    def _made(self) -> dict[int, list[Made]]:
        """The commits of each rank that there is, or was."""
        every: list[list[Made]] = self._group.all_objects(made_in(self.directory.path))
        most = max((one.ranks for some in every for one in some), default=0)
        gone = {rank: made_in(self._at(rank)) for rank in range(len(every), most)}
        seen: dict[int, list[Made]] = self._group.all_objects(gone)[0]  # By the first.
        return dict(enumerate(every)) | seen

    def _forget_others(self) -> None:
        """Delete what ranks left of which the commit knows nothing."""
        last = max(self._group.ranks, self.found.ranks if self.found else 0)
        for name in os.listdir(self._path) if self._group.rank == 0 else ():
            number = name.removeprefix(RANK)
            if name.startswith(RANK) and number.isdigit() and int(number) >= last:
                forget(os.path.join(self._path, name), kept=())
                shutil.rmtree(os.path.join(self._path, name))

    # -- numbers ---------------------------------------------------------------------------------

    def begin(self) -> dict[str, Any]:
        """A commit begins on this rank; what is kept in it."""
        self._number += 1
        return Made(self._number, self._run, self._group.ranks)._asdict()

    def made(self) -> None:
        """This rank has made the last commit that was begun."""
        self._group.count("commits")

    def made_by_all(self) -> None:
        """All ranks have told that they have made it."""
        self._all = self._number

    def wait(self) -> None:
        """Until all ranks have made it."""
        if self._all < self._number:
            made = (self._number - self._first) * self._group.ranks
            self._group.wait_for_count("commits", made)
            self.made_by_all()

    # -- values ----------------------------------------------------------------------------------

    def reader(self) -> PartsReader | None:
        """Of the commit that was found; None where there is none."""
        if self.found is None:
            return None
        folders = [self._at(rank) for rank in range(self.found.ranks)]
        return PartsReader(self._path, folders, self.found, self.directory.path)


class PartsReader:
    """Reads the values of a commit of ranks, see `CommitReader`."""

    def __init__(self, path: str, folders: Sequence[str], made: Made, own: str):
        """Open the files of all ranks whose directories are here; `own` is that of this one."""
        self._path, self._opened, readers = path, ExitStack(), dict[str, CommitReader]()
        with ExitStack() as failed:
            failed.enter_context(closing(self))
            for folder, name in product(folders, (COMMIT, PREVIOUS)):
                if folder in readers or not os.path.exists(os.path.join(folder, name)):
                    continue
                commit, layout = read_commit(folder, name)
                if commit["run"]["part"] == made._asdict():
                    reader = CommitReader(folder, commit, layout)
                    readers[folder] = self._opened.enter_context(closing(reader))
            failed.pop_all()
        if not readers:
            told = f"asked to go on from commit {made.number}; found none of it: likely {ELSEWHERE}"
            raise FileNotFoundError(errno.ENOENT, told, path)
        self._readers = [*readers.values()]
        self._own = readers.get(own, self._readers[0])
        self.commit: Mapping[str, Any] = self._own.commit
        """This rank's, or where there is none that of the first."""
        self.tensors: dict[str, Tensor] = self._own.tensors
        """The parameters and buffers that there are, by name, in full."""

    def values(self, prefix: str, name: str, start: int, count: int) -> torch.Tensor:
        """See `CommitReader`; buffers are those of this rank."""
        if name in self._own.buffers:
            return self._own.values(prefix, name, start, count)
        every = chain.from_iterable(one.parts(prefix, name) for one in self._readers)
        found = list[torch.Tensor]()
        for at, size, read in sorted(every, key=itemgetter(0)):
            first, last = max(start, at), min(start + count, at + size)
            if first < last:
                found.append(read()[first - at : last - at])
        if (here := sum(map(len, found))) < count:
            told = (
                f"asked for {count} elements of {name}; found {here}: likely units or the number "
                f"of ranks are others, and {ELSEWHERE}, or go on as it was"
            )
            raise FileNotFoundError(errno.ENOENT, told, self._path)
        return found[0] if len(found) == 1 else torch.cat(found)

    def close(self) -> None:
        """Close the files."""
        self._opened.close()
