"""Take the waits out of the engine one by one and see whether the tests on the stand-in notice.

    python -m tests.waits [NAME ...]        all of them, or those whose name contains one of these

Each is a change of one place in a source file; the tests run in a process of their own, in which
that file is another, up to the first that fails. A line says which, and what it found. Limits count
processor time and looks at the process, so it may be stopped meanwhile.

The waits are those of `wait_sites`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.stand_in import library
from tests.wait_sites import WAITS, Wait

ROOT = Path(__file__).resolve().parents[1]
PROCESSOR_SECONDS_MAX = 400.0
IDLE_LOOKS_MAX = 30
"""So many looks a second apart at a process that could run and does nothing: it hangs."""

IDLE_SECONDS = 0.05
"""Processor time between two looks; a blocked wait wakes up ten times in a second."""

USUAL = ("test_paced", "test_stand_in")  # The quicker one first.
SEEDS = 30

UNNOTICED = ("SURVIVES", "STALE", "DOES NOT", "RUNS")
"""How verdicts begin that show no test which misses the wait."""

COMPILED = ("g++", "-std=c++20", "-O1", "-pthread", "-Wno-missing-field-initializers")

_RUN = """
import sys, pytest
from importlib import import_module
module, path = sys.argv[1:3]
for finder in sys.meta_path:
    known = getattr(finder, "known_source_files", None)
    if known is not None:
        known[module] = path
        break
else:
    sys.exit(99)  # It is not installed editable.
sys.exit(pytest.main(["-x", "-q", "-rfE", "--tb=line", "--timeout=0", "-p", "no:cacheprovider",
                      "-m", "slow or not slow", "-k", "not many", *sys.argv[3:]]))
"""

_FAILED = re.compile(r"^(?:FAILED|ERROR) tests/(\S+)\.py::(.+?)(?: - (.*))?$", re.MULTILINE)


def source_of(wait: Wait) -> tuple[str, str]:
    """The file of a wait, a native one with its suffix, and its text."""
    where = wait.file if wait.file.startswith("aio/") else f"offload/{wait.file}"
    path = where if where.endswith((".cpp", ".h")) else f"{where}.py"
    return where, (ROOT / path).read_text(encoding="utf-8")


def verdict(wait: Wait) -> str:
    """What the tests say of the engine without `wait`."""
    where, source = source_of(wait)
    native = where.endswith((".cpp", ".h"))
    if source.count(wait.present) != 1:
        return f"STALE: its text is there {source.count(wait.present)} times"
    if native:
        return _verdict_of_native(where, source.replace(wait.present, wait.absent))
    tests = [f"tests/{name}.py" for name in (*wait.tests, *USUAL)]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "changed.py"
        path.write_text(source.replace(wait.present, wait.absent), encoding="utf-8")
        module = where.replace("/", ".")
        with (Path(directory) / "told").open("w+", encoding="utf-8") as told:
            ran = subprocess.Popen(
                [sys.executable, "-c", _RUN, module, str(path), *tests],
                cwd=ROOT,
                stdout=told,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300"},
            )
            gone = _watch(ran)
            told.seek(0)
            output = told.read()
    if gone is not None:
        return gone
    if ran.returncode == 0:
        return "SURVIVES"
    if ran.returncode < 0:
        return f"ends by signal {-ran.returncode} |"
    found = _FAILED.search(output)
    if ran.returncode != pytest.ExitCode.TESTS_FAILED or found is None:
        return f"DOES NOT RUN: {output.strip().splitlines()[-1:]}"
    return f"{found[1]}, {found[2]} | {(found[3] or 'fails')[:80]}"


def _verdict_of_native(where: str, source: str) -> str:
    """What the program of `make sanitize` says of a changed file."""
    for sanitizer in ((), ("-fsanitize=thread", "-g")):
        with tempfile.TemporaryDirectory() as directory:
            for folder in ("offload/runtime/src", "aio/src", "cpu_adam/src", "tests/src"):
                shutil.copytree(ROOT / folder, Path(directory) / folder)
            (Path(directory) / where).write_text(source, encoding="utf-8")
            sources = [
                str(path)
                for folder in ("offload/runtime/src", "aio/src")
                for path in sorted((Path(directory) / folder).glob("*.cpp"))
                if path.name != "module.cpp"
            ]
            program = f"{directory}/runner_test"
            include = f"-I{directory}/offload/runtime/src"
            made = [
                *COMPILED,
                *sanitizer,
                include,
                *sources,
                f"{directory}/tests/src/runner_test.cpp",
            ]
            subprocess.run([*made, "-o", program, "-ldl"], check=True, timeout=600)
            try:
                ran = subprocess.run(
                    ["setarch", "-R", program, str(library()), str(SEEDS)],
                    capture_output=True,
                    text=True,
                    timeout=PROCESSOR_SECONDS_MAX,
                )
            except subprocess.TimeoutExpired:
                return "hangs |"
        if ran.returncode != 0:
            told = (ran.stderr.strip().splitlines() or [f"ends by signal {-ran.returncode}"])[0]
            return f"runner_test{', threads' if sanitizer else ''} | {told[:80]}"
    return "SURVIVES"


def _watch(ran: subprocess.Popen[bytes]) -> str | None:
    """Wait for the end of a process; what was wrong where it was ended here."""
    process, before, idle = psutil.Process(ran.pid), 0.0, 0
    while ran.poll() is None:
        time.sleep(1.0)
        try:
            times, stopped = process.cpu_times(), process.status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            continue
        used = times.user + times.system
        if not stopped:
            idle = idle + 1 if used - before < IDLE_SECONDS else 0
        before = used
        if used > PROCESSOR_SECONDS_MAX or idle > IDLE_LOOKS_MAX:
            ran.kill()
            ran.wait()
            return (
                "hangs |" if idle > IDLE_LOOKS_MAX else f"RUNS for {used:.0f} s, and nothing failed"
            )
    return None


def main(names: list[str]) -> int:
    """One line for each wait; 1 where a wait can go unnoticed."""
    chosen = [one for one in WAITS if not names or any(name in one.name for name in names)]
    left = 0
    for wait in chosen:
        found = verdict(wait)
        left += found.startswith(UNNOTICED)
        print(f"{wait.file} | {wait.name} | {found}", flush=True)
    print(f"{len(chosen)} waits, {left} of them not missed")
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
