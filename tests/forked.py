"""Programs in forks of the tests' own process: torch, which takes seconds to import, is there."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any

OURS = ("offload", "aio", "cpu_adam", "tests")


class Forked:
    """A fork that runs a program; what it writes is read from here, as of `subprocess.Popen`."""

    def __init__(self, program: Callable[[], object], **streams: Any) -> None:
        reading, writing = os.pipe()
        self.stdout = open(reading)  # noqa: SIM115
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.returncode: int | None = None
        with open(os.devnull) as nothing:
            files = (nothing.fileno(), writing, self._errors.fileno())
            self.pid = fork(program, files, **streams)
        os.close(writing)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self) -> tuple[str, str]:
        """Waits; the rest of its output, and all that it wrote to standard error."""
        try:
            with self.stdout, self._errors:
                output = self.stdout.read()
                self.returncode = wait(self.pid)
                self._errors.seek(0)
                return output, self._errors.read()
        finally:
            if self.returncode is None:
                self.send_signal(signal.SIGKILL)
                self.returncode = wait(self.pid)


def wait(pid: int) -> int:
    """The exit status of a child that ends."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fork(program: Callable[[], object], files: tuple[int, int, int], **streams: Any) -> int:
    """The process that runs a program, with these as its input, output and errors.

    It ends as the program returns or raises, without what an interpreter does at its end. Warnings
    are met as in the process that forks; its other threads are not there. Its output is written
    with these options of `open`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: forking with threads
        pid = os.fork()
    if pid:
        return pid
    status: Any = 1
    kept = sys.stdin, sys.stdout, sys.stderr  # In a fork of a fork their ends would close files.
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
        sys.stdin, sys.stdout = open(0), open(1, "w", **streams)  # noqa: SIM115
        escaped = {**streams, "errors": "backslashreplace"}
        sys.stderr = open(2, "w", buffering=1, **escaped)  # noqa: SIM115
        warnings.showwarning = lambda *told: print(
            warnings.formatwarning(*told[:4]), file=sys.stderr
        )
        gc.freeze()  # What others have left is none of its own.
        status = program()
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        assert kept
        os._exit(status or 0)


def anew(code: str, *arguments: object) -> None:
    """Runs code as a new interpreter would that has imported what is not ours, or not of Python.

    Memory that others have let go is the system's again.
    """
    gone = dict(sys.modules)  # They stay, as others' objects are of them.
    for name, module in gone.items():
        compiled = (getattr(module, "__file__", None) or "").endswith(".so")  # Once in a process.
        if name.split(".")[0] in OURS and not compiled:
            del sys.modules[name]
    with contextlib.suppress(AttributeError):  # Not of glibc.
        ctypes.CDLL(None).malloc_trim(0)
    sys.argv = ["-c", *map(str, arguments)]
    exec(code, {"__name__": "__main__"})
