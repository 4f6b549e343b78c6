"""Where text for people goes."""

from __future__ import annotations

from rich.console import Console

from offload.cli import broken


class Output(Console):
    """A console that leaves it to the caller what a reader that has gone means."""

    def on_broken_pipe(self) -> None:
        """Called while the error is handled: it goes on."""
        raise

    def sentence(self, text: str, style: str | None = None) -> None:
        """A sentence as it is: broken between words on a terminal, in one line elsewhere.

        What is one word stays one, so that a path can be copied; lines keep their indent.
        """
        if self.is_terminal:
            text = "\n".join(broken(line, self.width, _indent(line)) for line in text.split("\n"))
        self.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" "))]
