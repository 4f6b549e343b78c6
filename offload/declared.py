"""The backward calls of a step, counted against the number that was declared."""

from __future__ import annotations

from offload.warned import warn_user

OTHER_STEPS = 2
"""So many in a row, after another number of backward calls than was declared, are worth a word."""


class DeclaredBackwards:
    """How many backwards there were since the last step, of how many."""

    def __init__(self, number: int | None):
        """`number` of them make a step, as `Config.micro_batches` says; None: nobody knows."""
        self.number = number
        self._finished = 0
        """Since the last step, or since gradients were touched."""
        self._again = False
        """Whether the count has started again since the last step."""
        self._other_steps = 0
        """In a row, after another number of backward calls than was declared."""
        self.notice: str | None = None
        """What the user was told of that."""

    @property
    def next_is_last(self) -> bool:
        """Whether the backward under way, or the next one, is the last before a step."""
        return self._finished + 1 == self.number

    def ended(self) -> None:
        """A backward that counts has run to its end."""
        self._finished += 1

    def discarded(self) -> None:
        """Gradients may have been thrown away: the next backward may be the first of a step."""
        self._again = self._again or self._finished > 0
        self._finished = 0

    def stepped(self) -> None:
        """A step was taken."""
        self._finished = 0

    def look(self, *, counts: bool, early: bool) -> None:
        """A step comes; tell once where it is not the first one after another number of backwards.

        Of two in a row, as one may end an epoch. Before anything of the step is done, as filters
        may make an error of it.

        Args:
            counts: whether the number tells anything; where updates have begun more are refused.
            early: whether updates may begin inside a backward, so that something is lost.
        """
        declared, found = self.number, self._finished
        counts = counts and not self._again
        other = declared is not None and found not in (0, declared) and counts
        self._other_steps, self._again = self._other_steps + 1 if other else 0, False
        if self._other_steps < OTHER_STEPS or self.notice is not None or declared is None:
            return
        idle = ": no update begins inside a backward then" if early else ""
        cause, remedy = f"the loop accumulates {found}", f"micro_batches={found}"
        if found == 1:
            cause = "step() is called after each backward, as that of DeepSpeed's engine is"
            remedy = f"step() after every {declared} backward calls, or micro_batches=1"
        self.notice = (
            f"Config.micro_batches={declared} declares so many backward calls before each step(), "
            f"but {OTHER_STEPS} steps in a row came after {'fewer' if found < declared else 'more'}"
            f", the last after {found}{idle}; likely {cause}; try {remedy}, or leave it out where "
            "the number varies"
        )
        warn_user(self.notice)
