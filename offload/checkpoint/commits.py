"""The directory of a durable run: which step is finished, and where its values lie.

[Note: Commits]
Values lie in record files, each chunk of weights and states in two homes ([Note: Two homes] of
`aio.chunks`). A commit is a file, `commit.json`, that names a home, a step and a checksum for every
chunk, and all else that the run goes on from. It takes the place of the one before in one move,
after everything that it names was flushed; what it names is not written to until the next one has
taken its place. So whenever a process ends, there is a commit, and all of it is there.

`layout-N.json` says which bytes of the files are whose, by parameter and range: a reader needs no
plan, and the next run may have another one. docs/formats.md describes the files.

[Note: Commits of ranks]
Rank R commits to `rank-R`. Commits are numbered, and no rank writes over anything that commit
n - 1 names before all have made commit n: a counter in the store of the process group tells. So
wherever a run ends, the last commit that all have made is on each of them the last one or the one
before, whose files stay as long.

A commit of ranks has a part of each parameter. Who goes on reads from all directories, so the
number of ranks, the units and the budgets may be others than before.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
import safetensors.torch

import aio
from aio.errors import SHORTENED, naming, os_error
from cpu_adam import crc32c
from offload.checkpoint.commit_reader import (
    COMMIT,
    ELSEWHERE,
    FORMAT,
    PREVIOUS,
    RANK,
    CommitReader,
    read_commit,
    read_layout,
    record_files,
)
from offload.checkpoint.directory import flush, write_checked
from offload.checkpoint.shards import private, write_file
from offload.config import warn_user
from offload.planning.layout import FileLayout, Plan
from offload.planning.machine import measured_speeds, shares_of
from offload.planning.profile import Kind
from offload.planning.tiers import format_bytes
from offload.runtime.store import Kept, Store

LOCK = "lock"

_BUFFERS = re.compile(r"buffers-([0-9]{1,18})\.safetensors")
_LAYOUT_FILE = re.compile(r"layout-([0-9]{1,18})\.json")
_OURS = re.compile(
    rf"{LOCK}|{COMMIT}\.new|offload-[0-9a-f]{{8}}\.[0-9]+|{_BUFFERS.pattern}|{_LAYOUT_FILE.pattern}"
)
"""Files that a run without a commit may have left."""

_locks = weakref.WeakSet[BinaryIO]()
os.register_at_fork(after_in_child=lambda: [one.close() for one in _locks])
"""A forked worker, which may outlive this process, closes its locks."""


def _make(path: str) -> None:
    """Make a directory where it is not there."""
    try:
        os.makedirs(path, 0o700, exist_ok=True)
    except FileExistsError as error:
        told = "asked for a durable run in it; found a file; try a new name"
        raise FileExistsError(error.errno, told, path) from None


class RunDirectory:
    """A directory that one process at a time commits to."""

    group: Any = None
    """The ranks of which each has one."""

    def __init__(self, path: str, *, resume: bool = True, of_rank: bool = False) -> None:
        """Make it where it is not there, own it, and read its commit, which is a part of one over
        ranks where it is `of_rank`. It is refused where it is another process's, others may change
        it, or its commit is damaged or cannot be gone on from.
        """
        self.path = os.path.abspath(path)
        _make(self.path)
        refuse_unsafe(self.path)
        self._lock = _owned(os.path.join(self.path, LOCK))
        self.commit: dict[str, Any] | None = None
        self.committed: dict[str, Any] = {}
        """The layout of the commit."""
        self._layout_name = ""
        """Of the next commit."""
        self._kept = set[str]()
        """Files that the commit names, or the one before: nothing of them is deleted."""
        try:
            if os.path.exists(self._at(COMMIT)):
                self._take()
                self._refuse_other(resume, of_rank)
            elif others := [one for one in os.listdir(self.path) if not _OURS.fullmatch(one)]:
                told = "likely another's directory, or a run of which a file was deleted; try a "
                told += "new name"
                if min(others).startswith(RANK):
                    told = "a run over ranks, which two or more go on from; for one process "
                    told += "`offload convert` writes it as a save, and offload.load takes that"
                self._refuse(f"asked for durable; found {min(others)} and no {COMMIT}: {told}")
        except BaseException:
            self._lock.close()
            raise
        with contextlib.suppress(OSError, ValueError):
            self._kept |= _named(read_commit(self.path, PREVIOUS)[0])
        self._forget_others()

    def _take(self) -> None:
        flush(self.path)  # Its name may not be there after a power cut; what was before it goes.
        self.commit, self.committed = read_commit(self.path)
        self._layout_name = self.commit["layout"]
        self._kept = _named(self.commit)

    def _refuse(self, told: str) -> NoReturn:
        raise FileExistsError(errno.EEXIST, told, self.path)

    def _refuse_other(self, resume: bool, of_rank: bool) -> None:
        """Refuse a commit that this run cannot go on from."""
        assert self.commit is not None
        if ("part" in self.commit["run"]) != of_rank:
            found = "all of one of one process" if of_rank else "a part of one over ranks"
            self._refuse(f"asked for a durable run; found {found}; give another name")
        if not resume:
            self._refuse(
                "asked for a new run (resume=False); found the commit of step "
                f"{self.commit['run']['step']}; give another name"
            )
        moved = self.committed["inode"] != os.stat(self.path).st_ino
        if moved and any(self.committed["folders"]):
            self._refuse(
                "asked to go on from it; found the copy of a run whose records lie in "
                f"{', '.join(self.committed['folders'])}, and are those of the original; go on "
                "there, or offload.save from it"
            )

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)

    def store(self, plan: Plan, paths: Sequence[str]) -> Store:
        """The store of a plan whose values outlive the process: in the files of the commit where
        they would be laid out the same, else in new ones, beside which the old ones stay until the
        second commit. They lie in `paths`, if there are any, else in this directory.
        """
        folders = [os.path.abspath(one) for one in paths] or [self.path]
        speeds, layout = measured_speeds(folders), layout_of(plan)
        bytes = layout["second"] + sum(map(sum, durable_values(plan).values()))
        used, stripes = aio.place_volume(folders, bytes, weights=shares_of(speeds) or None)
        layout["inode"] = os.stat(self.path).st_ino
        layout["folders"] = ["" if folders[one] == self.path else folders[one] for one in used]
        layout["stripes"] = [stripes.unit_bytes, [*stripes.pattern]]
        homes, name = None, str(self.committed.get("name"))
        if self.commit and layout == {key: self.committed.get(key) for key in layout}:
            homes = self.commit["homes"]
        else:
            layout["name"] = name = f"offload-{secrets.token_hex(4)}"
            self._layout_name = f"layout-{self._unused(_LAYOUT_FILE)}.json"
            write_checked(self._at(self._layout_name), layout)
        kept = Kept(durable_values(plan), name, homes, self.close)
        try:
            store = Store(folders, plan.file, plan.profile.names, speeds=speeds, kept=kept)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(
                errno.ENOSPC,
                f"a durable run's records take {format_bytes(bytes)}, weights and states twice: "
                f"{error.strerror}, by nvme_path",
                error.filename,
            ) from error
        for folder in {self.path, *folders} if homes is None else ():
            flush(folder)
        return store

    def write(
        self, run: Mapping[str, Any], buffers: Mapping[str, Any], store: Store, *, forward: bool
    ) -> None:
        """Commit what was last written of every value of a store, none of which is written until
        this returns, the buffers of the model in CPU memory, and what else a run goes on from. Its
        random numbers are those with which a `forward` begins, or others. Where something cannot be
        written, the commit before is as it was.
        """
        assert not self._lock.closed, "it may be another's by now"
        self._refuse_lost(store)
        store.volume.flush()
        homes = store.chunks.homes()
        commit = {"format": FORMAT, "layout": self._layout_name, "homes": homes.tolist()}
        commit |= {"buffers": None, "forward": forward, "run": run}
        if buffers:  # Never those that a commit names: one step may be committed twice.
            name = f"buffers-{self._unused(_BUFFERS)}.safetensors"
            content = safetensors.torch.save(dict(buffers))
            commit["buffers"] = [name, crc32c(np.frombuffer(content, np.uint8), 0)]
            write_file(self._at(name), content)
        new = self._at(COMMIT + ".new")
        write_checked(new, commit)
        kept = _named(commit)
        if self.commit is not None:
            kept |= _named(self.commit)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._at(PREVIOUS))
            with contextlib.suppress(OSError):  # A file system without links does without it.
                os.link(self._at(COMMIT), self._at(PREVIOUS))
        self._kept = kept  # Before it has its name: an error after that leaves both.
        os.replace(new, self._at(COMMIT))
        flush(self.path)
        self.commit = commit
        store.chunks.protect(homes[:, 0])
        self._forget_others()

    def _unused(self, pattern: re.Pattern[str]) -> int:
        """The first number that is larger than those of all files of a pattern."""
        found = map(pattern.fullmatch, os.listdir(self.path))
        return 1 + max((int(one[1]) for one in found if one), default=0)

    def _refuse_lost(self, store: Store) -> None:
        """Raise OSError where a file that the commit names is no more what it was."""
        os.stat(self._at(self._layout_name))
        for file in store.volume.files:
            found, path = os.fstat(file.fd), file.path
            if not found.st_nlink:
                raise os_error(errno.ENOENT, "commit", path, found="it was deleted", why=SHORTENED)
            if found.st_size != file.bytes:
                told = f"it has {found.st_size} bytes, not {file.bytes}"
                raise os_error(errno.EIO, "commit", path, found=told, why=SHORTENED)

    def _forget_others(self) -> None:
        forget(self.path, self._kept)

    def reader(self) -> CommitReader | None:
        """Of the commit to go on from; None where there is none."""
        if self.commit is None:
            return None
        return CommitReader([(self.path, self.commit, self.committed)], self.path)

    def close(self) -> None:
        """Let others own it; what was begun and not committed is deleted."""
        if not self._lock.closed:
            with self._lock, contextlib.suppress(FileNotFoundError):  # All of it was deleted.
                self._forget_others()

    # -- what all ranks agree on, with one -------------------------------------------------------

    def begin(self) -> dict[str, Any]:
        """A commit begins; what is kept in it of other ranks."""
        return {}

    def wait(self) -> None:
        """Return once all ranks have made the last commit that was begun."""


class RankDirectory(RunDirectory):
    """That of one of several ranks, at the last commit that all of them have made."""

    def __init__(self, path: str, group: Any, *, resume: bool) -> None:
        """Own it on all ranks, or on none."""
        self._parent, self.group = os.path.abspath(path), group
        with contextlib.ExitStack() as failed:
            with group.all_or_none():
                self._open(resume)
                failed.callback(self.close)
            self._found = last_of_all(self._made_by_each(), path)
            with group.all_or_none():
                self._go_back()
                self._forget_ranks()
            failed.pop_all()
        number, name = (self._found.number, self._found.run) if self._found else (0, "")
        self._run = name or group.all_objects(secrets.token_hex(8))[0]
        self._first = self._all = self._number = number

    def _of(self, rank: int) -> str:
        return os.path.join(self._parent, f"{RANK}{rank}")

    def _open(self, resume: bool) -> None:
        _make(self._parent)
        refuse_unsafe(self._parent)
        if os.path.exists(os.path.join(self._parent, COMMIT)):
            raise FileExistsError(
                errno.EEXIST,
                "asked for a durable run over ranks; found one of one process; give another name, "
                "and take it over by offload.save there and offload.load here",
                self._parent,
            )
        super().__init__(self._of(self.group.rank), resume=resume, of_rank=True)

    def _go_back(self) -> None:
        """Let the commit be that of all, which is the last or the one before, or none."""
        part = self._found and self._found._asdict()
        while self.commit is not None and self.commit["run"]["part"] != part:
            self.commit, self.committed, self._kept = None, {}, set()
            if os.path.exists(self._at(PREVIOUS)):
                os.replace(self._at(PREVIOUS), self._at(COMMIT))
                self._take()
            else:
                os.unlink(self._at(COMMIT))
            flush(self.path)

    def _made_by_each(self) -> dict[int, list[Made]]:
        """The commits of each rank that there is, or was."""
        every: list[list[Made]] = self.group.all_objects([*made_in(self.path)])
        most = max((one.ranks for some in every for one in some), default=0)
        gone = {rank: [*made_in(self._of(rank))] for rank in range(len(every), most)}
        seen: dict[int, list[Made]] = self.group.all_objects(gone)[0]  # By the first.
        return dict(enumerate(every)) | seen

    def _forget_ranks(self) -> None:
        """Delete what ranks left of which the commit knows nothing."""
        last = max(self.group.ranks, self._found.ranks if self._found else 0)
        for rank, path in rank_directories(self._parent).items() if self.group.rank == 0 else ():
            if rank >= last:
                forget(path, kept=())
                shutil.rmtree(path)

    def reader(self) -> CommitReader | None:
        """Of the parts of all ranks whose directories are here, this one's first."""
        if (last := self._found) is None:
            return None
        order = sorted(range(last.ranks), key=lambda rank: rank != self.group.rank)
        found = [one[last] for one in map(made_in, map(self._of, order)) if last in one]
        if not found:
            told = f"asked to go on from commit {last.number}; found none of it: likely {ELSEWHERE}"
            raise FileNotFoundError(errno.ENOENT, told, self._parent)
        return CommitReader(found, self._parent)

    def begin(self) -> dict[str, Any]:
        """The next number, with which the commit is told from others."""
        self._number += 1
        return {"part": Made(self._number, self._run, self.group.ranks)._asdict()}

    def write(self, *of: Any, **how: Any) -> None:
        """Count it where all ranks look."""
        super().write(*of, **how)
        self.group.count_commit()

    def wait(self) -> None:
        """Block until the counter says it."""
        if self._all < self._number:
            self.group.wait_for_commits((self._number - self._first) * self.group.ranks)
            self._all = self._number


def run_directory(path: str, group: Any, *, resume: bool) -> RunDirectory:
    """The directory that this process commits to: with several ranks its own in `path`."""
    if group is None:
        return RunDirectory(path, resume=resume)
    return RankDirectory(path, group, resume=resume)


def held_bytes(path: str, group: Any, folders: Iterable[str]) -> int:
    """What the records of this process that it may go on from take in `folders`, of which no more
    is asked then; 0 where there are none."""
    path = os.path.abspath(path if group is None else os.path.join(path, f"{RANK}{group.rank}"))
    asked = set(map(os.path.abspath, folders))
    with contextlib.suppress(OSError, ValueError):  # Told where it is opened.
        files = record_files(path, read_commit(path)[1])
        return sum(os.stat(one).st_blocks * 512 for one in files if os.path.dirname(one) in asked)
    return 0


class Made(NamedTuple):
    """A commit that a rank has made of its part."""

    number: int
    run: str
    """What tells this run from others."""
    ranks: int


def rank_directories(parent: str) -> dict[int, str]:
    """Those of the ranks of a run, by rank."""
    ranks = (one.removeprefix(RANK) for one in os.listdir(parent) if one.startswith(RANK))
    return {int(one): os.path.join(parent, RANK + one) for one in ranks if one.isdecimal()}


def made_in(directory: str) -> dict[Made, tuple[str, Any, Any]]:
    """The commits in the directory of a rank whose files are there, as `CommitReader` takes them:
    of each the directory, the commit and the layout."""
    found = {}
    for name in (COMMIT, PREVIOUS):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # Its owner told.
            commit, layout = read_commit(directory, name)
            found[Made(**commit["run"]["part"])] = directory, commit, layout
    return found


def last_of_all(made: Mapping[int, Collection[Made]], where: str) -> Made | None:
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


def _named(commit: Mapping[str, Any]) -> set[str]:
    """The files beside a commit that it names."""
    return {commit["layout"], *(commit["buffers"] or ())[:1]}


def forget(directory: str, kept: Collection[str]) -> None:
    """Delete layouts with their record files, and buffers, but some."""
    for name in os.listdir(directory):
        layout, path = _LAYOUT_FILE.fullmatch(name), os.path.join(directory, name)
        if name in kept or not (layout or _BUFFERS.fullmatch(name)):
            continue
        with contextlib.suppress(OSError):  # As long as it is there, it is tried again.
            records = list[str]()
            with contextlib.suppress(ValueError):
                records = record_files(directory, read_layout(path)) if layout else []
            for file in (*records, path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file)


def durable_values(plan: Plan) -> FileLayout:
    """The values of a plan that a run goes on from, with the bytes of their chunks."""
    return {
        (kind, unit): chunks
        for kind in ("state", "weight")
        for unit, chunks in enumerate(plan.sizes.chunks[kind])
        if plan.sizes.value[kind][unit]
    }


def layout_of(plan: Plan) -> dict[str, Any]:
    """Which bytes of the first homes are whose."""
    values, places, end = durable_values(plan), dict[tuple[Kind, int, int], list[int]](), 0
    for (kind, unit), sizes in values.items():
        for chunk, size in enumerate(sizes):
            places[kind, unit, chunk] = [len(places), end, size]
            end += size
    beside = sum(sum(sizes) for key, sizes in plan.file.items() if key not in values)
    chunks = list[dict[str, Any]]()
    for unit, spec in enumerate(plan.profile.units):
        names = [one.name for one in spec.parameters]
        for at, pieces in sorted(plan.profile.by_chunk(unit).items()):
            of = [
                [names[p.parameter], plan.profile.element(p), p.chunk_start, p.elements]
                for p in pieces
            ]
            one: dict[str, Any] = {"weight": places["weight", unit, at], "pieces": of}
            one["state"] = places.get(("state", unit, at))
            one["elements"] = spec.chunks[at].elements if at < len(spec.chunks) else 0
            chunks.append(one)
    all_ = (one for full in plan.profile.full for one in full.parameters)
    return {
        "format": FORMAT,
        "rule": plan.states.rule,
        "states": plan.states.states,
        "parameters": {one.name: [one.dtype, [*one.shape], one.trainable] for one in all_},
        "chunks": chunks,
        "second": end + beside,
    }


def refuse_unsafe(path: str) -> None:
    """Refuse a directory in which others could change what a run goes on from."""
    found, parent = os.lstat(path), os.stat(os.path.dirname(path))
    why, own = None, found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode)
    if own and found.st_mode & 0o022 == 0o020:  # As Kubernetes mounts volumes for a group.
        os.chmod(path, stat.S_IMODE(found.st_mode) & 0o700)
        warn_user(f"{path}: its group could write to it; it is its owner's alone again")
        found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        why = "found a symbolic link"
    elif found.st_uid != os.geteuid():
        why = f"found a directory of user {found.st_uid}"
    elif found.st_mode & 0o022:
        why = "found a directory that others may write to"
    elif parent.st_mode & 0o002 and not parent.st_mode & stat.S_ISVTX:
        why = "found a parent directory in which anybody may rename it"
    if why is not None:
        raise PermissionError(
            errno.EPERM, f"asked for durable; {why}; give a directory of your own", path
        )


def _owned(path: str) -> BinaryIO:
    """The file that is the lock, which is ours as long as it is open."""
    file = open(path, "ab+", buffering=0, opener=private)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with naming("write", path):
            file.truncate(0)
            file.write(f"{os.getpid()} {socket.gethostname()}".encode())
    except BlockingIOError:
        with file:
            file.seek(0)
            owner = file.read(1000).decode(errors="replace")
        told = f"asked for durable; found that another run owns it (pid and host: {owner})"
        told += "; end it, one of this process by optimizer.engine.close(), or give another name"
        raise BlockingIOError(errno.EAGAIN, told, path) from None
    except BaseException:
        file.close()
        raise
    _locks.add(file)
    return file
