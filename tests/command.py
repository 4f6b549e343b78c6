"""The command line, run in this process or in one of its own, and a short training for it."""

import subprocess
import sys
from functools import cache
from unittest import mock

from offload.cli import EXIT_BAD_INPUT, data, gpt, main

SHORT = ["train", "--steps", "3", "--batch", "2", "--seq-len", "32", "--eval-windows", "4"]
SHORT += ["--sample", "0"]


SMALL = gpt.Shape(width=128, depth=5)
LOAD = data.load


@cache
def library(length):
    return LOAD(None, length)


def load_once(path, length):
    """Text of the standard library takes as long to read as a short training."""
    return library(length) if path is None else LOAD(path, length)


def run(*arguments):
    """The exit status of the command line, in this process. Short trainings have a small model."""
    short = [*arguments[: len(SHORT)]] == SHORT
    with (
        mock.patch.dict(gpt.SIZES, {"10m": SMALL} if short else {}),
        mock.patch.object(data, "load", load_once if data.load is LOAD else data.load),
    ):
        try:
            return main(arguments)
        except SystemExit as stop:
            return stop.code


def assert_refused(told, expected, status):
    """A command ended with status 2 and one message of one line."""
    assert status == EXIT_BAD_INPUT
    shown = told.readouterr()
    assert expected in shown.err
    assert shown.err.startswith("offload: error: ")
    assert shown.err.count("\n") == 1
    assert not shown.out


def start(*arguments, **options):
    """The command line as a process of its own, in which warnings are errors.

    But for the one that an installation without compiled kernels gives.
    """
    command = [sys.executable, "-W", "error", "-W", "ignore:asked for the compiled update", "-c"]
    command += ["import sys; from offload.cli import main; sys.exit(main())", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
