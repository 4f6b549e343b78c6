"""Other optimizers that do the job of an update, for benchmarks; none of them is needed.

A peer works on a float32 parameter with a float32 gradient. Where weights are served in bfloat16 or
gradients come in another dtype, the job takes copies besides its step: `PeerJob` does all of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cpu_adam.formats import StateFormat

STEPS_DONE = 9
"""Steps that the states of a peer have behind them."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An optimizer of somebody else."""

    name: str
    rule: str
    """The rule by which it updates, as `StateFormat.rule` names it."""
    states: tuple[str, ...]
    """Names of its float32 states."""
    make: Callable[[nn.Parameter], torch.optim.Optimizer]
    """Make it for one parameter; ImportError where it is not installed."""
    steps_done: Callable[[], object]
    """Make the number of steps in its state."""


def _torch_adamw(parameter: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter], fused=True)


def _torch_sgd(parameter: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter], lr=1e-3, momentum=0.9, fused=True)


def _deepspeed_adam(parameter: nn.Parameter) -> torch.optim.Optimizer:
    """DeepSpeed compiles it at its first use, and talks meanwhile."""
    with _output_to_errors():
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        made: torch.optim.Optimizer = DeepSpeedCPUAdam([parameter], lr=1e-3, weight_decay=1e-2)
    return made


_MOMENTS = ("exp_avg", "exp_avg_sq")

PEERS = (
    Peer(
        "torch AdamW fused",
        "adam",
        _MOMENTS,
        _torch_adamw,
        lambda: torch.tensor(float(STEPS_DONE)),
    ),
    Peer("torch SGD fused", "sgd", ("momentum_buffer",), _torch_sgd, lambda: STEPS_DONE),
    Peer("DeepSpeed CPUAdam", "adam", _MOMENTS, _deepspeed_adam, lambda: STEPS_DONE),
)
"""Every peer there is. To add one, add a row."""


def usable(rules: Collection[str]) -> tuple[tuple[Peer, ...], dict[str, str]]:
    """The peers of some rules that work here, and by name of each other one, why it does not.

    Each makes a step on a few elements, so that what it does at its first use is done.
    """
    found: list[Peer] = []
    left_out: dict[str, str] = {}
    for peer in PEERS:
        if peer.rule not in rules:
            continue
        try:
            parameter = nn.Parameter(torch.zeros(64))
            parameter.grad = torch.zeros(64)
            peer.make(parameter).step()
        except ModuleNotFoundError as error:
            left_out[peer.name] = f"{error.name} is not installed"
        except Exception as error:  # Whatever somebody else's build may raise.
            lines = str(error).splitlines() or [""]
            left_out[peer.name] = f"it failed with {type(error).__name__}: {lines[0]}"
        else:
            found.append(peer)
    return tuple(found), left_out


def arrays(
    peers: tuple[Peer, ...], format: StateFormat, gradient: torch.dtype
) -> dict[str, torch.dtype]:
    """Names and dtypes of the arrays, one item per element, that the jobs of peers share."""
    fitting = [peer for peer in peers if peer.rule == format.rule]
    if not fitting:
        return {}
    found = {"master": torch.float32}
    if gradient != torch.float32:
        found["gradient"] = torch.float32
    if format.weight_dtype != "float32":
        found["served"] = getattr(torch, format.weight_dtype)
    return found | {name: torch.float32 for peer in fitting for name in peer.states}


class PeerJob:
    """All that a peer must do to update a span as we do.

    The gradient to float32, its step on the float32 master, the master to the dtype in which the
    weight is served; each only where the dtypes differ.
    """

    def __init__(self, peer: Peer, gradient: Tensor, shared: Mapping[str, Tensor]) -> None:
        """`shared` holds the tensors named by `arrays`."""
        self._gradient = gradient
        self._served = shared.get("served")
        self._master = nn.Parameter(shared["master"])
        self._copy = shared.get("gradient")
        self._master.grad = gradient if self._copy is None else self._copy
        self._optimizer = peer.make(self._master)
        states = {name: shared[name] for name in peer.states}
        # In the same memory as ours: what torch allocates might lie on small pages.
        self._optimizer.state[self._master] = {"step": peer.steps_done(), **states}

    @torch.no_grad()
    def __call__(self) -> None:
        """Do it once."""
        if self._copy is not None:
            self._copy.copy_(self._gradient)
        self._optimizer.step()
        if self._served is not None:
            self._served.copy_(self._master)


@contextlib.contextmanager
def _output_to_errors() -> Iterator[None]:
    """Whatever is written to standard output, by compilers too, goes to standard error instead."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
