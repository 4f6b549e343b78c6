"""Real processes on drives that are full, read-only, broken or out of quota from some call on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
SOURCE = ROOT / "tests/src/failing_writes.cpp"

EVERY = {"nvme, resumed": 7, "resident, resumed": 7, "one drive of two": 2, "nvme": 7}
EVERY |= {"cpu": 7, "save": 5, "convert": 3, "export": 3}
"""By run, how many calls there are from one that fails to the next one."""

BEGIN = "import gc; gc.disable(); from tests.failing_writes import main; main()"
"""What is imported is no garbage."""

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc and LD_PRELOAD"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is preloaded, compiled."""
    made = tmp_path_factory.mktemp("library") / "failing_writes.so"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command = [str(COMPILER), *flags, str(SOURCE), "-o", str(made), "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    return made


def sweep(library: Path, run: str, every: int, path: Path, backend: str) -> list[str]:
    """What was told of each call of a run that failed."""
    program = [sys.executable, "-c", BEGIN, run, "1", str(every), str(path)]
    variables = {"LD_PRELOAD": str(library), "AIO_BACKEND": backend, "TQDM_DISABLE": "1"}
    environment = {**os.environ, **variables, "HF_HUB_OFFLINE": "1", "OFFLOAD_MACHINE": os.devnull}
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_a_run_goes_on_from_its_commit_after_a_call_has_failed(
    library: Path, tmp_path: Path
) -> None:
    assert len(sweep(library, "nvme, resumed", 200, tmp_path, "threads")) > 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["threads", "python"])
@pytest.mark.parametrize("run", EVERY)
def test_whatever_call_fails_what_was_there_is_there(
    run: str, backend: str, library: Path, tmp_path: Path
) -> None:
    if run == "export":
        pytest.importorskip("transformers")
    assert len(sweep(library, run, EVERY[run], tmp_path, backend)) > 2
