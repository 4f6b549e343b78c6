"""Where text for people goes."""

from __future__ import annotations

from rich.console import Console


class Output(Console):
    """A console that leaves it to the caller what a reader that has gone means."""

    def on_broken_pipe(self) -> None:
        """Called while the error is handled: it goes on."""
        raise
