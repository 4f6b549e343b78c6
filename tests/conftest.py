"""What all tests share."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
from collections.abc import Iterator

import pytest

with contextlib.suppress(ImportError):  # Where tests of CUDA run, hypothesis may be missing.
    import tests.examples  # noqa: F401

# Nothing of what is imported and collected is garbage: see below.
gc.disable()

# What was measured on this machine must not move what is tested.
os.environ["OFFLOAD_MACHINE"] = os.devnull

# Nor must runs of tests push out those that the user keeps.
_cache = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
os.environ["XDG_CACHE_HOME"] = _cache.name

# A shell lets what it runs in its background ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share ranks come first: who steals tests takes the last ones of another process,
    and these would be started a second time there."""
    items.sort(key=lambda item: "two" not in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """What is imported and collected stays: no collection of garbage ever goes through it.

    Whoever only hands tests out to other processes never comes here, nor does it import torch.
    """
    import torch

    # Small tensors on shared cores: threads that wait for one another cost more than they give.
    torch.set_num_threads(1)
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor does one go through what the tests of a file have imported: each attach collects."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(params=["native", "python"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """This runner serves; where the native one is not compiled, the reference does twice."""
    from offload.runtime.native import RUNNER_VARIABLE

    monkeypatch.setenv(RUNNER_VARIABLE, request.param)


@pytest.fixture
def leaks_nothing() -> Iterator[None]:
    """Neither a thread nor a file is left of a test."""
    from tests.faults import nothing_leaks

    with nothing_leaks():
        yield


_passed: set[int] = set()
"""Cases of the parity suite that have passed here, or in a process of this run."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _passed.update(case for name, case in report.user_properties if name == "parity")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table of the parity suite when all of it has passed."""
    if not _passed or hasattr(session.config, "workerinput"):
        return
    from tests.parity import cases
    from tests.parity_table import TABLE, render

    if len(_passed) == len(cases()):
        TABLE.write_text(render(cases()), encoding="utf-8")


@pytest.fixture
def one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a simulated drive one call is under way at once, so that a number says which."""
    monkeypatch.setattr("aio.backends.THREADS_MAX", 1)
