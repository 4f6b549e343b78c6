"""What the speed of drives means for training: plain arithmetic.

A step reads and writes the optimizer state of every trained parameter once; forward and backward
take 6 FLOP for each parameter and token (Kaplan et al., "Scaling Laws for Neural Language Models",
2020, section 2.1). The drive is hidden where a step's tokens keep the GPU busy for as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cpu_adam.formats import FORMATS, StateFormat

GPU_SHARE = 0.4
"""Of what a GPU computes at most, what training reaches where nothing waits for a drive."""

FLOP_PER_PARAMETER = 6.0
"""For each token, forward and backward."""

_MANY = 1 << 30


@dataclass(frozen=True, slots=True)
class EachWay:
    """How fast drives read, and write as much."""

    bytes_per_s: float
    """Read, and as many written."""
    at_once: bool
    """Both at the same time; else in turns, because that is faster."""

    @classmethod
    def of(cls, rates: Mapping[str, float]) -> EachWay:
        """The faster way, of bytes per second of `read`, `write` and, if measured, `both`."""
        at_once = rates.get("both", 0.0) / 2
        in_turns = 1 / (1 / rates["read"] + 1 / rates["write"])
        return cls(max(at_once, in_turns), at_once >= in_turns)

    @property
    def how(self) -> str:
        """For people."""
        return "reading and writing at once" if self.at_once else "reading and writing in turns"


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatVerdict:
    """One state format on these drives."""

    name: str
    """Of the row of `FORMATS`."""
    states: str
    """Of `Config`, which asks for it."""
    weights: str
    """Dtype of the weights whose state it is."""
    rule: str
    """By which the optimizer updates: adam, lion, sgd."""
    bytes_per_parameter: float
    """Of its state, without the weight."""
    parameters_per_s: float
    """Whose state is read and written back."""
    step_seconds: float
    """Of the drives in a step of the model."""
    tokens_per_step: float
    """From which the GPU takes longer than the drives."""
    written_bytes_per_step: float
    steps_endured: float
    """Until the drives have written what they endure."""

    @property
    def label(self) -> str:
        """By what a user gets it: states, weights, and the optimizer where it is not Adam."""
        weights = {"bfloat16": "bf16", "float32": "fp32"}[self.weights]
        return f"{self.states} {weights}" + (f" {self.rule}" if self.rule != "adam" else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A model, a GPU and drives."""

    parameters: float
    """Of the model."""
    model: str
    """How the user calls that."""
    gpu: str
    gpu_flops: float
    endurance_bytes: float
    """Of all drives together."""
    each_way: EachWay
    free_bytes: int | None = None
    """On all drives together; None where that is not known."""
    gpu_assumed: bool = False
    """Whether nobody said which GPU."""
    endurance_assumed: bool = False
    formats: tuple[FormatVerdict, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "formats", tuple(self._formats()))

    def _formats(self) -> Iterator[FormatVerdict]:
        rate = self.each_way.bytes_per_s
        for row in FORMATS.values():
            size = state_bytes(row)
            seconds = self.parameters * size / rate
            flop = FLOP_PER_PARAMETER * self.parameters
            yield FormatVerdict(
                name=row.name,
                states=row.serves[0],
                weights=row.weight_dtype,
                rule=row.rule,
                bytes_per_parameter=size,
                parameters_per_s=rate / size,
                step_seconds=seconds,
                tokens_per_step=seconds * self.gpu_flops * GPU_SHARE / flop,
                written_bytes_per_step=self.parameters * size,
                steps_endured=self.endurance_bytes / (self.parameters * size),
            )


def state_bytes(row: StateFormat) -> float:
    """Bytes of optimizer state for each parameter.

    >>> [state_bytes(FORMATS[name]) for name in ("exact", "fp32", "compact")]
    [10.0, 8.0, 4.0625]
    """
    return row.record_bytes(_MANY) / _MANY
