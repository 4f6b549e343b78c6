"""`offload convert`: a checkpoint of one kind, written as another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from offload.cli import bad_input
from offload.cli.console import Output
from offload.cli.flags import parse_flags

_Source = tyro.conf.arg(metavar="SRC", help_behavior_hint="", help="The checkpoint, a directory.")
_Target = tyro.conf.arg(
    metavar="DST", help_behavior_hint="", help="A new directory; a save may replace an earlier one."
)

_Dtype = tyro.conf.arg(metavar="{bfloat16,float32}", help_behavior_hint="")


@dataclass(frozen=True, kw_only=True, slots=True)
class Convert:
    """Write a checkpoint as one of another kind. It is read from a directory of offload.save, a
    durable run (its last commit), a folder of safetensors (Hugging Face), of
    torch.distributed.checkpoint, or of DeepSpeed (ZeRO 1 to 3, of any number of ranks; DeepSpeed
    need not be there).
    """

    source: tyro.conf.Positional[Annotated[str, _Source]]

    target: tyro.conf.Positional[Annotated[str, _Target]]

    to: Literal["save", "huggingface", "dcp"] = "save"
    """What is written: what offload.load reads; weights alone as transformers reads them; or what
    torch.distributed.checkpoint reads."""

    dtype: Annotated[Literal["bfloat16", "float32"] | None, _Dtype] = None
    """Of the parameters, which keep their master to the bit in both. Default: as they are, those of
    DeepSpeed as they were trained."""


_NEXT = {
    "save": "after attach, offload.load(model, optimizer, DIR) takes it over; of weights alone "
    "offload.load(model, None, DIR); offload inspect checks it",
    "dcp": "torch.distributed.checkpoint.load reads it, with names as get_state_dict gives them",
    "huggingface": "weights; its config.json is the model's, to be put beside them; "
    "offload inspect checks them",
}
"""What is to be done with what was written."""


def command(arguments: Sequence[str]) -> None:
    """Converts, and says what was left out."""
    asked = parse_flags(Convert, "offload convert", arguments)
    from offload.checkpoint.conversion import convert

    with bad_input():
        notices = convert(asked.source, asked.target, asked.to, asked.dtype)
    console = Output()
    console.notes(notices)
    console.sentence(f"{asked.target}: {_NEXT[asked.to]}")
