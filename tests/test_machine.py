"""What is free on this host: cgroups of both versions, shares of ranks."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload import kept
from offload.cli import bench_nvme_saved
from offload.cli.bench_nvme_report import Report
from offload.machine import (
    Machine,
    _part,
    cgroup_free_bytes,
    host_free_bytes,
    mount_point,
    nvme_free_bytes,
    probe,
    profile_path,
    ranks_on_host,
    save_speed,
    saved_speeds,
    unreadable_speeds,
)
from tests.faults import ended_pid
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


def test_more_used_than_allowed(tmp_path: Path) -> None:
    group(tmp_path / "a", GIB, 3 * GIB, V2)
    assert free(tmp_path, "0::/a") == 0


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
    monkeypatch.setattr("offload.machine.cgroup_free_bytes", lambda: 12345)
    assert host_free_bytes() == 12345
    monkeypatch.setattr("offload.machine.cgroup_free_bytes", lambda: None)
    assert host_free_bytes() > 12345


@pytest.mark.parametrize(("value", "ranks"), [(None, 1), ("1", 1), ("4", 4), ("016", 16)])
def test_ranks(monkeypatch: pytest.MonkeyPatch, value: str | None, ranks: int) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if value is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    assert ranks_on_host() == ranks


@pytest.mark.parametrize(
    "value",
    ["0", "-3", "many", "", "1.5", "4_0", "0x4", "nan", "\N{ARABIC-INDIC DIGIT FOUR}", "9" * 99],
)
def test_ranks_that_are_no_count_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    for call in (ranks_on_host, probe):
        with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE=.*whole number from 1.*unset"):
            call()


def test_ranks_share_the_host_and_the_drive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("offload.machine.host_free_bytes", lambda: 1000)
    monkeypatch.setattr("offload.machine.nvme_free_bytes", lambda *_: 500)
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
        monkeypatch.setattr("offload.machine._usable", lambda path, _, found=found: found[path])
        assert nvme_free_bytes(("a", "b", "c"), shares) == expected


def test_a_path_that_cannot_be_the_nvme_tier(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir(mode=0o500)
    wrong = [
        (tmp_path / "missing", FileNotFoundError, "create or mount it first"),
        (tmp_path / "file", NotADirectoryError, "give a directory"),
        (tmp_path / "file" / "below", NotADirectoryError, "give a directory"),
        (Path("/proc"), OSError, "on a local drive"),
    ]
    if os.geteuid():
        wrong.append((tmp_path / "closed", PermissionError, "of your own"))
    for path, kind, attempt in wrong:
        with pytest.raises(kind, match=attempt) as caught:
            nvme_free_bytes((str(path),))
        assert f"] Config.nvme_path={str(path)!r} cannot be used: " in str(caught.value)
        assert caught.value.filename == str(path)
        assert "; likely " in str(caught.value)


def test_measured_speeds_are_kept_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "deep" / "machine.json"
    monkeypatch.setenv("OFFLOAD_MACHINE", str(kept))
    assert saved_speeds() == {}
    before = probe((str(tmp_path),))
    assert save_speed(str(tmp_path / "not there yet"), SPEED) == kept
    assert list(kept.parent.iterdir()) == [kept]
    assert saved_speeds() == {mount_point(str(tmp_path)): SPEED}
    found = probe((str(tmp_path),))
    assert (found.disk_read_bytes_per_s, found.disk_write_bytes_per_s) == (5.123e9, 3e9)
    assert probe().disk_read_bytes_per_s == before.disk_read_bytes_per_s
    save_speed("/proc", replace(SPEED, depth=4))
    assert {speed.depth for speed in saved_speeds().values()} == {4, 8}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert probe((str(tmp_path),)).disk_read_bytes_per_s == 2.5615e9


@pytest.mark.parametrize(
    "wrong",
    [{"block_bytes": -1}, {"block_bytes": 5000}, {"depth": 0}, {"depth": "z"}, {"depth": 1 << 20}],
)
def test_ways_to_ask_a_drive_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        replace(SPEED, **wrong)


def test_two_processes_that_save_at_once_keep_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads what is kept, adds its own, and replaces the file: one after the other."""
    code = (
        "import sys, time\n"
        "from offload import machine\n"
        "from offload.machine import DriveSpeed\n"
        f"speed = {SPEED!r}\n"
        "inner = machine._kept\n"
        "machine._kept = lambda: (inner(), time.sleep(0.05))[0]\n"
        "machine.mount_point = str\n"
        "print(end='ready', flush=True)\n"
        "sys.stdin.read()\n"
        "for n in range(4): machine.save_speed(f'{sys.argv[1]} {n}', speed)\n"
    )
    monkeypatch.setenv("OFFLOAD_MACHINE", str(tmp_path / "machine.json"))
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as ended:
        started = [
            ended.enter_context(
                subprocess.Popen([sys.executable, "-c", code, name], stdin=pipe, stdout=pipe)
            )
            for name in ("one", "two")
        ]
        for process in started:
            assert process.stdout is not None
            assert process.stdout.read(5) == b"ready"
        for process in started:
            assert process.stdin is not None
            process.stdin.close()
        assert [process.wait(30) for process in started] == [0, 0]
    assert set(saved_speeds()) == {f"{name} {n}" for name in ("one", "two") for n in range(4)}
    assert os.listdir(tmp_path) == ["machine.json"]


def test_a_full_disk_is_told_by_the_file_that_was_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # As a write fails: without a name.

    monkeypatch.setenv("OFFLOAD_MACHINE", str(tmp_path / "machine.json"))
    monkeypatch.setattr(bench_nvme_saved, "_speeds", lambda *_: [("/", SPEED)])
    monkeypatch.setattr(Path, "write_text", full)
    assert bench_nvme_saved.saved(Report([])) == (
        f"note: the speeds could not be saved to {tmp_path / 'machine.json'}: No space left on "
        "device; likely its disk is full; try: OFFLOAD_MACHINE=FILE on another, or --no-save"
    )


def test_a_profile_that_another_process_never_lets_go_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_MACHINE", str(tmp_path / "machine.json"))
    monkeypatch.setattr(kept, "_LOCK_SECONDS_MAX", 0.05)
    with kept.alone_with(tmp_path / "machine.json"):
        with pytest.raises(OSError, match="another process has had its folder locked") as caught:
            save_speed(str(tmp_path), SPEED)
        assert caught.value.filename == str(tmp_path / "machine.json")
        monkeypatch.setattr(bench_nvme_saved, "_speeds", lambda *_: [("/", SPEED)])
        assert "stopped in the midst of saving; try: once more" in bench_nvme_saved.saved(
            Report([])
        )
    (tmp_path / f".machine.json.{ended_pid()}.fresh").touch()  # of one that was killed
    save_speed(str(tmp_path), SPEED)
    assert os.listdir(tmp_path) == ["machine.json"]


DAMAGED = ("{", "[]", '{"drives": 1}', '{"drives": {"/": {}}}', '{"drives": {"/": {"depth": 1}}}')


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_speeds_are_as_none_and_said_to_be(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "machine.json"
    kept.write_text(text)
    monkeypatch.setenv("OFFLOAD_MACHINE", str(kept))
    with pytest.warns(RuntimeWarning, match=f"asked {kept} for the measured speeds"):
        assert saved_speeds() == {}
    assert unreadable_speeds()
    with pytest.raises(FileExistsError, match="holds something else"):
        save_speed(str(tmp_path), SPEED)  # It may be another program's.
    assert kept.read_text() == text
    kept.write_text("")
    save_speed(str(tmp_path), SPEED)
    assert list(saved_speeds().values()) == [SPEED]


def test_what_never_ends_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, told in ((tmp_path / "pipe", True), ("/dev/zero", True), (os.devnull, False)):
        monkeypatch.setenv("OFFLOAD_MACHINE", str(path))
        assert bool(unreadable_speeds()) is told


def speeds_of(monkeypatch: pytest.MonkeyPatch, rates: dict[str, float | None]) -> None:
    """Drives /a, /b ... that read at 4, write at 2 and do both at 3 times such rates."""
    unit = replace(SPEED, read_bytes_per_s=4.0, write_bytes_per_s=2.0, both_bytes_per_s=3.0)
    saved = {name: _part(unit, 1 / rate) for name, rate in rates.items() if rate is not None}
    monkeypatch.setattr("offload.machine.saved_speeds", lambda: saved)
    monkeypatch.setattr("offload.machine.mount_point", lambda path: path[:2])
    places = [*rates]
    monkeypatch.setattr(
        "offload.machine.same_drive",
        lambda paths: tuple([p[:2] for p in paths].index(path[:2]) for path in paths),
    )
    monkeypatch.setattr(
        "offload.machine._usable", lambda path, asked: (10**12, places.index(path[:2]))
    )


def test_several_measured_drives_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds_of(monkeypatch, {"/a": 6.0, "/b": 3.0, "/c": 1.0, "/d": None})
    found = probe(("/a", "/b", "/c"))
    assert found.nvme_shares == pytest.approx((0.6, 0.3, 0.1))
    assert found.disk_read_bytes_per_s == pytest.approx(4 * 10)
    assert found.disk_write_bytes_per_s == pytest.approx(2 * 10)
    # One that was not measured: equal shares, and the slowest known is what they wait for.
    found = probe(("/a", "/d", "/b"))
    assert found.nvme_shares == ()
    assert found.disk_read_bytes_per_s == pytest.approx(4 * 3 * 3)
    usual = Machine(device_bytes=1, cpu_bytes=1)
    assert probe(("/d", "/d")).disk_read_bytes_per_s == usual.disk_read_bytes_per_s


def test_directories_on_one_drive_are_one_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds_of(monkeypatch, {"/a": 6.0, "/b": 3.0})
    found = probe(("/a/1", "/b", "/a/2"))
    assert found.nvme_shares == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert found.disk_read_bytes_per_s == pytest.approx(4 * 9)


def test_a_drive_that_reads_slower_than_it_writes_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speeds_of(monkeypatch, {"/a": 1.0, "/b": 1.0})
    odd = replace(SPEED, read_bytes_per_s=1.0, write_bytes_per_s=5.0, both_bytes_per_s=3.0)
    even = replace(odd, read_bytes_per_s=4.0, write_bytes_per_s=4.0)
    monkeypatch.setattr("offload.machine.saved_speeds", lambda: {"/a": odd, "/b": even})
    found = probe(("/a", "/b"))
    assert (found.disk_read_bytes_per_s, found.disk_write_bytes_per_s) == pytest.approx((2, 8))


def test_where_speeds_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_MACHINE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile_path() == tmp_path / "offload" / "machine.json"


@pytest.mark.parametrize("joint", [":", ","])
def test_directories_joined_in_one_text_are_seen(tmp_path: Path, joint: str) -> None:
    (tmp_path / "a").mkdir()
    joined = f"{tmp_path / 'a'}{joint}{tmp_path / 'b'}"
    with pytest.raises(
        FileNotFoundError, match=f"each by itself: {tmp_path / 'a'} {tmp_path / 'b'}"
    ):
        nvme_free_bytes((joined,), ())
