"""`offload completion`: what a shell needs to complete commands, flags and their values."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union

import tyro

from offload.cli import BENCHMARKS, COMMANDS, BadInput, nearest

SHELLS = ("bash", "zsh", "fish")

_HELP = """usage: offload completion {bash,zsh,fish}

Prints what the shell needs to complete commands, flags and their values. Kept in a file, since it
takes seconds to make; anew after an update:

  bash: offload completion bash > ~/.local/share/bash-completion/completions/offload
  zsh:  offload completion zsh > ~/.offload.zsh; echo "source ~/.offload.zsh" >> ~/.zshrc
  fish: offload completion fish > ~/.config/fish/completions/offload.fish"""

_OPTIONS = {
    "train": ("options", "Train"),
    "plan": ("plan", "Plan"),
    "doctor": ("doctor", "Doctor"),
    "report": ("report", "Report"),
    "inspect": ("inspect", "Inspect"),
    "convert": ("convert", "Convert"),
    "adam": ("bench_adam", "Adam"),
    "nvme": ("bench_nvme", "Nvme"),
}
"""By command or benchmark, the module and the dataclass of its flags."""


def command(arguments: Sequence[str]) -> None:
    """Prints the script of the shell that is named."""
    if list(arguments) in ([], ["--help"], ["-h"]):
        print(_HELP)
        return
    name = arguments[0]
    if name not in SHELLS or len(arguments) > 1:
        close = nearest(name, SHELLS)
        raise BadInput(
            f"offload completion {' '.join(arguments)}: found no such shell{close}; likely it is "
            "one that is not known here; try offload completion bash"
        )
    print(script(name), end="")


def script(shell: str) -> str:
    """The script, as tyro writes it."""
    from offload.cli.options import registry

    def completion(_shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]) -> None:
        """A script for a shell."""

    found: dict[str, Any] = {"completion": completion}
    for name, (module, kind) in _OPTIONS.items():
        found[name] = getattr(importlib.import_module(f"offload.cli.{module}"), kind)

    def one_of(names: Mapping[str, str], known: Mapping[str, Any]) -> Any:
        kinds = (
            Annotated[known[name], tyro.conf.subcommand(name, description=told)]
            for name, told in names.items()
        )
        return Union[tuple(kinds)]  # noqa: UP007

    bench = dataclasses.make_dataclass("bench", [("benchmark", one_of(BENCHMARKS, found))])
    whole, told = one_of(COMMANDS, {**found, "bench": bench}), io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        options = ["--tyro-print-completion", shell]
        config = (tyro.conf.OmitSubcommandPrefixes,)
        tyro.cli(whole, prog="offload", args=options, registry=registry(), config=config)
    return told.getvalue()
