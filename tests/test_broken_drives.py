"""Real file systems that are full, turn read-only or fail, and files that somebody deletes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import durable_runs
from tests.command import SHORT
from tests.command import run as run_command
from tests.durable_runs import HANGS_S, Loop, Told, from_save, program, started, told_by, whole
from tests.mounts import device_of, fill, in_mounts, mounted, needs, repair
from tests.test_durable import CPU, NVME
from tests.training import some_fast

LOOP, MIB = Loop(steps=6), 1 << 20
BACKENDS = [None, "linux_aio", "threads", "libaio", "python"]
"""None is the first that works: io_uring, mostly."""


def stopped(act: Callable[[], object], where: Path, *codes: int) -> list[list[str]]:
    """What it tells until it fails with such an error, in time, and ends."""

    def tried() -> None:
        signal.alarm(HANGS_S)
        try:
            act()
        except Exception as raised:
            print("failed", durable_runs.check_error(raised, where, *codes), flush=True)

    child = started(tried)
    found = [*durable_runs.lines(child)]
    _, errors = child.communicate()
    assert (child.returncode, errors) == (0, ""), errors
    assert found[-1][0] == "failed", found[-1]
    return found[:-1]


def breaks(
    placement: Any,
    path: Path,
    fault: Callable[[], object],
    heal: Callable[[], object],
    codes: tuple[int, ...],
    *,
    at: int = 3,
    loop: Loop = LOOP,
    drive: Any = None,
) -> None:
    """A run that meets a fault before a step goes on from its commit after it, to the right end."""
    expected = whole(loop)
    drive = path / "run" if drive is None else drive
    (path / "run").mkdir(0o700, exist_ok=True)
    act = partial(program, placement, path, loop, drive)
    told = Told()
    for line in stopped(lambda: act(lambda step: step == at and fault()), path, *codes):
        told = told.after(line)
    heal()
    told = told.checked(path, loop)
    assert told.begun >= at - 1
    for line in told_by(act):
        told = told.after(line)
    assert told.checked(path, loop).digest == expected.digest


@pytest.mark.parametrize("kind", ["tmpfs", pytest.param("ext4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", some_fast(BACKENDS))
@pytest.mark.parametrize("placement", [CPU, pytest.param(NVME, marks=pytest.mark.slow)])
def test_a_drive_that_fills_up(
    kind: str, backend: str | None, placement: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle, then at the start of another run."""
    needs(kind)
    if backend is not None:
        monkeypatch.setenv("AIO_BACKEND", backend)

    def filled() -> None:
        with mounted(kind, tmp_path, 24 * MIB):
            filler = tmp_path / "filler"
            breaks(placement, tmp_path, lambda: fill(tmp_path), filler.unlink, (errno.ENOSPC,))
            (other := tmp_path / "other").mkdir()
            fill(tmp_path)
            stopped(partial(program, placement, other, LOOP, other), other, errno.ENOSPC)
            filler.unlink()
            assert not [*other.glob("**/offload-*")]
            assert told_by(partial(from_save, CPU, tmp_path, LOOP))[-1][1] == whole(LOOP).digest

    in_mounts(filled)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("placement", [CPU, NVME])
def test_a_file_system_that_turns_read_only(
    backend: str | None, placement: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ext4 does where it finds itself broken."""
    needs("ext4")
    if backend is not None:
        monkeypatch.setenv("AIO_BACKEND", backend)

    def turned() -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            image = Path(memory) / "image"

            def fault() -> None:
                Path(f"/sys/fs/ext4/{device_of(tmp_path)}/trigger_fs_error").write_text("1")

            with mounted("ext4", tmp_path, 32 * MIB, image):
                heal = partial(repair, image, tmp_path)
                breaks(placement, tmp_path, fault, heal, (errno.EROFS, errno.EIO))

    in_mounts(turned)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_drive_of_two_that_fails(
    backend: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks lie in a file on a file system that is full: the kernel's own errors."""
    needs("ext4")
    if backend is not None:
        monkeypatch.setenv("AIO_BACKEND", backend)

    def failed() -> None:
        drives, under = [tmp_path / "drive0", tmp_path / "drive1"], tmp_path / "under"
        for one in (*drives, under):
            one.mkdir()
        loop, image = Loop(steps=8, build=durable_runs.wide), under / "image"

        def heal() -> None:
            (under / "filler").unlink()
            repair(image, drives[1])

        with mounted("tmpfs", under, 64 * MIB), mounted("ext4", drives[1], 48 * MIB, image):
            fault, codes = partial(fill, under), (errno.EIO, errno.EROFS, errno.ENOSPC)
            breaks(NVME, tmp_path, fault, heal, codes, at=1, loop=loop, drive=drives)

    in_mounts(failed)


@pytest.mark.slow
def test_the_command_ends_where_a_drive_is_full(tmp_path: Path) -> None:
    """`offload convert`: in one sentence, with what was there untouched."""
    needs("tmpfs")

    def command(*arguments: str) -> None:
        raise SystemExit(run_command(*arguments))

    def filled() -> None:
        with mounted("tmpfs", tmp_path, 16 * MIB):
            told_by(partial(program, CPU, tmp_path, LOOP))
            fill(tmp_path)
            arguments = "convert", str(tmp_path / "save"), str(tmp_path / "other")
            child = started(partial(command, *arguments))
            _, errors = child.communicate()
            assert child.returncode in (1, 2)
            assert errors.startswith("offload: error: ")
            assert "No space left on device" in errors
            (tmp_path / "filler").unlink()
            assert sorted(one.name for one in tmp_path.iterdir()) == ["run", "save"]
            assert told_by(partial(from_save, CPU, tmp_path, LOOP))[-1][1] == whole(LOOP).digest

    in_mounts(filled)


def training(path: Path, steps: int) -> list[str]:
    """A command that trains, as a process of its own."""
    flags = ["--json", "--durable", str(path / "run"), "--commit-every", "1", "--steps", str(steps)]
    return [sys.executable, "-m", "offload", *SHORT, *flags]


def losses(out: Iterable[str]) -> list[float]:
    rows = map(json.loads, out)
    return [row["loss"] for row in rows if row["kind"] == "step"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_command_that_trains_ends_in_time_and_goes_on(tmp_path: Path) -> None:
    """With an interpreter that ends as interpreters do."""
    needs("tmpfs")
    (whole := tmp_path / "whole").mkdir()
    (broken := tmp_path / "broken").mkdir()

    def ends(path: Path, steps: int) -> list[float]:
        command = training(path, steps)
        done = subprocess.run(command, check=True, text=True, capture_output=True, timeout=200)
        return losses(done.stdout.splitlines())

    def filled() -> None:
        with mounted("tmpfs", broken, 1 << 30):
            found = list[str]()
            pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            with subprocess.Popen(training(broken, 200), **pipes) as child:
                assert child.stdout is not None
                while len(losses(found)) < 3:
                    found.append(child.stdout.readline())
                fill(broken)
                out, errors = child.communicate(timeout=HANGS_S)
            assert child.returncode == 1
            assert "No space left on device" in errors
            assert "Traceback" not in errors
            (broken / "filler").unlink()
            kept, before = durable_runs.committed(broken), losses([*found, *out.splitlines()])
            assert kept >= len(before) - 1
            assert before[:kept] + ends(broken, kept + 2) == ends(whole, kept + 2)

    in_mounts(filled)


GONE = {
    "records deleted": ("offload-*", Path.unlink, errno.ENOENT),
    "records cut short": ("offload-*", lambda path: os.truncate(path, 0), errno.EIO),
    "layout deleted": ("layout-*", Path.unlink, errno.ENOENT),
}


@pytest.mark.parametrize("placement", some_fast([CPU, NVME]))
@pytest.mark.parametrize("what", some_fast(GONE))
def test_files_that_somebody_deletes_are_missed_at_the_next_commit(
    what: str, placement: Any, tmp_path: Path
) -> None:
    """What a commit names is gone with them, but no later one is made; the save is whole."""
    pattern, gone, code = GONE[what]
    (run := tmp_path / "run").mkdir(0o700)

    def fault(step: int) -> None:
        if step == 3:
            for file in run.glob(pattern):
                gone(file)  # type: ignore[operator]

    act = partial(program, placement, tmp_path, LOOP, run)
    told = Told()
    for line in stopped(partial(act, fault), tmp_path, code):
        told = told.after(line)
    assert told.begun in (2, 3)
    assert told_by(partial(from_save, CPU, tmp_path, LOOP))[-1][1] == whole(LOOP).digest
    stopped(partial(act, durable_runs.nothing), tmp_path, errno.ENOENT, errno.EIO)


@pytest.mark.slow
def test_a_commit_that_somebody_deletes_is_replaced_by_the_next(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir(0o700)

    def fault(step: int) -> None:
        if step == 3:
            (run / "commit.json").unlink()

    assert told_by(partial(program, CPU, tmp_path, LOOP, run, fault))[-1][1] == whole(LOOP).digest
    assert told_by(partial(program, CPU, tmp_path, LOOP, run))[-1][1] == whole(LOOP).digest
