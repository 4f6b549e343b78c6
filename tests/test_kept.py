"""Files that are kept: what may stand in their place, and users who have no home."""

import os
import pwd
import stat
import subprocess
import sys
import threading

import pytest

from offload import kept
from offload.cli import doctor
from offload.machine import probe, saved_speeds
from tests.command import SHORT, run
from tests.faults import ended_pid


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link", tmp_path / "there/target"
    link.symlink_to(target)
    for text in ("one", "two"):  # At first it leads to nothing.
        kept.write_whole(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert sorted(tmp_path.rglob("*")) == [link, tmp_path / "there", target]


def test_what_is_no_regular_file_is_written_to_and_not_replaced(tmp_path):
    pipe, told = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: told.append(pipe.read_text()), daemon=True)
    reader.start()
    kept.write_whole(pipe, "a run")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    reader.join(10)
    assert told == ["a run"]
    link = tmp_path / "nowhere"
    link.symlink_to(os.devnull)
    kept.write_whole(link, "a run")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    with pytest.raises(IsADirectoryError):
        kept.write_whole(tmp_path, "a run")
    assert sorted(tmp_path.iterdir()) == [link, pipe]


@pytest.fixture
def homeless(monkeypatch):
    """A user whom the system does not know, as containers have them."""

    def unknown(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "OFFLOAD_MACHINE"):
        monkeypatch.delenv(name, raising=False)


def test_a_user_without_a_home_trains_and_is_told(homeless, tmp_path, capsys):
    assert saved_speeds() == {}
    assert probe((str(tmp_path),)).disk_read_bytes_per_s > 0
    assert run(*SHORT, "--trace", "--steps", "1", "--optimizer", "cpu") == 0
    told = capsys.readouterr().err
    assert "note: no trace was left at ~/.cache/offload/runs: this user has" in told
    assert run("report") == 2
    assert "no home directory: set HOME or XDG_CACHE_HOME" in capsys.readouterr().err
    found = doctor._speeds()
    assert (found.level, "no home directory" in found.found) == ("note", True)


def test_what_killed_writers_left_is_swept(tmp_path):
    whole = tmp_path / "a.json"
    ended = ended_pid()
    others = ["a.json", "a.json.bak", f"a.json.{ended}", ".a.json.fresh", f".a.json.{ended}x.fresh"]
    others += [f".b.json.{ended}.fresh", f".a.json.{os.getpid()}.fresh"]
    for name in (*others, f".a.json.{ended}.fresh"):
        (tmp_path / name).write_text("{}")
    kept.sweep(whole)
    assert sorted(os.listdir(tmp_path)) == sorted(others)
    kept.sweep(tmp_path / "no" / "folder.json")


def test_what_a_killed_writer_leaves_has_the_name_that_is_swept(tmp_path):
    program = (
        "import os, pathlib, signal, sys; from offload import kept;"
        "path = pathlib.Path(sys.argv[1]);"
        "pathlib.Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL);"
        "kept.write_whole(path, '{}')"
    )
    whole = tmp_path / "a.json"
    assert subprocess.run([sys.executable, "-c", program, str(whole)]).returncode == -9
    assert len(os.listdir(tmp_path)) == 1
    kept.sweep(whole)
    assert os.listdir(tmp_path) == []
