"""Helpers for tests of every backend of files: those that work here, opened and closed."""

import contextlib
import os
import subprocess
import sys

import pytest

import aio
from tests.faults import aligned, scratch

USABLE = [found.name for found in aio.probe() if found.usable]
ENGINE = [name for name in USABLE if name in ("io_uring", "linux_aio", "threads")]


def few(names):
    """The first, and in the slow tier the rest: where each takes a process of its own."""
    return [*names[:1], *(pytest.param(name, marks=pytest.mark.slow) for name in names[1:])]


@contextlib.contextmanager
def opened(name, **limits):
    with contextlib.closing(aio.open_backend(name, **limits)) as backend:
        assert backend.name == name
        yield backend


@contextlib.contextmanager
def busy(name):
    """A backend and its file, and tickets that take it more than a second, one after the other."""
    size = 1 << 20
    with (
        opened(name, depth=1, piece_bytes=4096) as backend,
        scratch(backend, size, "/dev/shm") as file,
    ):
        memory = aligned(size)
        yield backend, file, [file.write_from(memory, 0) for _ in range(512)]


def interpreter(code, *arguments, **variables):
    """What a new interpreter prints, which ends well and says nothing else."""
    (printed,) = interpreters([(code, *arguments)], **variables)
    return printed


def interpreters(programs, **variables):
    """What each of several prints, as above, that run beside one another: most of them wait."""
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", *map(str, program)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        for program in programs
    ]
    try:
        done = [one.communicate(timeout=100) for one in started]
    finally:
        for one in started:
            with one:
                one.kill()  # Nothing, where it has ended.
    for program, one, (_, said) in zip(programs, started, done):
        assert (one.returncode, said) == (0, ""), (program[1:], said[-3000:])
    return [printed for printed, _ in done]
