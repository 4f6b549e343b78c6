"""The update's threads and the choice of its kernel: forks, callers, environment, machine files."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import cpu_adam
from cpu_adam import choice, native, processors, reference
from tests.adam_states import State, assert_same_state, hyper
from tests.forked import Forked, anew
from tests.test_adam_native import COMPILED, PIECE, needs_kernels


def updated(state: State, steps: int = 1) -> State:
    for step in range(1, steps + 1):
        state.update(native, hyper(), step=step)
    return state


@needs_kernels
def test_the_kernels_are_those_of_this_processor() -> None:
    told = Path("/proc/cpuinfo").read_text() if platform.machine() == "x86_64" else ""
    flags = set(re.findall(r"\b(?:avx2|f16c|avx512\w+)\b", told))
    avx2 = {"avx2", "f16c"} <= flags
    avx512 = avx2 and {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags
    neon = platform.machine() == "aarch64"
    here = {"avx512": avx512, "avx2": avx2, "neon": neon, "portable": True}
    assert [name for name, runs in here.items() if runs] == COMPILED


class Found(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def python(code: str, **environment: str) -> str:
    """Standard output of a new interpreter, with warnings shown."""
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stdout


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    """What came of every one of `CODE`, by its name."""

    def run(environment: dict[str, str], code: str) -> None:
        warnings.simplefilter("always")
        os.environ.update(environment)
        anew(code)

    found = {}
    for name, given in CODE.items():
        child = Forked(partial(run, *given))
        told = child.communicate()
        assert child.returncode is not None
        found[name] = Found(child.returncode, *told)
    return found


@needs_kernels
def test_flushing_callers_get_the_same_bits_and_their_state_back() -> None:
    state = State("fp32", 3 * PIECE, torch.float32)
    want = state.clone()
    want.update(reference, hyper(), step=1)
    assert torch.set_flush_denormal(True)
    try:
        updated(state)
        assert (torch.full((64,), 1e-40) * torch.ones(64)).abs().max() == 0
    finally:
        torch.set_flush_denormal(False)
    assert_same_state(state, want)


@needs_kernels
def test_callers_at_once() -> None:
    cpu_adam.set_threads(3)
    states = [State("exact", 5 * PIECE + k, torch.bfloat16, seed=k) for k in range(4)]
    wants = [updated(state.clone(), 10) for state in states]
    callers = [threading.Thread(target=updated, args=(state, 10)) for state in states]
    for caller in callers:
        caller.start()
    for count in (1, 4, 2):  # while they run
        cpu_adam.set_threads(count)
    for caller in callers:
        caller.join(60)
    cpu_adam.set_threads(None)
    for state, want in zip(states, wants):
        assert_same_state(state, want)


FORKED = f"""
import os, torch
import cpu_adam
from cpu_adam import native
from tests.adam_states import State, hyper, assert_same_state
torch.set_num_threads(1)  # torch's own threads do not survive a fork
cpu_adam.set_threads(3)
def go():
    state = State("exact", 4 * {PIECE}, torch.bfloat16)
    state.update(native, hyper(), step=1)
    return cpu_adam.threads()
assert go() == 3
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if go() == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    go()
"""

CHOSEN = "import cpu_adam; found = cpu_adam.kernel(); print(found.name, '|', found.reason)"

USE = """
import torch, cpu_adam
x = torch.ones(10)
cpu_adam.accumulate(x, x)
cpu_adam.accumulate(x, x)
assert x.tolist() == [4.0] * 10
print(cpu_adam.kernel().name, cpu_adam.threads())
"""

HIDDEN = "import sys; sys.modules['cpu_adam._kernels'] = None\n"

EIGHT_CORES = """
from cpu_adam import processors
processors._affinity = lambda: range(10_000, 10_008)
processors.processor_quota = lambda root: None
"""

CODE: dict[str, tuple[dict[str, str], str]] = {
    "forked": ({}, FORKED),
    "five": ({"CPU_ADAM_THREADS": "5", "LOCAL_WORLD_SIZE": "4"}, EIGHT_CORES + USE),
    "two of eight": ({"CPU_ADAM_THREADS": "", "LOCAL_WORLD_SIZE": "4"}, EIGHT_CORES + USE),
    **{name: ({"CPU_ADAM_KERNEL": name}, CHOSEN) for name in COMPILED},
    "python": ({"CPU_ADAM_KERNEL": "python"}, USE),
    "hidden": ({"CPU_ADAM_KERNEL": ""}, HIDDEN + USE),
    "hidden and asked for": ({"CPU_ADAM_KERNEL": "portable"}, HIDDEN + USE),
    "unknown": ({"CPU_ADAM_KERNEL": "sse9"}, USE),
}
"""By name, an environment and what is run in it."""


@needs_kernels
def test_a_forked_child_has_one_thread(found: dict[str, Found]) -> None:
    assert found["forked"].returncode == 0, found["forked"].stderr


@needs_kernels
def test_the_ranks_of_a_host_divide_its_cores(found: dict[str, Found]) -> None:
    assert found["two of eight"].stdout.split()[1:] == ["2"], found["two of eight"].stderr
    assert found["five"].stdout.split()[1:] == ["5"], found["five"].stderr


@needs_kernels
@pytest.mark.parametrize("name", COMPILED)
def test_the_environment_chooses_the_kernel(name: str, found: dict[str, Found]) -> None:
    assert found[name] == (0, f"{name} | asked for\n", "")


def test_the_reference_serves_when_asked_without_a_warning(found: dict[str, Found]) -> None:
    assert found["python"] == (0, "python 1\n", "")


def test_the_reference_serves_with_one_warning_where_nothing_is_compiled(
    found: dict[str, Found],
) -> None:
    hidden = found["hidden"]
    assert (hidden.returncode, hidden.stdout) == (0, "python 1\n"), hidden.stderr
    assert hidden.stderr.count("RuntimeWarning") == 1
    for part in ("asked for", "found", "likely cause", "try:"):
        assert part in hidden.stderr
    forced = found["hidden and asked for"]
    assert "asked for the portable kernel" in forced.stderr
    assert forced.returncode != 0


def test_the_warning_tells_a_failed_build_from_a_missing_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_loaded", lambda: (None, "hidden"))

    def warned(cxx: str, path: str) -> str:
        monkeypatch.setenv("CXX", cxx)
        monkeypatch.setenv("PATH", path)
        with pytest.warns(RuntimeWarning) as found:
            assert choice._chosen(None).name == "python"
        return str(found[0].message)

    assert "likely cause: no C++ compiler when it was installed; try" in warned("", str(tmp_path))
    compiler = tmp_path / "clang++"
    compiler.touch(mode=0o755)
    for there in (("", str(tmp_path)), (f"{compiler} -O1", "")):
        told = warned(*there)
        assert (
            f"no C++ compiler when it was installed ({compiler} is here now), or it failed" in told
        )


def test_kernels_are_built_where_there_is_a_compiler() -> None:
    if os.environ.get(choice.KERNEL_VARIABLE) == "python" or choice.compiler() is None:
        pytest.skip("no kernel is asked for, or no compiler is here")
    assert COMPILED, (
        f"{choice.compiler()} is on the PATH, but the kernels of cpu_adam are not built: run "
        f"`pip install -v -e .` and read the errors of the compiler"
    )


def test_a_kernel_that_does_not_exist_is_refused(found: dict[str, Found]) -> None:
    assert "ValueError: asked for the sse9 kernel by CPU_ADAM_KERNEL" in found["unknown"].stderr


def test_thread_counts_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="found 0"):
        cpu_adam.set_threads(0)
    monkeypatch.setenv(processors.THREADS_VARIABLE, "many")
    with pytest.raises(ValueError, match="CPU_ADAM_THREADS"):
        processors.default_threads()


def lay(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_threads_are_one_per_core_within_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (processors.THREADS_VARIABLE, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(processors, "_affinity", lambda: tuple(range(2, 16)))
    cpu = "sys/devices/system/cpu"
    for k in range(16):  # 8 cores on 2 packages; k and k + 8 share a core
        lay(tmp_path, {f"{cpu}/cpu{k}/topology/thread_siblings_list": f"{k % 8},{k % 8 + 8}\n"})
    assert processors.default_threads(tmp_path) == 8
    assert processors.default_threads(tmp_path, launching=True) == 6
    lay(tmp_path, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "250000 100000"})
    assert processors.default_threads(tmp_path) == 3
    assert processors.default_threads(tmp_path, launching=True) == 3
    lay(tmp_path, {"sys/fs/cgroup/a/b/cpu.max": "150000 100000"})
    assert processors.default_threads(tmp_path) == 2
    assert processors.processor_quota(tmp_path) == 1.5
    lay(tmp_path, {"sys/fs/cgroup/a/b/cpu.max": "max 100000"})
    assert processors.default_threads(tmp_path) == 3
    (tmp_path / "proc/self/cgroup").unlink()
    for ranks, share in {"2": 4, "3": 2, "8": 1, "16": 1, "0": 8, "many": 8}.items():
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert processors.default_threads(tmp_path) == share
    monkeypatch.setenv(processors.THREADS_VARIABLE, "7")
    assert processors.default_threads(tmp_path) == 7


def test_strided_tensors_and_versions() -> None:
    into, gradient = torch.zeros(10, 2)[:, 0], torch.ones(10)
    native.accumulate(into, gradient)
    assert into.tolist() == [1.0] * 10
    total = torch.zeros(10)
    native.accumulate(total, gradient)
    assert total._version == 1
    with torch.inference_mode():
        native.accumulate(torch.zeros(10), torch.ones(10))
    assert choice.kernel().reason


@pytest.mark.slow
@pytest.mark.skipif(not COMPILED, reason="no kernel here")
def test_daemon_threads_at_exit():
    """Threads in the midst of native calls, at whatever point, when the interpreter ends.

    Without operations of torch, which end such a process by an abort of their own (torch 2.13).
    """
    code = (
        "import threading, time, numpy\n"
        "from cpu_adam import _kernels\n"
        "data = numpy.zeros(1 << 20, numpy.uint8)\n"
        "def work():\n"
        "    while True:\n"
        "        _kernels.crc32c(0, data, 0)\n"
        "        begun.set()\n"
        "begun = threading.Event()\n"
        "for _ in range(3): threading.Thread(target=work, daemon=True).start()\n"
        "begun.wait()\n"
        "time.sleep(0.05)\n"
    )
    for _ in range(8):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
