"""The command line as a process: how it begins, Ctrl-C at any time, output that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.training import some_fast

SHORT = ["train", "--steps", "2", "--batch", "1", "--seq-len", "16", "--eval-windows", "2"]

TOLD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
set_handler = signal.signal
def told(*handler):
    before = set_handler(*handler)
    print("up", flush=True)
    return before
signal.signal = told
from offload.__main__ import main
sys.exit(main())
"""
"""The command line, saying when it has begun: what the interpreter does before is not ours."""


def python(code: str) -> str:
    """Standard output of a fresh interpreter."""
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def command_line(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "offload", *arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.run(command, timeout=100, **options)


def test_nothing_heavy_is_imported_before_a_command_is_known() -> None:
    light = "import sys, offload.__main__, offload.cli; print(*sys.modules)"
    loaded = python(light).split()
    assert not {"torch", "numpy", "tyro", "rich", "importlib.metadata"} & set(loaded)
    entry = python(
        "import sys; a = set(sys.modules); import offload.__main__\nprint(*(set(sys.modules) - a))"
    ).split()
    assert len(entry) < 40, entry  # The handler is set in a few milliseconds.


LOOP = """
import torch, offload
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
config = offload.Config(params="cpu", gradients="cpu", optimizer="cpu")
model, optimizer = offload.attach(model, optimizer, config)
for _ in range(2):
    loss = model(torch.ones(2, 8)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_that_closes_nothing_ends_without_a_word() -> None:
    done = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


NAMES = """
import types, offload
assert isinstance(offload.attach, types.FunctionType)
from offload.attachment import engine_of
assert offload.engine_of is engine_of
for name in offload.__all__:
    assert callable(getattr(offload, name)), name
assert dir(offload) == sorted(offload.__all__)
assert not hasattr(offload, "nonsense")
"""


@pytest.mark.slow
def test_the_public_names_are_the_same_however_they_are_loaded() -> None:
    again = """
import sys
assert "torch" in sys.modules
for name in [name for name in sys.modules if name.partition(".")[0] == "offload"]:
    del sys.modules[name]
del offload
"""
    python("import sys\nassert 'torch' not in sys.modules\n" + NAMES + again + NAMES)


@pytest.mark.parametrize(
    "delays",
    # Two at a time: at the later delays a slow machine imports still, a fast one trains.
    [(0.0, 0.5), *(pytest.param(d, marks=pytest.mark.slow) for d in [(0.05, 0.2), (1, 2), (3,)])],
)
def test_ctrl_c_at_any_time_is_quiet(delays: tuple[float, ...]) -> None:
    command = [sys.executable, "-W", "error", "-c", TOLD, *SHORT, "--steps", "100000"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running: list[Any] = [subprocess.Popen(command, text=True, **pipes) for _ in delays]
    for process in running:
        assert process.stdout.readline() == "up\n"
    begun = time.monotonic()
    for delay, process in zip(delays, running):
        time.sleep(max(0.0, begun + delay - time.monotonic()))
        process.send_signal(signal.SIGINT)
    for delay, process in zip(delays, running):
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGINT, (delay, errors)
        assert "Traceback" not in errors, delay
        assert "stopped by Ctrl-C" in errors, delay


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", some_fast(["--version", "--help", "train --help"], fast=2))
def test_output_that_cannot_be_written_is_told(arguments: str, unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = command_line(
            *arguments.split(), stdout=full, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}
        )
    assert done.returncode == 1
    assert done.stderr.startswith("offload: error: ")
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_gone_before_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = command_line("--help", stdout=writing)
    finally:
        os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE
    assert not done.stderr


def test_a_closed_stream_is_as_good_as_none() -> None:
    for closed in (">&-", "2>&-"):
        line = f'"{sys.executable}" -m offload nosuch {closed}'
        done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")


LEFT_OPEN = """
import torch, offload
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
config = offload.Config(params="nvme", gradients="nvme", optimizer="nvme", nvme_path=PATH)
model, optimizer = offload.attach(model, torch.optim.AdamW(model.parameters()), config)
for _ in range(3):
    model(torch.ones(2, 512)).sum().backward()
    optimizer.step()
print("end", flush=True)
"""


@pytest.mark.slow
def test_an_engine_that_is_left_open_ends_with_its_process(tmp_path: Path) -> None:
    """Reads ahead are under way then, and torch has finalizers registered before the extensions."""
    assert python(LEFT_OPEN.replace("PATH", repr(str(tmp_path)))) == "end\n"
    assert not list(tmp_path.iterdir())
