"""What a durable run leaves when the power is cut, the drive fails, or bits change."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import aio
import offload
from offload.checkpoint import commits
from offload.checkpoint.commit_reader import CommitReader, PartReader, read_commit, record_files
from offload.planning import machine
from offload.runtime.entry import EngineError
from tests import test_hostile
from tests.command import run as run_command
from tests.forked import fork, wait
from tests.test_durable import CPU, NVME, durable, go_on, steps
from tests.test_hostile import MUTATIONS, changed, damaged, is_refused, little_memory, overwrite
from tests.test_saving import buffered, sgd
from tests.training import Net, assert_same, frozen, plain, result_of, some_fast, some_rows_fast

SECTOR = 512


class PowerCut:
    """What may be in a directory if the power were cut, at every moment at which it matters.

    Of each sector written since its file was flushed the old or the new content is there; of what
    happened to names since the directory was flushed any part from the start on.
    """

    def __init__(self, directory: Path, images: Path, seed: int) -> None:
        self.directory, self.images, self.draw = directory, images, random.Random(seed)
        self.count = 0
        self.flushed: dict[int, bytes] = {}
        """By inode."""
        self.names: list[dict[str, int]] = [{}]
        """Inodes by name: as flushed, and after each change since."""

    def look(self) -> dict[int, bytes]:
        """What a process sees; names that are new are noted."""
        there, found = dict[str, int](), dict[int, bytes]()
        for path in self.directory.iterdir():
            there[path.name] = path.stat().st_ino
            found[path.stat().st_ino] = path.read_bytes()
        if there != self.names[-1]:
            self.names.append(there)
        return found

    def before(self) -> None:
        """Something is about to be made sure of: leave an image of what there is without it."""
        seen = self.look()
        image = self.images / str(self.count)
        image.mkdir()
        self.count += 1
        for name, inode in self.draw.choice(self.names).items():
            old, new = self.flushed.get(inode, b""), seen.get(inode, self.flushed.get(inode, b""))
            whole = bytearray(max(old, new, key=len))
            for at in range(0, len(whole), SECTOR):
                part = self.draw.choice((old, new))[at : at + SECTOR]
                whole[at : at + len(part)] = part
            size = self.draw.choice((len(old), len(new)))
            (image / name).write_bytes(whole[:size])

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def watched(call: Callable[..., Any]) -> Callable[..., Any]:
            def made(*args: Any) -> Any:
                self.before()
                found = call(*args)
                seen = self.look()
                if call is fsync:
                    if stat.S_ISDIR(os.fstat(args[0]).st_mode):
                        self.names = self.names[-1:]
                    else:
                        inode = os.fstat(args[0]).st_ino
                        self.flushed[inode] = seen[inode]
                return found

            return made

        fsync = os.fsync
        for name in ("fsync", "replace", "link", "unlink"):
            monkeypatch.setattr(os, name, watched(getattr(os, name)))


def whole(directory: Path) -> int:
    """The step of the commit in a directory, every byte of which is right; 0 without one."""
    if not (directory / "commit.json").exists():
        return 0
    commit, layout = read_commit(str(directory))
    with closing(PartReader(str(directory), commit, layout)) as reader:
        assert reader.check() == []
    return int(commit["run"]["step"])


@pytest.mark.parametrize(
    ("placement", "seed"), some_rows_fast(zip((CPU, NVME) * 4, range(8)), fast=2)
)
def test_a_power_cut_leaves_the_last_commit_or_the_one_before(
    placement: Any, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (images := tmp_path / "images").mkdir()
    (tmp_path / "run").mkdir(mode=0o700)
    run_directory = tmp_path / "run"
    last = {0: 0}  # By number of images, the step that is committed for sure.
    cut = PowerCut(run_directory, images, seed)
    with monkeypatch.context() as patch:
        cut.patch(patch)
        with durable(placement, tmp_path, drive=run_directory, build=buffered) as run:
            for _ in range(2):
                steps(run, 1)
                for _ in range(2):  # The second commit is of the same step.
                    run.engine.commit()
                    last[cut.count] = run.engine.steps
                    with torch.no_grad():
                        run.model.head.weight.mul_(2)
                        run.model.seen.add_(1)
    assert cut.count > 20
    sure = 0
    for number in range(cut.count):
        sure = last.get(number, sure)
        assert whole(images / str(number)) in (sure, sure + 1)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with commits of steps 1 and 2."""
    tmp_path = tmp_path_factory.mktemp("original")
    with durable(CPU, tmp_path, build=buffered) as run:
        steps(run, 2)
    return tmp_path


@pytest.fixture
def committed(original: Path, tmp_path: Path) -> Path:
    """A copy of it: a run may be moved."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


@pytest.mark.parametrize("seed", some_fast(range(40), fast=12))
def test_a_flipped_bit_is_found_before_it_is_used(seed: int, committed: Path) -> None:
    directory, draw = committed / "run", random.Random(seed)
    commit, layout = read_commit(str(directory))
    file = draw.choice(
        ["commit.json", commit["layout"], commit["buffers"][0], f"{layout['name']}.0"]
    )
    content = bytearray((directory / file).read_bytes())
    places = range(len(content))
    if file.startswith("offload-"):
        number, offset, size = draw.choice(layout["chunks"])[draw.choice(["weight", "state"])]
        start = offset + commit["homes"][number][0] * layout["second"]
        places = range(start, start + size)
    content[draw.choice(places)] ^= 1 << draw.randrange(8)
    (directory / file).write_bytes(content)
    with pytest.raises((ValueError, OSError)):
        read_all(directory)


@pytest.mark.parametrize("kind", ["weight", "state"])
def test_a_bit_flipped_on_nvme_is_found_in_the_first_step(kind: str, tmp_path: Path) -> None:
    with durable(NVME, tmp_path) as run:
        steps(run, 2)
    commit, layout = read_commit(str(tmp_path / "run"))
    number, offset, _ = layout["chunks"][-1][kind]
    file = Path(record_files(str(tmp_path / "run"), layout)[0])
    content = bytearray(file.read_bytes())
    content[offset + commit["homes"][number][0] * layout["second"]] ^= 1
    file.write_bytes(content)
    found = pytest.raises(EngineError, match="checksum mismatch")
    with durable(NVME, tmp_path) as run, found:
        steps(run, 1)
        run.engine.settle()
    assert read_commit(str(tmp_path / "run"))[0] == commit


def test_a_run_goes_on_on_a_drive_that_its_records_fill(tmp_path: Path, monkeypatch: Any) -> None:
    with durable(NVME, tmp_path) as run:
        steps(run, 2)
    monkeypatch.setattr(machine, "nvme_free_bytes", lambda *_: 0)
    with durable(NVME, tmp_path) as run:
        assert run.engine.resumed[0] == 2
    with pytest.raises(offload.BudgetError, match="0 B is free"), durable(NVME, tmp_path / "b"):
        pass


@pytest.mark.parametrize("placement", [CPU, ("cpu", "cpu", "nvme"), NVME])
def test_what_lies_where_a_run_goes_on_is_not_moved(placement: Any, tmp_path: Path) -> None:
    with durable(placement, tmp_path) as run:
        steps(run, 2)
    with durable(placement, tmp_path) as run:
        chunks, plan = run.engine.runner.store.chunks, run.engine.plan
        attached = sum(plan.sizes.value["weight"]) if placement is NVME else 0
        assert (chunks.bytes_read, chunks.bytes_written) == (0, attached)
        run.engine.commit()
        assert chunks.bytes_written == attached
    read_all(tmp_path / "run")


def test_a_drive_that_is_full_ends_the_engine_and_leaves_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "there")

    with durable(CPU, tmp_path) as run:
        steps(run, 2)
        run.engine.commit()
        with monkeypatch.context() as patch:
            patch.setattr(aio.Volume, "flush", full)
            steps(run, 1)
            with pytest.raises(EngineError, match=r"No space left.*it goes on from step 2"):
                steps(run, 2)
    with durable(CPU, tmp_path) as run:
        assert run.engine.resumed is not None
        assert run.engine.resumed[0] == 2


def test_records_without_room_are_refused_with_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio.IO, "free_bytes", lambda *_: 4096)
    with (
        pytest.raises(OSError, match=r"records take .*, weights and states twice: file of") as told,
        durable(CPU, tmp_path),
    ):
        pass
    assert told.value.errno == errno.ENOSPC


def test_another_model_or_rule_is_refused_and_nothing_changed(committed: Path) -> None:
    before = (committed / "run" / "commit.json").read_bytes()
    with (
        pytest.raises(ValueError, match="found other tensors in the set model"),
        durable(CPU, committed, build=lambda: Net(layers=4)),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"found states of adam"),
        durable(CPU, committed, build=buffered, optimizer=sgd),
    ):
        pass
    with pytest.raises(ValueError, match="unexpected: 'seen'"), durable(CPU, committed):
        pass
    with (
        pytest.raises(FileExistsError, match="commit of step 2"),
        durable(CPU, committed, build=buffered, resume=False),
    ):
        pass
    assert (committed / "run" / "commit.json").read_bytes() == before
    with durable(CPU, committed, build=buffered) as run:
        assert run.engine.resumed[0] == 2
        go_on(run)
        plain(run, 0)


def test_a_frozen_layer_may_be_trained_from_then_on_and_a_trained_one_not_frozen(
    tmp_path: Path,
) -> None:
    with durable(CPU, tmp_path, build=frozen) as run:
        steps(run, 2)
        expected = result_of(run)
    with durable(CPU, tmp_path) as run:
        go_on(run)
        assert_same(result_of(run), expected)
        steps(run, 1)
    refused = pytest.raises(ValueError, match="frozen when the model was attached")
    with refused, durable(CPU, tmp_path, build=frozen):
        pass


def test_one_process_owns_a_run(tmp_path: Path) -> None:
    with (
        durable(CPU, tmp_path),
        pytest.raises(BlockingIOError, match=f"{os.getpid()} "),
        durable(CPU, tmp_path),
    ):
        pass


def test_a_run_whose_directory_was_deleted_is_let_go_of(tmp_path: Path) -> None:
    run = commits.run_directory(str(tmp_path / "run"), None, resume=True)
    shutil.rmtree(tmp_path / "run")
    run.close()


def test_a_forked_worker_that_outlives_its_run_has_no_lock(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    with open(os.devnull, "r+") as nothing:
        owner = fork(partial(orphan, str(tmp_path)), (nothing.fileno(),) * 3)
    assert wait(owner) == 7
    with durable(CPU, tmp_path) as run:
        plain(run, 0)


def orphan(directory: str) -> None:
    """Own a run, and end; the child goes on for a while."""
    lock = commits._owned(os.path.join(directory, "run", commits.LOCK))
    if os.fork() == 0:
        time.sleep(1)
    assert not lock.closed
    os._exit(7)


def test_a_directory_that_others_may_change_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (tmp_path / "link").symlink_to(shared)
    for path in (shared, tmp_path / "link", shared / "inside"):
        with pytest.raises(PermissionError, match="asked for durable"):
            offload.attach(*made(), offload.Config(durable=str(path)))


def made() -> Any:
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters())


def test_another_layout_has_files_of_its_own_and_the_old_ones_stay_for_one_more_commit(
    committed: Path,
) -> None:
    def files(folder: str) -> list[str]:
        return sorted(one.name for one in (committed / folder).glob("offload-*"))

    (old,) = files("run")
    with durable(NVME, committed, build=buffered) as run:
        go_on(run)
        for left in ([old], []):
            assert files("run") == [old]
            steps(run, 1)
            run.engine.commit()
            assert files("run") == left
    assert len(files("drive")) == 1
    with durable(CPU, committed, build=buffered) as run:
        assert run.engine.resumed[0] == 4
    assert not files("run"), "nothing was committed there"


def read_all(directory: Path) -> None:
    """Read all values of a commit, by name, and all chunks."""
    commit, layout = read_commit(str(directory))
    with closing(CommitReader([(str(directory), commit, layout)], "")) as reader:
        for name, (_, shape, _) in layout["parameters"].items():
            reader.values("model", name, 0, prod(shape))
    with closing(PartReader(str(directory), commit, layout)) as part:
        if wrong := part.check():
            raise ValueError("; ".join(wrong)[:1_000])


@pytest.mark.parametrize("deleted", ["layout-*", "offload-*"])
def test_a_file_that_is_missing_is_named_with_what_to_try(deleted: str, committed: Path) -> None:
    (file,) = (committed / "run").glob(deleted)
    file.unlink()
    told = f"asked for the commit of step 2; found no such file; likely .*copied.*{file.name}"
    with pytest.raises(FileNotFoundError, match=told), durable(CPU, committed, build=buffered):
        pass


def test_records_on_a_drive_that_moved_are_found_by_a_link(tmp_path: Path) -> None:
    with durable(NVME, tmp_path) as run:
        steps(run, 2)
        expected = result_of(run)
    drive, moved = tmp_path / "drive", tmp_path / "moved"
    drive.rename(moved)
    told = f"likely .* its drive is elsewhere; mount it there, or let '{drive}' be a link"
    with pytest.raises(FileNotFoundError, match=told), durable(CPU, tmp_path):
        pass
    drive.symlink_to(moved)
    with durable(NVME, tmp_path, drive=moved) as run:
        go_on(run)
        assert_same(result_of(run), expected)
        steps(run, 1)


@pytest.mark.parametrize("count", some_fast([MUTATIONS // 16, MUTATIONS // 4]))
def test_mutated_commits_are_refused_in_a_sentence(count: int, committed: Path) -> None:
    directory = committed / "run"
    good = {one: one.read_bytes() for one in directory.glob("*.json")}
    refused = 0
    with little_memory():
        for seed in range(count):
            draw = random.Random(seed)
            file = draw.choice([directory / "commit.json", directory / "layout-1.json"])
            content = good[file]
            inner = json.dumps(json.loads(content)["run"]).encode()
            broken = draw.random() < 0.2
            overwrite(
                file,
                damaged(content, draw) if broken else test_hostile.sealed(changed(inner, draw)),
            )
            refused += is_refused(partial(read_all, directory), f"mutation {seed} of {file.name}")
            overwrite(file, content)
    assert refused > 0.7 * count
    assert whole(directory) == 2


def test_inspect_tells_what_a_run_has_and_what_is_broken(
    committed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = committed / "run"
    assert run_command("inspect", str(directory)) == 0
    told = capsys.readouterr().out
    assert "step" in told
    assert "adam, exact: " in told
    (directory / "commit.json").write_bytes(b"{}")
    assert run_command("inspect", str(directory)) == 1
    assert "step 1 in previous.json is whole" in capsys.readouterr().out
    (directory / "previous.json").replace(directory / "commit.json")
    with durable(CPU, committed, build=buffered) as run:
        assert run.engine.resumed[0] == 1


def test_an_error_in_the_middle_of_a_commit_deletes_nothing(
    committed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new commit has its name already, and its layout is another one."""

    def broken(_: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "there")

    drive = committed / "drive"
    drive.mkdir()
    with durable(NVME, committed, build=buffered) as run:
        go_on(run)
        steps(run, 1)
        with monkeypatch.context() as patch:
            patch.setattr(commits, "flush", broken)
            with pytest.raises(EngineError, match="Input/output error"):
                run.engine.commit()
    with durable(NVME, committed, build=buffered) as run:
        assert run.engine.resumed[0] == 3
