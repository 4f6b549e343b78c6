"""The form of an offloaded parameter, which stays what it was at attach; why it changed, likely."""

from __future__ import annotations

import torch

Form = tuple[tuple[int, ...], torch.dtype, str]
"""Shape, dtype and device."""


def differing(found: Form, wanted: Form) -> tuple[str, str]:
    """What differs first, of what was found and of what was wanted; the strides, if nothing does.

    >>> differing(((2,), torch.float16, "cpu"), ((2,), torch.float32, "cpu"))
    ('torch.float16', 'torch.float32')
    """
    if found[0] != wanted[0]:
        return f"shape {found[0]}", f"shape {wanted[0]}"
    if found[1] != wanted[1]:
        return str(found[1]), str(wanted[1])
    if found[2] != wanted[2]:
        return f"device {found[2]}", f"device {wanted[2]}"
    return "other strides", "contiguous ones"


def advice(found: Form, wanted: Form, *, trained: bool, own_forward: bool = False) -> str:
    """Why a parameter has another form than it was attached with, likely, and what to do about it.

    Args:
        trained: whether it has a state.
        own_forward: whether its own module is running.
    """
    again = "before attach, or after detach(), and attach it again"
    if found[0] != wanted[0]:
        return (
            f"likely the model was resized after attach (its embeddings, a head): do that {again}"
        )
    if found[1] != wanted[1]:
        if own_forward:
            return (
                "likely its own forward converts it (a router to float32): run one forward before "
                "attach, and before the optimizer is made"
            )
        if trained and found[1] is torch.float16:
            return (
                "likely the model was converted after attach, by half(), and float16 weights "
                "cannot be trained: detach(), make it bfloat16 and attach it again, or leave it "
                "in float32 and train under torch.autocast"
            )
        return f"likely the model was converted after attach: do that {again}"
    if found[2] != wanted[2]:
        return "likely the model was moved after attach: leave that out, Config says where it lives"
    return (
        "likely the model was converted after attach (channels_last, transposed): leave that out, "
        "or detach() before it"
    )
