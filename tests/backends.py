"""Helpers for tests of every backend of files: those that work here, opened and closed."""

import contextlib

import pytest

import aio
from tests.faults import scratch

USABLE = [found.name for found in aio.probe() if found.usable]
ENGINE = [name for name in USABLE if name in ("io_uring", "linux_aio", "threads")]

if ENGINE:
    from aio.native import Native


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
def file_on(backend, size, directory):
    """A scratch file of a backend; both are closed at the end."""
    with contextlib.closing(backend), scratch(backend, size, directory) as file:
        yield file
