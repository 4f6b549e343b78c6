"""`offload doctor`: each finding on trees of files that are laid out, and the command as it is."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aio import Probe
from offload import machine
from offload.cli import doctor, findings, findings_drives, findings_host
from offload.cli.console import Output
from offload.cli.doctor import show
from offload.cli.findings import Accelerator, Finding
from offload.config import format_bytes
from tests.command import run, start
from tests.profiles import SPEED

GIB = 1 << 30


def lay(root: Path, files):
    """Files below `root`, as Linux shows them."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def check(finding, level, told, fix=""):
    assert finding.level == level, finding
    assert told in finding.found, finding
    assert fix in finding.fix, finding


def test_ready_unless_something_stops():
    ok, note = Finding("a", "ok", "b"), Finding("a", "note", "b", "c")
    assert findings.ready([ok, note])
    assert not findings.ready([ok, Finding("a", "stop", "b", "c")])


def test_every_finding_but_a_good_one_has_a_fix_and_is_a_line():
    for wrong in (("note", "a", ""), ("stop", "a", ""), ("ok", "a", "b"), ("note", "a\nb", "c")):
        with pytest.raises(AssertionError):
            Finding("x", *wrong)


def test_python_and_torch():
    check(findings.python((3, 9, 1), "linux"), "stop", "3.9.1 is too old", "3.10 or newer")
    check(findings.python((3, 12, 0), "darwin"), "note", "on darwin", "Linux")
    check(findings.python((3, 10, 0), "linux"), "ok", "3.10.0 on Linux")
    check(findings.torch("2.13.0+cu128"), "ok", "2.13.0+cu128")
    check(findings.torch("2.8.1"), "stop", "2.8.1 is too old", "pip install 'torch>=2.9'")
    check(findings.torch(None, "No module named 'torch'"), "stop", "No module", "pip install")
    check(findings.packages(()), "ok", "safetensors")
    check(findings.packages(["numpy"]), "stop", "missing: numpy", "pip install numpy")


def accelerator(root, environment=None, **seen):
    seen = Accelerator(**{"name": None, **seen})
    return findings.accelerator(seen, root, environment or {}, format_bytes)


def test_accelerator(tmp_path):
    check(accelerator(tmp_path), "ok", "none: the CPU is the compute device")
    check(accelerator(tmp_path, built_for="CUDA 12.8"), "ok", "none")
    there = {"name": "H100", "free_bytes": 4 * GIB, "built_for": "CUDA 12.8"}
    check(accelerator(tmp_path, **there), "ok", "H100, 4.00 GiB free (torch built for CUDA 12.8)")
    lay(tmp_path, {f"proc/driver/nvidia/gpus/{number}/information": "" for number in (1, 2)})
    check(accelerator(tmp_path), "note", "2 NVIDIA GPUs here, but torch was built for the CPU")
    broken = {"built_for": "CUDA 12.8", "error": "driver too old"}
    check(accelerator(tmp_path, **broken), "note", "cannot use it: driver too old", "nvidia-smi")
    for hidden in ("", "-1"):
        environment = {"CUDA_VISIBLE_DEVICES": hidden}
        check(accelerator(tmp_path, environment, **broken), "note", "hidden by", "unset CUDA")
    environment = {"CUDA_VISIBLE_DEVICES": "10"}
    check(accelerator(tmp_path, environment, **broken), "note", "cannot use it")


def test_kernels():
    check(findings.kernels("avx2", "the best that this processor can run", None), "ok", "avx2")
    check(findings.kernels("python", "asked for", None), "ok", "python")
    missing = ("python", "no compiled kernels: no _kernels")
    check(
        findings.kernels(*missing, None), "note", "Python reference", "install g++, then run make"
    )
    check(findings.kernels(*missing, "/usr/bin/c++"), "note", "/usr/bin/c++ is here", "install -v")


def probes(**reasons):
    names = ("io_uring", "linux_aio", "threads", "libaio", "python")
    return [Probe(name, name not in reasons, reasons.get(name, "works here")) for name in names]


def test_file_backends():
    (found,) = findings.file_backends(probes(), {})
    check(found, "ok", "io_uring: the best there is")
    (found,) = findings.file_backends(probes(), {"AIO_BACKEND": "threads"})
    check(found, "ok", "threads: AIO_BACKEND asks for it")
    (found,) = findings.file_backends(probes(io_uring="it is switched off"), {})
    check(found, "note", "linux_aio, which costs a little more", "io_uring_disabled=0")
    assert "io_uring: it is switched off" in found.found
    why = "the engine was not compiled when this was installed (No module)"
    (found,) = findings.file_backends(probes(io_uring=why, linux_aio=why, threads=why), {})
    check(found, "note", "libaio (the package of PyPI), which costs much more", "g++")
    (found,) = findings.file_backends(probes(io_uring="no"), {"AIO_BACKEND": "io_uring"})
    check(found, "stop", "AIO_BACKEND=io_uring: no", "unset AIO_BACKEND")
    (found,) = findings.file_backends(probes(), {"AIO_BACKEND": "uring"})
    check(found, "stop", "there is none of that name", "unset AIO_BACKEND")


def test_memory_against_the_cgroup(tmp_path):
    check(findings_host.memory(tmp_path), "note", "does not say", "--cpu-memory")
    lay(tmp_path, {"proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable:  16777216 kB"})
    check(findings_host.memory(tmp_path), "ok", "16.00 GiB free of 32.00 GiB")
    group = "sys/fs/cgroup/job/"
    lay(tmp_path, {"proc/self/cgroup": "0::/job", group + "memory.current": GIB})
    lay(tmp_path, {group + "memory.max": 5 * GIB})
    check(findings_host.memory(tmp_path), "ok", "the cgroup leaves 4.00 GiB")
    check(findings_host.memory(tmp_path, 2), "ok", "shared by 2 ranks")
    check(findings_host.memory(tmp_path, 9), "stop", "too little to train", "container's memory")
    lay(tmp_path, {group + "memory.max": GIB + 1000})
    check(findings_host.memory(tmp_path), "stop", "too little", "the container's memory limit")


def test_memlock(tmp_path):
    check(findings_host.memlock(None, tmp_path, registers=True), "ok", "no limit")
    small = findings_host.memlock(64 << 10, tmp_path, registers=False)
    check(small, "note", "at most 64.00 KiB may be locked: io_uring", "ulimit -l unlimited")
    check(
        findings_host.memlock(1 << 20, tmp_path, registers=True),
        "note",
        "nor can memory for the GPU",
    )
    check(findings_host.memlock(GIB, tmp_path, registers=True), "ok", "at most 1.00 GiB")
    lay(tmp_path, {"proc/self/status": "Name:\tx\nCapEff:\t0000000000004000"})
    check(findings_host.memlock(64 << 10, tmp_path, registers=True), "ok", "CAP_IPC_LOCK")
    lay(tmp_path, {"proc/self/status": "Name:\tx\nCapEff:\t0000000000002000"})
    check(
        findings_host.memlock(64 << 10, tmp_path, registers=True),
        "note",
        "where its driver goes by that",
    )


@pytest.mark.parametrize(("used", "level"), [("0", "ok"), ("65280", "ok"), ("65281", "note")])
def test_aio_requests(used, level, tmp_path):
    check(findings_host.aio_requests(tmp_path), "ok", "not shown")
    lay(tmp_path, {"proc/sys/fs/aio-max-nr": "65536", "proc/sys/fs/aio-nr": used})
    check(findings_host.aio_requests(tmp_path), level, f"{used} of 65536")


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("always [madvise] never", "ok"),
        ("[always] madvise never", "ok"),
        ("always madvise [never]", "note"),
        ("", "ok"),
    ],
)
def test_huge_pages(text, level, tmp_path):
    lay(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})
    assert findings_host.huge_pages(tmp_path).level == level


def test_numa(tmp_path):
    node = "sys/devices/system/node/node"
    lay(tmp_path, {f"{node}0/cpulist": "0-3"})
    check(findings_host.numa(tmp_path, [0, 1]), "ok", "one node")
    lay(tmp_path, {f"{node}2/cpulist": ""})  # Memory without processors.
    check(findings_host.numa(tmp_path, [0, 1]), "ok", "one node")
    lay(tmp_path, {f"{node}10/cpulist": "4-6,9"})
    check(findings_host.numa(tmp_path, [0, 9]), "ok", "2 nodes of 4, 4 processors")
    check(findings_host.numa(tmp_path, [5, 9]), "note", "on node 10 only", "one rank per node")
    lay(tmp_path, {"proc/sys/kernel/numa_balancing": "1"})
    check(findings_host.numa(tmp_path, [0, 9]), "note", "moves pages", "numa_balancing=0")


def test_governor(tmp_path):
    check(findings_host.governor(tmp_path), "ok", "not ours to set")
    for number, name in enumerate(("performance", "schedutil")):
        lay(tmp_path, {f"sys/devices/system/cpu/cpu{number}/cpufreq/scaling_governor": name})
    check(findings_host.governor(tmp_path), "ok", "performance, schedutil")
    lay(tmp_path, {"sys/devices/system/cpu/cpu2/cpufreq/scaling_governor": "powersave"})
    check(findings_host.governor(tmp_path), "note", "powersave", "-g performance")


def test_processors():
    check(findings_host.processors(range(8), 8, None), "ok", "8")
    check(findings_host.processors(range(2), 8, 2.0), "ok", "2 of 8")
    check(findings_host.processors(range(8), 8, 1.5), "note", "the time of 1.5", "CPU limit")
    check(findings_host.processors([3], 8, None), "note", "take turns on one", "taskset")
    check(findings_host.processors([0], 1, None), "ok", "1")


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"OMP_NUM_THREADS": "1"}, "OMP_NUM_THREADS=1 of 8 cores"),
        ({"OMP_NUM_THREADS": "16"}, "OMP_NUM_THREADS=16 on 8 cores"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "spin"),
        ({"OMP_PROC_BIND": "true"}, "OMP_PROC_BIND=true"),
        ({"GOMP_CPU_AFFINITY": "0-3"}, "GOMP_CPU_AFFINITY=0-3"),
        ({"KMP_BLOCKTIME": "200"}, "spin before they sleep"),
    ],
)
def test_settings_of_openmp_that_hurt(environment, told):
    (found,) = findings_host.threads(environment, 8)
    check(found, "note", told)


def test_settings_of_openmp_that_do_not():
    for environment in ({}, {"OMP_NUM_THREADS": "8", "OMP_WAIT_POLICY": "PASSIVE"}):
        (found,) = findings_host.threads({**environment, "OMP_PROC_BIND": "false"}, 8)
        check(found, "ok", "nothing")
    assert findings_host.threads({"OMP_NUM_THREADS": "1"}, 8, ranks=8)[0].level == "ok"


MOUNTS = """/dev/sda2 / ext4 rw 0 0
proc /proc proc rw 0 0
/dev/nvme0n1p1 /mnt/fast\\040one xfs rw 0 0
/dev/sda2 /etc/hosts ext4 rw 0 0
/dev/loop3 /snap/core squashfs ro 0 0
/dev/mapper/vg-data /data btrfs rw 0 0
host:/x /mnt/net nfs4 rw 0 0
tmpfs /data/quick tmpfs rw 0 0"""


@pytest.fixture
def tree(tmp_path):
    lay(
        tmp_path,
        {
            "proc/self/mounts": MOUNTS,
            "sys/devices/sda/sda2/partition": "2",
            "sys/devices/sda/device/model": "Old   Disk",
            "sys/devices/sda/queue/rotational": "1",
            "sys/devices/nvme0n1/nvme0n1p1/partition": "1",
            "sys/devices/nvme0n1/device/model": "Fast 990",
            "sys/devices/nvme0n1/queue/rotational": "0",
            "sys/devices/dm-0/slaves/nvme0n1p1/x": "",
            "sys/devices/dm-0/slaves/vdb/x": "",
            "sys/devices/vdb/queue/rotational": "0",
            "dev/dm-0": "",
        },
    )
    block = tmp_path / "sys/class/block"
    block.mkdir(parents=True)
    for at in ("sda", "sda/sda2", "nvme0n1", "nvme0n1/nvme0n1p1", "dm-0", "vdb"):
        (block / Path(at).name).symlink_to(tmp_path / "sys/devices" / at)
    (tmp_path / "dev/mapper").mkdir()
    (tmp_path / "dev/mapper/vg-data").symlink_to("../dm-0")
    return tmp_path


def test_mounts(tree):
    mounted = findings_drives.mounts(tree)
    assert findings_drives.candidates(mounted) == ["/", "/mnt/fast one", "/data"]
    for path, at in (("/mnt/fast one/x", "/mnt/fast one"), ("/mnt/fast", "/"), ("/data", "/data")):
        assert findings_drives.mount_of(path, mounted).at == at
    assert findings_drives.mount_of("/data/quick/x", mounted).kind == "tmpfs"
    assert findings_drives.mount_of("/data", []) is None


def test_drives_under_partitions_and_volumes(tree):
    assert findings_drives.drives("/dev/nvme0n1p1", tree) == ["Fast 990 nvme0n1"]
    assert findings_drives.drives("/dev/mapper/vg-data", tree) == [
        "Fast 990 nvme0n1",
        "a virtual drive vdb",
    ]
    assert findings_drives.drives("/dev/sda2", tree)[0].startswith("Old Disk sda (a hard disk)")
    assert findings_drives.drives("host:/x", tree) == []
    assert findings_drives.drives("/dev/gone", tree) == []


def directory(tree, path, **tried):
    tried = {"asked": True, "direct": True, "free_bytes": 9 * GIB, **tried}
    tried = findings_drives.Tried(path=path, **tried)
    return findings_drives.directory(tried, findings_drives.mounts(tree), tree)


def test_directories(tree):
    good = directory(tree, "/mnt/fast one")
    check(good, "ok", "xfs, O_DIRECT, 9.00 GiB free, Fast 990 nvme0n1")
    assert good.subject == "nvme /mnt/fast one"
    check(directory(tree, "/"), "note", "Old Disk sda", "on an SSD")
    check(directory(tree, "/data"), "ok", "btrfs")
    check(directory(tree, "/data", notice="copies"), "note", "copies on write", "ext4 or xfs")
    check(directory(tree, "/data/quick", direct=False), "note", "this is memory and no drive")
    check(directory(tree, "/mnt/net"), "note", "a network")
    check(directory(tree, "/mnt/fast one", free_bytes=GIB // 2), "note", "too little room")
    check(directory(tree, "/mnt/fast one", free_bytes=3 << 20), "stop", "least that offload train")
    check(directory(tree, "/mnt/fast one", free_bytes=5, asked=False), "note", "too little room")
    both = directory(tree, "/data/quick", free_bytes=GIB // 2)
    check(both, "note", "this is memory and no drive, and too little room", "ext4")
    check(directory(tree, "/mnt/fast one", direct=False), "note", "page cache")
    check(directory(tree, "/x", error="refused; try this"), "stop", "refused", "try this")
    check(directory(tree, "/x", error="refused"), "stop", "refused", "give a directory")
    check(directory(tree, "/x", error="no", asked=False), "note", "no", "sudo install -d")
    full = "scratch file of 4096 bytes failed: No space left on device; likely full; free space"
    check(directory(tree, "/x", error=full, asked=False), "note", "No space", "another drive")


TOLD = "/a reads 5.12 GB/s and writes 3, measured 2026-11-21 12:00:00"


def test_where_speeds_are_kept(tmp_path):
    kept = tmp_path / "deep/er/machine.json"
    assert findings.may_write(kept)
    check(findings.kept_speeds(kept, True), "ok", "nothing measured yet")
    check(findings.kept_speeds(kept, True, None, {"/a": SPEED}), "ok", f"{kept}: {TOLD}")
    noisy = {"/a": SPEED, "/b": replace(SPEED, others_percent=98)}
    doubt = f"{TOLD}; /b {TOLD[3:]} while others kept 98% of the processors busy"
    check(findings.kept_speeds(kept, True, None, noisy), "note", doubt, "or remove that file")
    (tmp_path / "file").touch()
    assert not findings.may_write(tmp_path / "file" / "machine.json")
    check(findings.kept_speeds(kept, False), "note", "cannot be written", "OFFLOAD_MACHINE=")
    wrong = "asked; found nothing; likely cause: cut off; try: remove it"
    check(findings.kept_speeds(kept, True, wrong), "note", "found nothing", "remove it")


def test_a_line_each_where_there_is_no_terminal():
    out = io.StringIO()
    console = Output(file=out, width=20)
    show(console, Finding("torch", "ok", "2.13 " * 9))
    show(console, Finding("a [b]", "note", "slow", "faster"))
    assert out.getvalue() == f"ok   torch: {'2.13 ' * 9}\nnote a [b]: slow. Fix: faster\n"


def test_a_terminal_folds_a_finding_beside_its_mark():
    console = Output(file=io.StringIO(), width=30, force_terminal=True, no_color=True)
    show(console, Finding("a", "note", "word " * 9, "this"))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert len(lines) > 1
    assert all(line.startswith("     ") for line in lines[1:])


def test_the_command(tmp_path, capsys):
    assert run("doctor", str(tmp_path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ready"] is True
    seen = {finding["subject"]: finding for finding in found["findings"]}
    expected = {"Python", "torch", "accelerator", "update", "file I/O", "memory", "memlock"}
    expected |= {"aio-max-nr", "huge pages", "processors", "NUMA", "CPU clock", "OpenMP"}
    assert expected | {f"nvme {tmp_path}", "a step", "speeds", "packages"} <= set(seen)
    assert "nvme" in seen["a step"]["found"]
    assert not list(tmp_path.iterdir())


def test_a_drive_that_is_full_is_told_without_the_table_of_budgets(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "nvme_free_bytes", lambda *_, **__: 0)
    found = doctor._trained(torch, [str(tmp_path)])
    assert (found.level, found.subject) == ("stop", "a step")
    assert found.found.endswith(
        f"optimizer nvme: too little of nvme; likely nothing is free on --nvme-path {tmp_path}"
    )
    fix = f"free some space in {tmp_path}, or name a directory on another drive"
    assert found.fix == fix
    monkeypatch.setattr(machine, "nvme_free_bytes", lambda *_, **__: 1 / 0)
    found = doctor._trained(torch, [str(tmp_path)])
    assert found.found == "division by zero"
    assert "OFFLOAD_TRACEBACK=1" in found.fix
    assert "above" not in found.fix


def test_a_path_that_cannot_be_used_stops(tmp_path, capsys):
    assert run("doctor", str(tmp_path / "gone")) == 1
    shown = capsys.readouterr()
    assert f"stop nvme {tmp_path}/gone: it cannot" in shown.out
    assert shown.out.endswith("training cannot start: see stop above\n")
    assert not shown.err
    assert run("doctor", "--jsn") == 2
    assert "did you mean --json?" in capsys.readouterr().err


@pytest.mark.slow
def test_without_torch_it_says_so(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('broken install')\n")
    process = start("doctor", "--json", env={"PYTHONPATH": f"{tmp_path}:.", "PATH": "/usr/bin"})
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    (stop,) = [one for one in json.loads(out)["findings"] if one["level"] == "stop"]
    assert (stop["subject"], stop["found"]) == ("torch", "cannot be imported: broken install")
