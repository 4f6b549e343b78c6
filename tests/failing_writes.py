"""Runs whose calls that change files fail from the n-th on, by `src/failing_writes.cpp`.

`LD_PRELOAD=... python -m tests.failing_writes NAME FIRST STEP PATH`: the run NAME, with the calls
FIRST, FIRST + STEP and so on. Each is a fork, then one that goes on with nothing failing.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import offload
from offload.checkpoint.conversion import convert
from tests import durable_runs
from tests.durable_runs import HANGS_S, Loop, Told, check_error, program, told_by, trains, whole
from tests.test_durable import CPU, NVME
from tests.training import RESIDENT, attached, config_of

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
EVER = 1 << 40


def fail(where: Path | str = "", first: int = EVER, error: int = 0, half: int = 0) -> int:
    """Let calls under a directory fail from now on; how many there were since it was called."""
    call: Any = ctypes.CDLL(None).fail_writes
    call.restype, call.argtypes = ctypes.c_long, [ctypes.c_char_p, *[ctypes.c_long] * 4]
    return int(call(os.fsencode(where), first, EVER, error, half))


def broken(act: Callable[[], object], where: Path, first: int, error: int, half: int) -> None:
    """Do it while writes fail, and tell what came of it: it ends in time, too."""
    signal.alarm(HANGS_S)
    fail(where, first, error, half)
    try:
        act()
    except Exception as raised:
        check_error(raised, where, error)
        print("failed", 0, flush=True)
        print("told", type(raised).__name__, str(raised), flush=True)
    print("calls", fail(), flush=True)


class Training:
    """A durable run that saves, from its begin or from a commit on."""

    def __init__(self, placement: Any, loop: Loop, before: int = 0, drives: int = 0) -> None:
        self.placement, self.loop, self.before = placement, loop, before
        self.drives = drives

    def prepare(self, path: Path) -> tuple[Callable[[], None], Path, Callable[[list[Any]], None]]:
        """What is to be done, where calls fail, and what is to be asked of what it told."""
        drives = [path / f"drive{number}" for number in range(self.drives)]
        for one in drives:
            one.mkdir()
        told, drive = Told(), drives or path / "run"
        (path / "run").mkdir(0o700)
        act = partial(program, self.placement, path, self.loop, drive)
        if self.before:
            loop = self.loop._replace(steps=self.before)
            for line in told_by(partial(program, self.placement, path, loop, drive)):
                told = told.after(line)
            told = told._replace(digest="").checked(path, self.loop)

        def check(found: list[list[str]]) -> None:
            after = told
            for line in found:
                after = after.after(line)
            after = after.checked(path, self.loop)
            for line in told_by(act):
                after = after.after(line)
            assert after.checked(path, self.loop).digest == whole(self.loop).digest

        return act, drives[-1] if drives else path, check


class Saving:
    """A run that is not durable and saves, over an earlier save. It goes on after the error."""

    def prepare(self, path: Path) -> tuple[Callable[[], None], Path, Callable[[list[Any]], None]]:
        there, loop, later = path / "there", Loop(steps=4), Loop(steps=6)
        there.mkdir()

        def act() -> None:
            with attached(CPU, path, **loop.arguments()) as run:
                torch.manual_seed(2)
                error = None
                try:
                    trains(run, loop, there)
                except OSError as raised:
                    error = raised
                print("calls", fail(), flush=True)
                trains(run, later, there)
                print("digest", durable_runs.digest_of_run(run), flush=True)
            if error is not None:
                raise error

        def check(found: list[list[str]]) -> None:
            assert ["digest", whole(later).digest] in found
            assert durable_runs.digest_of_save(there / "save") == (6, whole(later).saves[6])
            assert [one.name for one in there.iterdir()] == ["save"]

        return act, there, check


class Replacing:
    """What is written over an earlier one of its kind: that, or this, is there as a whole."""

    def __init__(
        self, begin: Callable[[Path], Callable[[Path], None]], *, moves: bool = False
    ) -> None:
        """What makes the source, and returns what writes it; whether files are moved one by one."""
        self.begin, self.moves = begin, moves

    def prepare(self, path: Path) -> tuple[Callable[[], None], Path, Callable[[list[Any]], None]]:
        there = path / "there"
        there.mkdir()
        write = self.begin(path)
        write(there / "target")
        before = content(there / "target")
        write = self.begin(path)

        def check(found: list[list[str]]) -> None:
            kept = content(there / "target")
            write(path / "after")
            after = content(path / "after")
            assert after != before
            failed = ["failed", "0"] in found
            if kept not in (before, after):  # Documented of an export alone.
                assert failed, "a mixture"
                assert self.moves, "a mixture"
                assert not readable(kept), "a mixture that can be read"
            assert failed or kept == after
            write(there / "target")
            assert content(there / "target") == after
            assert [one.name for one in there.iterdir()] == ["target"]

        return partial(write, there / "target"), there, check


def content(folder: Path) -> dict[str, bytes]:
    """Of its files, but for those that nobody was let delete."""
    return {one.name: one.read_bytes() for one in folder.glob("[!.]*")}


def readable(kept: dict[str, bytes]) -> bool:
    """Whether all weights are there that the index names."""
    index = json.loads(kept.get("model.safetensors.index.json", b"{}"))
    files = set(index.get("weight_map", {}).values())
    return bool(files) and files <= kept.keys()


def converting(path: Path) -> Callable[[Path], None]:
    steps = 2 if not (path / "save").exists() else 4
    told_by(partial(saving, path, Loop(steps=steps)))
    return partial(converted, path / "save")


def saving(path: Path, loop: Loop) -> None:
    with attached(CPU, path, **loop.arguments()) as run:
        trains(run, loop, path)


def converted(source: Path, target: Path) -> None:
    convert(str(source), str(target), dtype="float32")


def exporting(path: Path) -> Callable[[Path], None]:
    scale = 2.0 if (path / "there" / "target").exists() else 1.0
    return partial(exported, path, scale)


def exported(path: Path, scale: float, target: Path) -> None:
    from tests.pretrained import llama

    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    offload.attach(model, None, config_of(CPU, path))
    try:
        offload.export(model, target)
    finally:
        offload.engine_of(model).close()


SHORT = Loop(steps=4)
RUNS: dict[str, Any] = {
    "cpu": Training(CPU, SHORT),
    "nvme": Training(NVME, SHORT),
    "resident, resumed": Training(RESIDENT, Loop(steps=6), 2),
    "nvme, resumed": Training(NVME, Loop(steps=6), 2),
    "one drive of two": Training(NVME, Loop(steps=4, build=durable_runs.wide), 0, 2),
    "save": Saving(),
    "convert": Replacing(converting),
    "export": Replacing(exporting, moves=True),
}


def one_call(run: Any, number: int, case: int, path: Path) -> str | None:
    """Let the calls fail from one on; what was told. None where there are fewer calls."""
    error, half = ERRORS[case % len(ERRORS)], case // len(ERRORS) % 2
    act, where, check = run.prepare(path)
    child = durable_runs.started(partial(broken, act, where, number, error, half))
    found = [*durable_runs.lines(child)]
    _, errors = child.communicate()
    assert child.returncode != -signal.SIGALRM, f"it hangs: {errors}"
    assert (child.returncode, errors) == (0, ""), errors
    calls = max(int(one[1]) for one in found if one[0] == "calls")
    told = " ".join(next((one for one in found if one[0] == "told"), ["nothing was told"]))
    check([one for one in found if one[0] not in ("told", "calls")])
    return f"{errno.errorcode[error]}{' half' * half}: {told}" if calls >= number else None


def sweep(run: Any, first: int, every: int, path: Path) -> Iterator[str]:
    """Let each of the calls fail; what was told of each."""
    for case in itertools.count():
        number = first + case * every
        here = path / str(number)
        here.mkdir()
        try:
            told = one_call(run, number, case, here)
        except BaseException:
            print(f"call {number}:", file=sys.stderr)
            raise
        shutil.rmtree(here)
        if told is None:
            return
        yield f"{number}: {told}"


def main() -> None:
    gc.freeze()
    gc.enable()
    torch.set_num_threads(1)
    name, begin, every, path = sys.argv[1:]
    for told in sweep(RUNS[name], int(begin), int(every), Path(path)):
        print(told, flush=True)


if __name__ == "__main__":
    main()
