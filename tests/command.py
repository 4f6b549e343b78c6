"""The command line, run in this process or in one of its own, and a short training for it."""

import subprocess
import sys

from offload.cli import main

SHORT = ["train", "--steps", "3", "--batch", "2", "--seq-len", "32", "--eval-windows", "4"]
SHORT += ["--sample", "0", "--no-trace"]


def run(*arguments):
    """The exit status of the command line, in this process."""
    try:
        return main(arguments)
    except SystemExit as stop:
        return stop.code


def start(*arguments, **options):
    """The command line as a process of its own, in which warnings are errors.

    But for the one that an installation without compiled kernels gives.
    """
    command = [sys.executable, "-W", "error", "-W", "ignore:asked for the compiled update", "-c"]
    command += ["import sys; from offload.cli import main; sys.exit(main())", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
