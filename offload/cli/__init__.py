"""The command line. Each command is one module with `command(arguments)`, named in `COMMANDS`."""

from __future__ import annotations

import codecs
import contextlib
import errno
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO

COMMANDS = {
    "train": "train a small GPT on real text, its state in any tier",
    "bench": "measure what this machine gives: adam, nvme",
    "doctor": "what this machine has and what is missing, one fix per line",
    "report": "where the time of a run went, and what would help most",
    "completion": "what bash, zsh and fish need to complete what is typed",
}
"""What each command does, for the help; the module of the same name holds it."""

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_SIGNAL = 128
"""Plus the signal's number, as shells have it."""


class BadInput(Exception):
    """The user asked for what cannot be; the message says what, and what to try."""


class OutputLost(Exception):
    """Standard output failed; the message says why, and what to try."""


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
        raise BadInput(told if str(path) in told else f"{path}: {told}") from error
    except ValueError as error:
        raise BadInput(str(error)) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 0, 1 failed, 2 bad input, 128 + signal."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        if sys.stdout is None:
            raise BadInput(
                "standard output is closed, and results go there: redirect it to a file, or to "
                f"{os.devnull} where they are not wanted"
            )
        _write_any_text(sys.stdout)
        with contextlib.redirect_stdout(_Output(sys.stdout)):  # type: ignore[type-var]
            try:
                status = _run(arguments)
            except SystemExit:  # Help was shown.
                sys.stdout.flush()
                raise
            sys.stdout.flush()
        return status
    except (Stopped, KeyboardInterrupt) as raised:
        stop = raised if isinstance(raised, Stopped) else Stopped(signal.SIGINT)
        _say(f"offload: stopped by {stop.by} {stop.where}".rstrip())
        return EXIT_SIGNAL + stop.number
    except BrokenPipeError:
        return EXIT_SIGNAL + signal.SIGPIPE  # Whoever read our output has gone.
    except Exception as error:
        return _failed(error)
    finally:
        _drop_unwritten()


def _write_any_text(stream: TextIO) -> None:
    """Has it write an escape for what its encoding lacks, as in names of files: nothing is lost."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors in _ESCAPING:
        stream.reconfigure(errors=_ESCAPING[stream.errors])


def _bytes_or_escape(error: UnicodeError) -> tuple[str | bytes, int]:
    """Bytes of a name that were none of the encoding's as they were, all else as an escape."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.backslashreplace_errors(error)


codecs.register_error("offload-escape", _bytes_or_escape)

_ESCAPING = {"strict": "backslashreplace", "surrogateescape": "offload-escape"}
"""By what a stream does with text that its encoding lacks (the second in the C locale), what it is
to do instead."""


class _Output:
    """Standard output, whose failures say that it is they."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As of any stream."""
        with self._told():
            return self._stream.write(text)

    def flush(self) -> None:
        """As of any stream."""
        with self._told():
            self._stream.flush()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            likely = "the disk it goes to is full" if error.errno == errno.ENOSPC else "it failed"
            raise OutputLost(
                f"standard output cannot be written: {error.strerror}; likely {likely}; redirect "
                "it elsewhere"
            ) from error


def _drop_unwritten() -> None:
    """Let go of what cannot be written, or the interpreter's last flush would complain again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--version"]:
        from importlib import metadata

        print(f"offload {metadata.version('offload-engine')}")
        return 0
    return MENU.run(arguments)


@dataclass(frozen=True)
class Menu:
    """Commands to choose from by name, each in a module with `command(arguments)`."""

    typed: str
    """What is typed before the name."""
    purpose: str
    """What all are for, in a sentence."""
    kind: str
    """What one of them is called."""
    commands: Mapping[str, str]
    """By name, what it does."""
    modules: str
    """Dotted name of the module of a command, but for its name at the end."""
    more: str = ""
    """A last word of the help."""

    def run(self, arguments: Sequence[str]) -> int:
        """Runs the command that the first argument names on the others, or shows the help.

        Returns the exit status: 0, or what a command that came to its end says instead.

        Raises:
            BadInput: there is none of that name.
        """
        name = arguments[0] if arguments else "--help"
        if name in ("-h", "--help"):
            print(self._help())
        elif name in self.commands:
            return importlib.import_module(self.modules + name).command(arguments[1:]) or 0
        else:
            known = tuple(self.commands)
            raise BadInput(
                f"there is no {self.kind} {name!r}{nearest(name, known)}. "
                f"{self.kind.capitalize()}s: {', '.join(known)}"
            )
        return 0

    def _help(self) -> str:
        name = self.kind.upper()
        lines = [f"usage: {self.typed} {name} [OPTIONS]", "", self.purpose, ""]
        indent = " " * 13
        for known, purpose in self.commands.items():
            lines.append(in_lines(f"  {known:<10} {purpose}", sys.stdout, indent))
        more = f"{self.typed} {name} --help says more{self.more}."
        return "\n".join([*lines, "", in_lines(more, sys.stdout)])


MENU = Menu(
    typed="offload",
    purpose="Train models larger than the GPU.",
    kind="command",
    commands=COMMANDS,
    modules="offload.cli.",
    more="; offload --version",
)


def _say(message: str) -> None:
    with contextlib.suppress(OSError):
        print(in_lines(message, sys.stderr), file=sys.stderr)


def in_lines(text: str, stream: TextIO, indent: str = "") -> str:
    """A text broken between words where `stream` is a terminal: else its lines are as they were.

    What is one word stays one, so that a path can be copied; lines but the first have an `indent`.
    """
    if not stream.isatty():
        return text
    import shutil  # With all kinds of archives: only where it is needed.

    columns = shutil.get_terminal_size().columns
    return "\n".join(broken(line, columns, indent) for line in text.split("\n"))


def broken(line: str, columns: int, indent: str) -> str:
    """One line as several of at most `columns`; colours take no place."""
    lines, first = [""], True
    for word in line.split(" "):
        wider = lines[-1] + " " * (not first) + word
        if len(_COLOURS.sub("", wider)) <= columns or not lines[-1].strip():
            lines[-1] = wider
        else:
            lines.append(indent + word)
        first = False
    return "\n".join(lines)


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


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
    bad, told = isinstance(error, BadInput), isinstance(error, (BadInput, OutputLost))
    if os.environ.get("OFFLOAD_TRACEBACK") == "1":
        import traceback

        traceback.print_exception(error)
    else:
        kind = "" if told else f"{type(error).__name__}: "
        _say(f"offload: error: {kind}{in_flags(str(error))}")
        cause = None if told else error.__cause__
        while cause is not None:
            _say(f"  caused by {type(cause).__name__}: {in_flags(str(cause))}")
            cause = cause.__cause__
        if not told:
            _say("  (OFFLOAD_TRACEBACK=1 shows where)")
    return EXIT_BAD_INPUT if bad else EXIT_FAILED
