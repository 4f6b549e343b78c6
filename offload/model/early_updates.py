"""Updates that begin inside the last backward of a step.

[Note: Early updates]
Only the user knows which backward is the last before a step: `Config(micro_batches=N)` says so of
the N-th, or `engine.last_micro_batch()` of the next one. In it a unit goes this way:

    OPEN --each gradient came as often as in the backward before--> FINAL
    FINAL --the unit is at rest, and autograd keeps nothing of it--> BEGUN --step()--> OPEN

With clipping no update begins before `step()`, as the norm is of all gradients; the squares of a
FINAL unit are summed instead. That binds nobody: a gradient that changes is summed again. So where
nobody has said which backward is the last, the number of the step before is taken for this one's.

A FINAL unit that does not come to rest before the backward ends begins at `step()`. Once an update
has begun `step()` must follow, with the hyper-parameters that it began with: it cannot be undone.
Whatever would look at half-updated weights, or bring another gradient, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cpu_adam.hyper import Hyper


class ParameterStep(NamedTuple):
    """What one parameter's update in one step was frozen to."""

    hyper: Hyper
    number: int
    """Of the parameter's step, from 1."""


Step = Mapping[int, Mapping[int, ParameterStep]]
"""By unit and parameter, those that take part in a step."""


class EarlyUpdates:
    """The backwards since the last step, and the updates begun before the next."""

    def __init__(self, micro_batches: int | None, names: Sequence[str], *, clips: bool):
        """`micro_batches` backwards make a step, None: unknown."""
        self.freeze: Callable[[int], Mapping[int, ParameterStep]] = lambda unit: {}
        """What a step taken now would do to a unit; set by the optimizer."""
        self.begun: dict[int, Mapping[int, ParameterStep]] = {}
        """Updates begun before `step()`, by unit."""
        self.final: set[int] = set()
        """Units whose gradient is complete, in the last backward of a step."""
        self._number = micro_batches
        self._clips = clips
        self.begins_early = not clips and micro_batches is not None
        """Whether updates begin inside backwards."""
        self._names = names
        self._finished = self._finished_before = 0
        """Backwards since the last step, or since gradients were given up; those before that."""
        self._early_steps = 0
        """Those that came after fewer backwards."""
        self._said = self._is_last = self.said_last = False
        self._now: list[dict[int, int]] = [{} for _ in names]
        """By unit and parameter, how often a gradient came in the backward under way."""
        self._before: list[dict[int, int]] | None = None
        """The same of the last backward that was finished."""

    def last_micro_batch(self) -> None:
        """The next backward is the last before a step."""
        self._said = True

    # -- what happens ----------------------------------------------------------------------------

    def backward_began(self) -> None:
        """An outermost backward begins."""
        self.said_last = self._said or self._finished + 1 == self._number
        guess = self._finished_before if self._clips and self._number is None else 0
        self._is_last = self.said_last or self._finished + 1 == guess
        self._now = [{} for _ in self._names]

    def gradient_came(self, unit: int, parameter: int) -> None:
        """A backward has produced a gradient."""
        self.require_open(unit, "another gradient")
        now = self._now[unit]
        now[parameter] = now.get(parameter, 0) + 1
        if self._is_last and self._before is not None:
            complete = now == self._before[unit]
            (self.final.add if complete else self.final.discard)(unit)

    def begin(self, unit: int) -> Mapping[int, ParameterStep]:
        """Freeze the update of a FINAL unit that rests; nothing where none is due."""
        self.final.remove(unit)
        steps = self.freeze(unit)
        if steps:
            self.begun[unit] = steps
        return steps

    def backward_ended(self, *, finished: bool) -> None:
        """The outermost backward is over; one that raised, or produced none, does not count."""
        self.final.clear()
        if finished and any(self._now):
            self._finished += 1
            self._before = self._now

    def gave_up(self) -> None:
        """Gradients were given up: the next backward may be the first of a step."""
        self._finished, self._said = 0, False

    def stepped(self, step: Step) -> Step:
        """What of a step has not begun yet; the step is then taken."""
        begun = self.begun
        if any(step.get(unit, {}) != steps for unit, steps in begun.items()):
            raise RuntimeError(
                "learning rate, decay or another hyper-parameter changed between the last backward "
                "and step(), but updates had begun with the earlier values: put them back, call "
                "step() again and change them after it, or leave Config.micro_batches out"
            )
        self._early_steps += not self._said and 0 < self._finished < (self._number or 0)
        self.begun, self._finished_before, self._finished = {}, self._finished, 0
        self._said = False
        return {unit: steps for unit, steps in step.items() if unit not in begun}

    @property
    def notice(self) -> str | None:
        """What to tell of steps that no update could begin before."""
        return (
            f"steps that came after fewer than Config.micro_batches={self._number} backwards: "
            f"{self._early_steps}; in them no update began inside backward: likely the loop, or "
            "trainer, has another number, or less at the end of an epoch"
            if self._early_steps
            else None
        )

    # -- what is refused -------------------------------------------------------------------------

    def require_open(self, unit: int, what: str) -> None:
        """Refuse `what`, which is of a unit and comes inside a backward."""
        if unit in self.begun:
            raise RuntimeError(
                f"{what} of {self._names[unit]} came in a backward after its update had begun, as "
                "that backward was said to be the last of the step: call step(), which completes "
                "it without, and declare the micro_batches that your loop has, or none"
            )

    def require_step(self, what: str) -> None:
        """Refuse `what`, which makes no sense between an early update and its step."""
        if self.begun:
            raise RuntimeError(
                f"{what} came before step(), but updates of {len(self.begun)} of "
                f"{len(self._names)} units have begun, as the backward before it was said to be "
                "the last: call step() first, and clip by Config.max_grad_norm (a Trainer by "
                "that, its own max_grad_norm=0 and offload.TrainerMixin); or declare the "
                "micro_batches that your loop has, or none"
            )
