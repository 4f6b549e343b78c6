"""What a step is frozen to.

[Note: Frozen step]
`step()` takes down, for every parameter that has a gradient, the hyper-parameters of its group and
the number of its step, and hands them to the update ops. Schedulers, `zero_grad` and the next
backward may go on at once: they change the live objects, never what was frozen, and the gradient's
home is written again only after the update that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cpu_adam.hyper import Hyper


@dataclass(frozen=True, slots=True)
class ParameterStep:
    """What one parameter's update in one step was frozen to."""

    hyper: Hyper
    number: int
    """Of the parameter's step, from 1."""


Frozen = Mapping[int, Mapping[int, ParameterStep]]
"""By unit and parameter, those that take part in a step."""
