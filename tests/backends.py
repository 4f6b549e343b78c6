"""Helpers for tests of every backend of files: those that work here, opened and closed."""

import contextlib
import errno
import os
import subprocess
import sys

import pytest

import aio
from tests.faults import aligned, scratch

USABLE = [found.name for found in aio.probe() if found.usable]
ENGINE = [name for name in USABLE if name in ("io_uring", "linux_aio", "threads")]

if ENGINE:
    from aio.native import Faults, Native


def few(names):
    """The first, and in the slow tier the rest: where each takes a process of its own."""
    return [*names[:1], *(pytest.param(name, marks=pytest.mark.slow) for name in names[1:])]


@contextlib.contextmanager
def opened(name, **limits):
    with contextlib.closing(aio.open_backend(name, **limits)) as backend:
        assert backend.name == name
        yield backend


@contextlib.contextmanager
def engine(name, faults=None, **limits):
    with contextlib.closing(Native(name, faults=faults, **limits)) as backend:
        yield backend


@contextlib.contextmanager
def refusing(name, blocks, directory):
    """A backend and its file whose every piece is refused, 65 ms long, then fails; and the tickets
    of so many writes, one block each, one after the other."""
    faults = Faults(errors=dict.fromkeys(range(1, 10000), errno.EAGAIN))
    size = aio.ALIGN_BYTES
    with (
        engine(name, faults, depth=1, piece_bytes=size) as backend,
        scratch(backend, blocks * size, directory) as file,
    ):
        yield backend, file, [file.write_from(aligned(size), n * size) for n in range(blocks)]


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


@contextlib.contextmanager
def file_on(backend, size, directory):
    """A scratch file of a backend; both are closed at the end."""
    with contextlib.closing(backend), scratch(backend, size, directory) as file:
        yield file
