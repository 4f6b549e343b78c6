"""An installation without a C++ compiler: what is said of it, and that one that comes is used."""

import shutil
import subprocess
from pathlib import Path

import pytest

from cpu_adam import choice
from tests.command import SHORT, run
from tests.training import some_fast

ROOT = Path(__file__).parent.parent
SET_UP = ("pyproject.toml", "constraints.txt", "CMakeLists.txt", "Makefile")


@pytest.mark.parametrize(("without", "again"), [(True, True), (False, False)])
def test_make_sets_up_again_once_there_is_a_compiler(without, again, tmp_path):
    for name in SET_UP:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    if without:
        (tmp_path / ".venv/.no-compiler").touch()
    (tmp_path / ".venv/.ready").touch()
    dry = ["make", "-n", "train", "CXX=true"]
    made = subprocess.run(dry, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ("pip install" in made.stdout) == again
    none = [*dry[:3], "COMPILER="]
    made = subprocess.run(none, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "pip install" not in made.stdout


@pytest.mark.parametrize("compiler", some_fast([None, "/usr/bin/c++"]))
def test_a_run_says_so_in_a_note(compiler, monkeypatch, capsys):
    monkeypatch.setattr(choice, "_kernel", None)
    monkeypatch.setattr(choice, "_loaded", lambda: (None, "no module"))
    monkeypatch.setattr(choice, "compiler", lambda: compiler)
    monkeypatch.delenv(choice.KERNEL_VARIABLE, raising=False)
    assert run(*SHORT, "--steps=1") == 0
    told = capsys.readouterr().err
    (line,) = [line for line in told.splitlines() if "compiled update" in line]
    assert line.startswith("note: asked for the compiled update of cpu_adam; found only its Python")
    assert "-m pip install -v -e . in a checkout" in line
    assert ("install g++" in line) == (compiler is None)
