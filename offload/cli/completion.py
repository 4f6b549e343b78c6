"""`offload completion`: what a shell needs to complete commands, flags and their values."""

from __future__ import annotations

import importlib
import typing
from collections.abc import Sequence
from typing import Any

from offload.cli import COMMANDS, BadInput, nearest
from offload.cli.bench import BENCHMARKS
from offload.cli.flags import Flags, flag

SHELLS = ("bash", "zsh")

_HELP = """usage: offload completion {bash,zsh}

Prints what the shell needs to complete commands, flags and their values:

  bash: offload completion bash > ~/.local/share/bash-completion/completions/offload
  zsh:  echo 'eval "$(offload completion zsh)"' >> ~/.zshrc"""

_ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"

_BASH = """_offload() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}
    local command=${COMP_WORDS[1]} words=
    if [[ $command == bench ]] && (( COMP_CWORD > 2 )); then command="bench ${COMP_WORDS[2]}"; fi
    if (( COMP_CWORD == 1 )); then words="@commands@"
    else
        case "$command $before" in
@values@
            *) case "$command" in
@flags@
            esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _offload offload
"""


def command(arguments: Sequence[str]) -> None:
    """Prints the script of the shell that is named.

    Raises:
        BadInput: there is none of that name.
    """
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
    print(_ZSH * (name == "zsh") + script(), end="")


def script() -> str:
    """The script: words for every place in which one may be typed, and file names elsewhere."""
    values, flags = [], []
    for name, found in _commands().items():
        if isinstance(found, tuple):
            flags.append(f'                "{name}") words="{" ".join(found)} --help" ;;')
            continue
        names = []
        for key, kind in _fields(found.kind).items():
            names += [flag(key), *([flag(f"no_{key}")] if kind is bool else [])]
            choices = [str(one) for one in typing.get_args(kind) if isinstance(one, str)]
            if choices:
                values.append(f'            "{name} {flag(key)}") words="{" ".join(choices)}" ;;')
        flags.append(f'                "{name}") words="{" ".join(names)} --help" ;;')
    filled = _BASH.replace("@commands@", f"{' '.join(COMMANDS)} --help --version")
    return filled.replace("@values@", "\n".join(values)).replace("@flags@", "\n".join(flags))


def _commands() -> dict[str, Flags[Any] | tuple[str, ...]]:
    """By what is typed, the flags of a command, or the words that may follow it."""
    found: dict[str, Flags[Any] | tuple[str, ...]] = {}
    modules = {name: f"offload.cli.{name}" for name in COMMANDS if name not in _WORDS}
    modules |= {f"bench {name}": f"offload.cli.bench_{name}" for name in BENCHMARKS}
    modules["train"] = "offload.cli.settings"
    for name, module in modules.items():
        found[name] = importlib.import_module(module).FLAGS
    return found | _WORDS


_WORDS = {"bench": tuple(BENCHMARKS), "completion": SHELLS}


def _fields(kind: type) -> dict[str, Any]:
    """Names and types of the flags of a dataclass and of those nested in it."""
    found: dict[str, Any] = {}
    for key, annotated in typing.get_type_hints(kind, include_extras=True).items():
        plain, *marks = typing.get_args(annotated) if _is_annotated(annotated) else (annotated,)
        if any("Positional" in repr(mark) for mark in marks):
            continue
        if key == "placing":
            found |= _fields(plain)
        else:
            found[key] = plain
    return found


def _is_annotated(annotated: Any) -> bool:
    return hasattr(annotated, "__metadata__")
