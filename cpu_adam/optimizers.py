"""Optimizers for parameters in CPU memory, in place of those of torch.optim.

Each is torch.optim's counterpart by its arguments, its semantics and its `state_dict`, with one
native call per step and state format, and with the full float32 master of a bfloat16 parameter
inside. They need nothing of `offload`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cpu_adam.hyper import AdamHyper, LionHyper, SGDHyper
from cpu_adam.optimizer_base import CPUOptimizer, decays, number


class CPUAdam(CPUOptimizer):
    """AdamW (arXiv 1711.05101), or Adam (arXiv 1412.6980) by `decoupled_weight_decay=False`.

    Takes the place of torch.optim.AdamW and torch.optim.Adam for parameters in CPU memory, float32
    or bfloat16. State: `step`, `exp_avg` and `exp_avg_sq` (float32 also for bfloat16 parameters)
    and, for these, `residue`, the lower half of the float32 master (int16).
    """

    rule = "adam"
    counts_steps = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = True,
        states: str = "exact",
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        """As torch.optim.AdamW.

        states: which row of `cpu_adam.FORMATS` keeps the state; `compact` takes a byte per moment
        of a bfloat16 parameter. foreach and fused choose between implementations in torch; here
        each value gives the same. Raises ValueError for amsgrad,
        capturable and differentiable, and for parameters that cannot be served; TypeError for what
        is no number where one belongs.
        """
        super().__init__(locals())

    @staticmethod
    def hyper_of(group: Mapping[str, Any]) -> AdamHyper:
        """What a parameter group, also one of torch.optim.AdamW or Adam, is frozen to."""
        beta1, beta2 = decays(group["betas"])
        return AdamHyper(
            lr=number(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=number(group["eps"]),
            weight_decay=number(group["weight_decay"]),
            decoupled=bool(group["decoupled_weight_decay"]),
            maximize=bool(group["maximize"]),
        )


class CPULion(CPUOptimizer):
    """Lion (arXiv 2302.06675) for parameters in CPU memory, float32 or bfloat16.

    State: `exp_avg` (float32) and, for bfloat16 parameters, `residue`.
    """

    rule = "lion"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        states: str = "exact",
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        """Arguments and errors as those of `CPUAdam`; weight decay is decoupled."""
        super().__init__(locals())

    @staticmethod
    def hyper_of(group: Mapping[str, Any]) -> LionHyper:
        """What a parameter group is frozen to."""
        beta1, beta2 = decays(group["betas"])
        return LionHyper(
            lr=number(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            weight_decay=number(group["weight_decay"]),
            maximize=bool(group["maximize"]),
        )


class CPUSGD(CPUOptimizer):
    """torch.optim.SGD for parameters in CPU memory, float32 or bfloat16.

    State: `momentum_buffer` (float32) where there is momentum and, for bfloat16 parameters,
    `residue`.
    """

    rule = "sgd"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        states: str = "exact",
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        """As torch.optim.SGD; the other arguments and errors as those of `CPUAdam`."""
        super().__init__(locals())

    @staticmethod
    def hyper_of(group: Mapping[str, Any]) -> SGDHyper:
        """What a parameter group, also one of torch.optim.SGD, is frozen to."""
        return SGDHyper(
            lr=number(group["lr"]),
            momentum=number(group["momentum"]),
            dampening=number(group["dampening"]),
            weight_decay=number(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
        )

    def _unused(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return () if group["momentum"] else ("momentum_buffer",)
