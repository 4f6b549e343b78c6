"""The engine without Python, with faults put into its queue: tests/src/engine_test.cpp, built here.

`make sanitize` runs the same under the sanitizers.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="no compiler, or no Linux")
def test_every_kind_of_queue(tmp_path):
    sources = [path for path in (ROOT / "aio/src").glob("*.cpp") if path.name != "module.cpp"]
    sources.append(ROOT / "tests/src/engine_test.cpp")
    flags = ["-std=c++20", "-O1", "-pthread", *(f"-I{ROOT / n}" for n in ("aio/src", "tests/src"))]
    program = tmp_path / "engine_test"
    subprocess.run([str(COMPILER), *flags, *map(str, sources), "-o", str(program)], check=True)
    run = [str(program), str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "threads" in done.stdout
