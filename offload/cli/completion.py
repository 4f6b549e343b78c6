"""`offload completion`: what a shell needs to complete commands, flags and their values."""

from __future__ import annotations

import importlib
import typing
from collections.abc import Sequence
from typing import Any

from offload.cli import COMMANDS, BadInput, nearest
from offload.cli.bench import BENCHMARKS
from offload.cli.flags import Flags, flag

SHELLS = ("bash", "zsh", "fish")

_HELP = """usage: offload completion {bash,zsh,fish}

Prints what the shell needs to complete commands, flags and their values. Kept in a file, since it
takes seconds to make; anew after an update:

  bash: offload completion bash > ~/.local/share/bash-completion/completions/offload
  zsh:  offload completion zsh > ~/.offload.zsh; echo "source ~/.offload.zsh" >> ~/.zshrc
  fish: offload completion fish > ~/.config/fish/completions/offload.fish"""

_ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"

_BASH = """_offload() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}
    local command=${COMP_WORDS[1]} words=
    if [[ $word == "=" ]]; then word=
    elif [[ $before == "=" ]]; then before=${COMP_WORDS[COMP_CWORD-2]}; fi
    if [[ $command == bench ]] && (( COMP_CWORD > 2 )); then command="bench ${COMP_WORDS[2]}"; fi
    if (( COMP_CWORD == 1 )); then words="@commands@"
    else
        case "$command $before" in
@values@
            *) if [[ $word == -* || " @words@ " == *" $command "* ]]; then case "$command" in
@flags@
            esac; fi ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _offload offload
"""

_FISH = """function __offload
    set -l typed (commandline -opc)
    set -l command "$typed[2]"
    if test "$command" = bench; and test (count $typed) -gt 2
        set command "bench $typed[3]"
    end
    if test (count $typed) -eq 1
        string split ' ' -- "@commands@"
        return
    end
    switch "$command $typed[-1]"
@values@
    end
    string match -q -- '-*' (commandline -ct); or contains -- "$typed[-1]" @words@; or return
    switch "$command"
@flags@
    end
end
complete -c offload -n 'test -n "$(__offload)"' -f -a '(__offload)'
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
    print(script(name), end="")


def script(shell: str) -> str:
    """The script: words for every place in which one may be typed, and file names elsewhere."""
    values: dict[str, Sequence[str]] = {}
    flags: dict[str, Sequence[str]] = {}
    for name, found in _commands().items():
        if isinstance(found, tuple):
            flags[name] = [*found, "--help"]
            continue
        names = []
        for key, kind in _fields(found.kind).items():
            names += [flag(key), *([flag(f"no_{key}")] if kind is bool else [])]
            choices = [str(one) for one in typing.get_args(kind) if isinstance(one, str)]
            # Where none are known, files are: the shell's own words. Fish has them without.
            if choices or (kind is not bool and shell != "fish"):
                values[f"{name} {flag(key)}"] = choices
        flags[name] = [*names, "--help"]
    text, case = (
        (_FISH, '    case "{}"\n        string split \' \' -- "{}"')
        if shell == "fish"
        else (_ZSH * (shell == "zsh") + _BASH, '                "{}") words="{}" ;;')
    )
    filled = {
        "commands": " ".join([*COMMANDS, "--help", "--version"]),
        "values": [case.format(name, " ".join(words)) for name, words in values.items()],
        "flags": [case.format(name, " ".join(words)) for name, words in flags.items()],
        "words": " ".join(_WORDS),
    }
    for name, lines in filled.items():
        text = text.replace(f"@{name}@", lines if isinstance(lines, str) else "\n".join(lines))
    return text


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
