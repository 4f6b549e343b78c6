"""`offload doctor`: each finding on trees of files that are laid out, and the command as it is."""

import io
import json

import pytest
import torch

from aio import Probe
from offload.cli import doctor, findings
from offload.cli.console import Output
from offload.cli.doctor import show
from offload.cli.findings import Finding
from offload.planning import machine
from tests.command import run, start
from tests.profiles import SPEED

GIB = 1 << 30


def check(finding, level, told, fix=""):
    assert finding.level == level, finding
    assert bool(finding.fix) == (level != "ok"), finding
    assert "\n" not in finding.found + finding.fix, finding
    assert told in finding.found, finding
    assert fix in finding.fix, finding


def test_ready_unless_something_stops():
    ok, note = Finding("a", "ok", "b"), Finding("a", "note", "b", "c")
    assert findings.ready([ok, note])
    assert not findings.ready([ok, Finding("a", "stop", "b", "c")])


def test_torch():
    check(findings.torch("2.13.0+cu128"), "ok", "2.13.0+cu128")
    check(findings.torch("2.9.1"), "stop", "2.9.1 is too old", "pip install 'torch>=2.11'")
    check(findings.torch(None, "No module named 'torch'"), "stop", "No module", "pip install")


def test_accelerator(tmp_path):
    def found(name="", built=None, error="", **environment):
        return findings.accelerator(name, built, error, tmp_path, environment)

    check(found(), "ok", "none: the CPU is the compute device")
    check(found(built="CUDA 12.8"), "ok", "none")
    check(found("H100, 4.00 GiB free", "CUDA 12.8"), "ok", "H100, 4.00 GiB free (torch built")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    check(found(), "note", "an NVIDIA GPU here, but torch was built for the CPU", "for CUDA")
    broken = ("", "CUDA 12.8", "driver too old")
    check(found(*broken), "note", "cannot use it: driver too old", "nvidia-smi")
    for hidden in ("", "-1"):
        check(found(*broken, CUDA_VISIBLE_DEVICES=hidden), "note", "hides it", "unset CUDA")
    check(found(*broken, CUDA_VISIBLE_DEVICES="10"), "note", "cannot use it")


def test_kernels():
    check(findings.kernels("avx2", "the best that this processor can run"), "ok", "avx2")
    check(findings.kernels("python", "asked for"), "ok", "python")
    missing = findings.kernels("python", "no compiled kernels: no _kernels")
    check(missing, "note", "Python reference", "install g++, then run make")


def probes(**reasons):
    names = ("io_uring", "linux_aio", "threads", "libaio", "python")
    return [Probe(name, name not in reasons, reasons.get(name, "works here")) for name in names]


def test_file_backends():
    def found(asked=None, **reasons):
        environment = {"AIO_BACKEND": asked} if asked else {}
        return findings.file_backends(probes(**reasons), environment)

    check(found(), "ok", "io_uring: the best there is")
    check(found("threads"), "ok", "threads: AIO_BACKEND asks for it")
    off = found(io_uring="it is switched off")
    check(off, "note", "linux_aio, which costs a little more", "io_uring_disabled=0")
    assert "io_uring (it is switched off)" in off.found
    why = "the engine was not compiled when this was installed (No module)"
    built = found(io_uring=why, linux_aio=why, threads=why)
    check(built, "note", "libaio, which costs much more", "g++")
    check(found("io_uring", io_uring="no"), "stop", "AIO_BACKEND=io_uring: no", "unset AIO_BACKEND")
    check(found("uring"), "stop", "there is none of that name", "unset AIO_BACKEND")


def test_memory():
    check(findings.memory(16 * GIB, 32 * GIB), "ok", "16.00 GiB free of 32.00 GiB")
    check(findings.memory(4 * GIB, 32 * GIB, 2), "ok", "shared by 2 ranks")
    check(findings.memory(4 * GIB, 32 * GIB, 9), "stop", "too little to train", "container's")


def test_processors():
    check(findings.processors(8, 8, None), "ok", "8")
    check(findings.processors(2, 8, 2.0), "ok", "2 of 8")
    check(findings.processors(8, 8, 1.5), "note", "the time of 1.5", "CPU limit")
    check(findings.processors(1, 8, None), "note", "take turns on one", "taskset")
    check(findings.processors(1, 1, None), "ok", "1")


def test_threads_of_openmp():
    def found(count, **ranks):
        return findings.threads({"OMP_NUM_THREADS": count} if count else {}, 8, **ranks)

    check(found("1"), "note", "OMP_NUM_THREADS=1 of 8 cores", "OMP_NUM_THREADS=8")
    check(found("16"), "note", "OMP_NUM_THREADS=16 on 8 cores")
    for fine in (found(""), found("8"), found("1", ranks=8)):
        check(fine, "ok", "nothing")


def directory(asked=True, **seen):
    good = {"kind": "xfs", "free_bytes": 9 * GIB, "mount": "/"}
    good |= {"direct": True, "copies": False}
    return findings.directory("/mnt", **good | seen, asked=asked)


def test_directories():
    check(directory(), "ok", "xfs at /, O_DIRECT, 9.00 GiB free")
    assert directory().subject == "nvme /mnt"
    check(directory(kind="btrfs", copies=True), "note", "copies on write", "ext4 or xfs")
    check(directory(kind="tmpfs", direct=False), "note", "this is memory and no drive")
    check(directory(kind="nfs4"), "note", "a network")
    check(directory(free_bytes=GIB // 2), "note", "too little room")
    check(directory(free_bytes=3 << 20), "stop", "least that offload train")
    check(directory(free_bytes=5, asked=False), "note", "too little room")
    check(directory(direct=False), "note", "page cache")
    check(findings.unusable("/mnt", "refused; try this", True), "stop", "refused", "try this")
    check(findings.unusable("/mnt", "refused", True), "stop", "refused", "give a directory")
    check(findings.unusable("/mnt", "no", False), "note", "no", "give a directory")


TOLD = "/a reads 5.12 GB/s and writes 3, measured 2026-11-21 12:00:00"


def test_speeds_of_drives():
    check(findings.speeds({}), "ok", "none yet")
    check(findings.speeds({"/a": SPEED}), "ok", TOLD)
    check(findings.speeds({}, "it is torn"), "note", "it is torn", "remove that file")


def test_a_line_each_where_there_is_no_terminal():
    out = io.StringIO()
    console = Output(file=out, width=20)
    show(console, Finding("torch", "ok", "2.13 " * 9))
    show(console, Finding("a [b]", "note", "slow", "faster"))
    assert out.getvalue() == f"ok   torch: {'2.13 ' * 9}\nnote a [b]: slow. Fix: faster\n"


def test_the_command(tmp_path, capsys):
    assert run("doctor", str(tmp_path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ready"] is True
    seen = {finding["subject"]: finding for finding in found["findings"]}
    expected = {"Python", "torch", "accelerator", "update", "file I/O", "memory", "processors"}
    assert expected | {"OpenMP", f"nvme {tmp_path}", "a step", "speeds"} <= set(seen)
    assert "nvme" in seen["a step"]["found"]
    assert not list(tmp_path.iterdir())


def test_a_drive_that_is_full_is_told_without_the_table_of_budgets(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "nvme_free_bytes", lambda *_, **__: 0)
    found = doctor._trained(torch, [str(tmp_path)])
    assert (found.level, found.subject) == ("stop", "a step")
    assert found.found.endswith(f"; likely nothing is free on --nvme-path {tmp_path}")
    monkeypatch.setattr(machine, "nvme_free_bytes", lambda *_, **__: 1 / 0)
    found = doctor._trained(torch, [str(tmp_path)])
    assert found.found == "division by zero"
    assert "OFFLOAD_TRACEBACK=1" in found.fix


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
