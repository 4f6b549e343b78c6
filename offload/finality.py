"""When a gradient is final before `step()`, and what must then follow.

[Note: Updates inside backward]
Only the user knows which backward is the last before a step. Where `Config.micro_batches` says so,
a unit's gradient is final in that backward once all its parameters' gradients have come as often as
they came in the backward before; its update is frozen then and begins under the backward of the
units before it. From there on `step()` must follow, with the hyper-parameters that were frozen:
whatever would look at half-updated weights or change a gradient that is used already is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from offload.updates import Frozen, Turn


class Finality:
    """The backward calls since the last step, and the updates begun before the next."""

    def __init__(self, micro_batches: int | None):
        """`micro_batches` backward calls make a step; None: unknown, nothing begins early."""
        self.freeze: Callable[[int], Mapping[int, Turn]] = lambda unit: {}
        """What a step taken now would do to a unit; set by the optimizer."""
        self.begun: dict[int, Mapping[int, Turn]] = {}
        """Updates begun before `step()`, by unit."""
        self._micro_batches = micro_batches
        self._backwards = 0
        self._produced = False

    @property
    def in_last_backward(self) -> bool:
        """Whether the backward under way is known to be the last before a step."""
        return self._micro_batches is not None and self._backwards == self._micro_batches - 1

    def gradient_came(self) -> None:
        """The backward under way has produced a gradient of a parameter."""
        self._produced = True

    def backward_ended(self) -> None:
        """An outermost backward has ended; without a parameter's gradient it does not count."""
        self._backwards += self._produced
        self._produced = False

    def begin(self, unit: int) -> Mapping[int, Turn]:
        """Freeze the update of a unit whose gradient is final."""
        turns = self.begun[unit] = self.freeze(unit)
        return turns

    def require_open(self, unit: int, name: str) -> None:
        """A gradient of `unit` has come.

        Raises:
            RuntimeError: its update has begun without it.
        """
        if unit in self.begun:
            raise RuntimeError(
                f"another gradient of {name} came after its update had begun: the parameters are "
                "used more often than in the backward before, and the weights are now wrong. Leave "
                "Config.micro_batches out for such a loop, and start from the last checkpoint"
            )

    def require_step(self, what: str) -> None:
        """Something is asked that makes no sense between an early update and its step.

        Raises:
            RuntimeError: `step()` has to come first.
        """
        if self.begun:
            raise RuntimeError(
                f"{what} came before step(), but Config.micro_batches={self._micro_batches} "
                "declared that step() follows and updates have begun: call step() first, or leave "
                "micro_batches out"
            )

    def rest_of(self, frozen: Frozen) -> Frozen:
        """What of a step has not begun yet; the step is then taken.

        Raises:
            RuntimeError: the step is not the one that was begun.
        """
        begun = self.begun
        if any(frozen.get(unit, {}) != turns for unit, turns in begun.items()):
            raise RuntimeError(
                "learning rate, decay or another hyper-parameter changed between the last backward "
                "and step(), but updates had begun with the earlier values. Put them back and call "
                "step() again; change them after step(), or leave Config.micro_batches out"
            )
        self.begun, self._backwards = {}, 0
        return {unit: turns for unit, turns in frozen.items() if unit not in begun}
