"""The command line. Each command is one module with `command(arguments)`, named in `COMMANDS`.

What a user can cause is `BadInput`, with nothing begun or written; a signal is `Stopped`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

COMMANDS = {
    "train": "train a small GPT on real text, its state in any tier",
    "plan": "what would live where on machines not at hand, and how long a step is",
    "bench": "measure what this machine gives: adam, nvme",
    "doctor": "what this machine has and what is missing, one fix per line",
    "report": "where the time of a run went, and what would help most",
    "convert": "durable runs, DeepSpeed and Hugging Face to saves, saves to weights",
    "inspect": "what is in a save, and whether all of it is whole",
}
"""What each command does, for the help; the module of the same name holds it."""

BENCHMARKS = {
    "adam": "the update against this machine's memory and torch",
    "nvme": "drives: how fast they read and write, and whether that is enough",
}
"""What each benchmark measures; it is the module `bench_` and its name."""

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_SIGNAL = 128
"""Plus the signal's number, as shells have it."""


class BadInput(Exception):
    """The user asked for what cannot be; the message says what, and what to try."""


class Stopped(BaseException):
    """The user ended the run, by Ctrl-C or SIGTERM."""

    def __init__(self, number: int, where: str = "") -> None:
        super().__init__(number)
        self.number = number
        self.where = where
        """How far the run had come, for the message."""

    @property
    def by(self) -> str:
        """The signal, as its sender knows it."""
        return "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number).name


class Signals:
    """While entered, SIGINT and SIGTERM raise `Stopped`, but never in the middle of a held step.

    There the first is kept until the step is over, so that what is stopped is a whole step; a
    second one does not wait. Twice within one call of the engine is a KeyboardInterrupt there: it
    leaves as `Stopped`, too.
    """

    def __init__(self) -> None:
        self.where = "before the first step"
        """How far the run has come, for the message."""
        self.hurried = False
        """Whether a second one came, which did not wait for the end of the step."""
        self._held = False
        self._kept: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, KeyboardInterrupt):
            raise Stopped(signal.SIGINT, self.where) from error

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """A stretch of work that is not broken off in its middle."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._kept is not None:
            raise Stopped(self._kept, self.where)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self._held and self._kept is None:
            self._kept = number
            # Not print: the signal may have come in the middle of one. On a terminal it takes the
            # last line of what is drawn there, which knows how many lines to take back.
            told = b"offload: stopping after this step; once more to stop at once"
            os.write(2, b"\r\x1b[2K" + told if os.isatty(2) else b"\n" + told + b"\n")
            return
        self.hurried |= self._held
        raise Stopped(number, self.where)


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
    """Turns errors of the kinds that users cause into `BadInput`: for checks and set-up."""
    try:
        yield
    except OSError as error:
        path, told = error.filename, error.strerror
        if told is None or path is None:
            raise BadInput(str(error)) from error
        there = str(path).strip("./") and re.search(rf"(?<!\w){re.escape(str(path))}(?!\w)", told)
        if told == os.strerror(errno.ENOENT):
            told += ": likely misspelt, or of another directory"
        elif told == os.strerror(errno.ENOTDIR):
            told += ": try the folder that has it"
        raise BadInput(told if there else f"{path}: {told}") from error
    except ValueError as error:
        raise BadInput(str(error)) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 0, 1 failed, 2 bad input, 128 + signal."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # The shell has closed it.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # What an encoding lacks, as in names of files, is an escape: no figure is lost for it.
            sys.stdout.reconfigure(errors="backslashreplace")
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except (Stopped, KeyboardInterrupt) as raised:
        stop = raised if isinstance(raised, Stopped) else Stopped(signal.SIGINT)
        _tell(f"offload: stopped by {stop.by} {stop.where}".rstrip())
        return EXIT_SIGNAL + stop.number
    except BrokenPipeError:
        return EXIT_SIGNAL + signal.SIGPIPE  # Whoever read our output has gone.
    except Exception as error:
        return _failed(error)
    finally:
        _drop_unwritten()


def _drop_unwritten() -> None:
    """Let go of what cannot be written, or the interpreter's last flush would complain again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str]) -> int:
    """Runs the command that the first arguments name on the others, or shows the help."""
    if arguments[:1] == ["--version"]:
        from importlib import metadata

        print(f"offload {metadata.version('offload-engine')}")
        return 0
    typed, kind, known, module = "offload", "command", COMMANDS, "offload.cli."
    if arguments[:1] == ["bench"]:
        typed, kind, known, module = "offload bench", "benchmark", BENCHMARKS, "offload.cli.bench_"
        arguments = arguments[1:]
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(f"usage: {typed} {kind.upper()} [OPTIONS]\n")
        for one, purpose in known.items():
            print(f"  {one:<10} {purpose}")
        print(f"\n{typed} {kind.upper()} --help says more; offload --version.")
        return 0
    if name not in known:
        raise BadInput(
            f"there is no {kind} {name!r}{nearest(name, tuple(known))}. "
            f"{kind.capitalize()}s: {', '.join(known)}"
        )
    return importlib.import_module(module + name).command(arguments[1:]) or 0


def _tell(message: str) -> None:
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr)


def in_flags(text: str) -> str:
    """A message in which fields of `Config` are named, as it is told on the command line.

    Each is a flag there: `Config.x='a'`, `Config(x="a")` and `Config.x` are `--x a` and `--x`.
    Of `Config.x=('a', 'b')` the texts are left, `--x a b`.
    """

    def flags(found: re.Match[str]) -> str:
        fields = re.findall(r"(\w+)=[\"']?([^\"',]*)", found[1])
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in fields)

    text = re.sub(
        r"(\bConfig\.\w+=)\(([^()]*)\)",
        lambda found: found[1] + " ".join(re.findall(r"'([^']*)'", found[2])),
        text,
    )
    text = re.sub(r"\bConfig\((\w+=[^()]*)\)", flags, text)
    text = re.sub(r"(\bConfig\.\w+=)([\"'])(.*?)\2", r"\1\3", text)
    return re.sub(
        r"\bConfig\.(\w+)\b(?!\()(=?)",
        lambda found: "--" + found[1].replace("_", "-") + " " * len(found[2]),
        text,
    )


def nearest(name: str, known: Sequence[str]) -> str:
    """` (did you mean ...?)` where one of `known` is like `name`, else nothing."""
    import difflib

    lower = {one.lower(): one for one in known}
    close = [lower[one] for one in difflib.get_close_matches(name.lower(), lower, n=1)]
    return f" (did you mean {close[0]}?)" if close else ""


def _failed(error: Exception) -> int:
    bad = isinstance(error, BadInput)
    if os.environ.get("OFFLOAD_TRACEBACK") == "1":
        import traceback

        traceback.print_exception(error)
    else:
        kind = "" if bad else f"{type(error).__name__}: "
        _tell(f"offload: error: {kind}{in_flags(str(error))}")
        cause = None if bad else error.__cause__
        while cause is not None:
            _tell(f"  caused by {type(cause).__name__}: {in_flags(str(cause))}")
            cause = cause.__cause__
        if not bad:
            _tell("  (OFFLOAD_TRACEBACK=1 shows where)")
    return EXIT_BAD_INPUT if bad else EXIT_FAILED
