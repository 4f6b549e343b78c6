"""`offload bench`: each benchmark is a module, `bench_` and its name, with `command(arguments)`."""

from __future__ import annotations

from collections.abc import Sequence

from offload.cli import Menu

BENCHMARKS = {
    "adam": "the update against this machine's memory, torch and DeepSpeed",
    "nvme": "drives: the best block size and depth, and whether they are enough",
}
"""What each benchmark measures, for the help."""

MENU = Menu(
    typed="offload bench",
    purpose="Measure what this machine gives, and what comes of it.",
    kind="benchmark",
    commands=BENCHMARKS,
    modules="offload.cli.bench_",
)


def command(arguments: Sequence[str]) -> int:
    """Runs the benchmark that the first argument names; returns the exit status.

    Raises:
        BadInput: there is none of that name, or its arguments are wrong.
        Stopped: by Ctrl-C or SIGTERM.
    """
    return MENU.run(arguments)
