"""What the host gives: free bytes, measured speeds."""

from __future__ import annotations

import os
import pwd
from dataclasses import replace
from pathlib import Path

import pytest

from offload.planning.machine import (
    cgroup_free_bytes,
    host_free_bytes,
    measured_speeds,
    mount_point,
    nvme_free_bytes,
    probe,
    profile_path,
    ranks_on_host,
    replace_file,
    save_speed,
    saved_speeds,
    shares_of,
)
from tests.command import SHORT, run
from tests.profiles import SPEED

GIB = 1 << 30

V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def group(
    at: Path, limit: object, used: int, names: tuple[str, str], stat: str | None = ""
) -> None:
    """A group's directory with its files."""
    at.mkdir(parents=True, exist_ok=True)
    (at / names[0]).write_text(f"{limit}\n")
    (at / names[1]).write_text(f"{used}\n")
    if stat is not None:
        (at / "memory.stat").write_text(stat)


def free(root: Path, *lines: str) -> int | None:
    """Free bytes of a process in these groups."""
    membership = root / "self"
    membership.write_text("".join(f"{line}\n" for line in lines))
    return cgroup_free_bytes(root, membership)


def test_v2_own_group(tmp_path: Path) -> None:
    group(tmp_path / "job", 8 * GIB, 3 * GIB, V2)
    assert free(tmp_path, "0::/job") == 5 * GIB


def test_v2_the_tightest_of_nested_groups(tmp_path: Path) -> None:
    group(tmp_path / "a", 4 * GIB, 3 * GIB, V2)
    group(tmp_path / "a/b", "max", 2 * GIB, V2)
    group(tmp_path / "a/b/c", 8 * GIB, 2 * GIB, V2)
    assert free(tmp_path, "0::/a/b/c") == GIB
    group(tmp_path / "a/b/c", 2 * GIB + 5, 2 * GIB, V2)
    assert free(tmp_path, "0::/a/b/c") == 5


def test_v2_without_a_limit(tmp_path: Path) -> None:
    group(tmp_path / "a", "max", 3 * GIB, V2)
    assert free(tmp_path, "0::/a") is None
    assert free(tmp_path, "0::/elsewhere") is None
    assert free(tmp_path, "0::/") is None


def test_page_cache_counts_as_free(tmp_path: Path) -> None:
    group(tmp_path / "a", 4 * GIB, 3 * GIB, V2, f"anon 5\ninactive_file {GIB}\nfile 9\n")
    assert free(tmp_path, "0::/a") == 2 * GIB


@pytest.mark.parametrize("stat", [None, "", "inactive_file many\n", "one\n"])
def test_a_limit_counts_without_statistics(tmp_path: Path, stat: str | None) -> None:
    group(tmp_path / "a", 4 * GIB, 3 * GIB, V2, stat)
    assert free(tmp_path, "0::/a") == GIB


def test_v1(tmp_path: Path) -> None:
    stat = f"inactive_file 1\ntotal_inactive_file {GIB}\n"
    group(tmp_path / "memory/job", 8 * GIB, 3 * GIB, V1, stat)
    lines = ("12:cpu,cpuacct:/other", "5:memory:/job", "1:name=systemd:/x", "0::/nothing")
    assert free(tmp_path, *lines) == 6 * GIB


def test_v1_no_limit_is_a_huge_number(tmp_path: Path) -> None:
    group(tmp_path / "memory", 9223372036854771712, GIB, V1)
    group(tmp_path / "memory/job", 9223372036854771712, GIB, V1)
    assert free(tmp_path, "5:memory:/job") is None


def test_v1_in_a_container_where_the_path_is_the_host_s(tmp_path: Path) -> None:
    group(tmp_path / "memory", 2 * GIB, GIB, V1)
    assert free(tmp_path, "5:hugetlb,memory:/docker/abc") == GIB


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert cgroup_free_bytes(tmp_path, tmp_path / "missing") is None


def test_host_is_within_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.planning.machine.cgroup_free_bytes", lambda: 12345)
    assert host_free_bytes() == 12345
    monkeypatch.setattr("offload.planning.machine.cgroup_free_bytes", lambda: None)
    assert host_free_bytes() > 12345


@pytest.mark.parametrize(("value", "ranks"), [(None, 1), ("1", 1), ("4", 4), ("016", 16)])
def test_ranks(monkeypatch: pytest.MonkeyPatch, value: str | None, ranks: int) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if value is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    assert ranks_on_host() == ranks


@pytest.mark.parametrize("value", ["0", "-3", "many", "", "1.5", "\N{ARABIC-INDIC DIGIT FOUR}"])
def test_ranks_that_are_no_count_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    for call in (ranks_on_host, probe):
        with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE=.*whole number from 1"):
            call()


def test_ranks_share_the_host_and_the_drive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("offload.planning.machine.host_free_bytes", lambda: 1000)
    monkeypatch.setattr("offload.planning.machine.nvme_free_bytes", lambda *_: 500)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    machine = probe((str(tmp_path),), device_free_bytes=77)
    assert (machine.device_bytes, machine.cpu_bytes, machine.nvme_bytes) == (77, 250, 125)
    assert not machine.device_is_cpu
    machine = probe()
    assert (machine.device_bytes, machine.cpu_bytes) == (250, 250)
    assert machine.device_is_cpu


def test_free_space_of_a_drive(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    found = nvme_free_bytes((str(tmp_path),))
    assert 0 <= found <= stat.f_blocks * stat.f_frsize
    assert nvme_free_bytes(()) == 0


def test_free_space_of_several_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is full first limits all, and paths on one file system share what it has."""
    for free, drives, shares, expected in (
        ((700, 100, 900), (1, 2, 3), (), 300),
        ((700, 100, 700), (1, 2, 1), (), 300),
        ((700, 400, 700), (1, 2, 1), (), 1050),
        ((100, 100, 100), (1, 1, 1), (), 100),
        ((700, 100, 900), (1, 2, 3), (0.25, 0.25, 0.5), 400),
        ((700, 100, 700), (1, 2, 1), (0.5, 0.1, 0.4), 777),
    ):
        found = dict(zip("abc", zip(free, drives)))
        usable = "offload.planning.machine._usable"
        monkeypatch.setattr(usable, lambda path, _, found=found: found[path])
        assert nvme_free_bytes(("a", "b", "c"), shares) == expected


def test_a_path_that_cannot_be_the_nvme_tier(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir(mode=0o500)
    wrong = [
        (tmp_path / "missing", FileNotFoundError),
        (tmp_path / "file", NotADirectoryError),
        (tmp_path / "file" / "below", NotADirectoryError),
        (Path("/proc"), OSError),
    ]
    if os.geteuid():
        wrong.append((tmp_path / "closed", PermissionError))
    for path, kind in wrong:
        with pytest.raises(kind, match="give an existing directory on a local drive") as caught:
            nvme_free_bytes((str(path),))
        assert f"] Config.nvme_path={str(path)!r} cannot be used: " in str(caught.value)
        assert caught.value.filename == str(path)


def test_measured_speeds_are_kept_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "deep" / "machine.json"
    monkeypatch.setenv("OFFLOAD_MACHINE", str(kept))
    assert saved_speeds() == ({}, None)
    assert save_speed(str(tmp_path / "not there yet"), SPEED) == kept
    assert list(kept.parent.iterdir()) == [kept]
    assert saved_speeds() == ({mount_point(str(tmp_path)): SPEED}, None)
    assert measured_speeds((str(tmp_path),)) == (SPEED,)
    save_speed("/proc", replace(SPEED, others_percent=4))
    assert {speed.others_percent for speed in saved_speeds()[0].values()} == {0, 4}


DAMAGED = ("{", "[]", '{"drives": 1}', '{"drives": {"/": {"depth": 1}}}')


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_speeds_are_as_none_and_said_to_be(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "machine.json"
    kept.write_text(text)
    monkeypatch.setenv("OFFLOAD_MACHINE", str(kept))
    with pytest.warns(RuntimeWarning, match=f"{kept} holds no measured speeds of drives"):
        assert measured_speeds(("/",)) == (None,)
    with pytest.raises(FileExistsError, match="holds something else"):
        save_speed(str(tmp_path), SPEED)  # It may be another program's.
    assert kept.read_text() == text
    kept.write_text("")
    save_speed(str(tmp_path), SPEED)
    assert list(saved_speeds()[0].values()) == [SPEED]


def test_files_are_striped_by_the_speed_of_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"/a": 6.0, "/b": 3.0, "/c": 1.0}
    saved = {mount: replace(SPEED, both_bytes_per_s=rate) for mount, rate in rates.items()}
    monkeypatch.setattr("offload.planning.machine.saved_speeds", lambda: (saved, None))
    monkeypatch.setattr("offload.planning.machine.mount_point", lambda path: path[:2])
    for paths, shares in (
        (("/a", "/b", "/c"), (0.6, 0.3, 0.1)),
        (("/a", "/d", "/b"), (1 / 3, 1 / 3, 1 / 3)),  # One that was not measured.
        (("/a/1", "/b", "/a/2"), (1 / 3, 1 / 3, 1 / 3)),  # Two of one file system.
    ):
        assert shares_of(measured_speeds(paths)) == pytest.approx(shares)


def test_where_speeds_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_MACHINE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile_path() == tmp_path / "offload" / "machine.json"


# -- files in the user's cache


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0) as pipe:
        replace_file(tmp_path / "pipe", "x")
        assert pipe.read(1) == b"x"
    assert (tmp_path / "pipe").is_fifo()


def test_a_user_without_a_home_trains_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "OFFLOAD_MACHINE"):
        monkeypatch.delenv(name, raising=False)
    assert saved_speeds() == ({}, None)
    assert run(*SHORT, "--steps", "1", "--optimizer", "cpu") == 0
    told = capsys.readouterr().err
    assert "note: no trace was left at ~/.cache/offload/run.json: this user has" in told
    assert run("report") == 2
    assert "no home directory: set HOME or XDG_CACHE_HOME" in capsys.readouterr().err
