"""Where text for people goes."""

from __future__ import annotations

from rich.console import Console


class Output(Console):
    """A console that leaves it to the caller what a reader that has gone means."""

    def on_broken_pipe(self) -> None:
        """Called while the error is handled: it goes on."""
        raise

    def sentence(self, text: str, style: str | None = None) -> None:
        """A sentence as it is: broken between words on a terminal, in one line elsewhere."""
        whole = not self.is_terminal
        self.print(text, style=style, highlight=False, markup=False, soft_wrap=whole)
