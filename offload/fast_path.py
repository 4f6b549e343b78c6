"""Torch's own transformer layers, which compute otherwise where no gradient is asked for.

[Note: Fast path]
In evaluation, without gradients, `nn.TransformerEncoder` and its layers take fused operations, and
nested tensors where places are masked: other last bits in valid places, and zeros in masked ones.
Torch leaves that path where a layer has hooks, or a weight has a trap. So streamed layers never
take it, which is told. An encoder looks at the weights of its first layer before it calls it: where
lanes update what lives on the device, it waits for them first.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from offload.binding import BoundUnit


def encoders(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that look at weights of others before they call these."""
    return [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]


def slow_path_notice(streamed: Iterable[BoundUnit]) -> str | None:
    """A sentence for a person where units are such layers, else None."""
    modules = [ref() for unit in streamed for ref in unit.modules]
    if not any(isinstance(module, nn.TransformerEncoderLayer) for module in modules):
        return None
    return (
        "nn.TransformerEncoderLayer computes by torch's fast path in evaluation, with other last "
        "bits and zeros in masked places, and does not where its weights are streamed: compare "
        "with a run that has torch.backends.mha.set_fastpath_enabled(False)"
    )
