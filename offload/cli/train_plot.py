"""The loss of a run of `offload train`, drawn. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas


def draw(
    losses: Sequence[float],
    smoothed: Sequence[float],
    held_out: float | None,
    title: str,
    path: str,
) -> None:
    """Loss by step in nats per byte, as it was and smoothed, with the held-out loss at the end."""
    canvas = Canvas(figsize=(7.2, 4.2), dpi=120)
    axis = canvas.subplots()
    steps = range(1, len(losses) + 1)
    axis.plot(steps, losses, color="#9dbce0", linewidth=1, label="training")
    axis.plot(steps, smoothed, color="#1f5fa8", linewidth=1.8, label="training, smoothed")
    if held_out is not None:
        axis.axhline(held_out, color="#d98032", linestyle="--", label=f"held out: {held_out:.3f}")
    axis.set_xlabel("step")
    axis.set_ylabel("loss (nats per byte)")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    canvas.tight_layout()
    canvas.savefig(path)
