"""What `offload bench adam` tells people: a table by format, and a verdict in their terms."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from cpu_adam.figures import Figure, Group, Spread

VERDICT_PARAMETERS = 7e9
NARROW_WIDTH = 9
"""Columns of a narrow table break what is wider."""

BOUND_BY_MEMORY = 0.9
"""Share of a stream's speed from which on it is memory that bounds the update."""

CAPTION = (
    "Medians, in brackets the extremes. of stream: speed as a share of an in-place stream over the "
    "update's own memory, of as many bytes as it must move, in the same round; of peer: in "
    "multiples of the faster peer, which does the same whole job (gradient to fp32, fused step, "
    "fp32 to weight)."
)


def table(groups: Sequence[Group], *, narrow: bool = False) -> Table:
    """The figures of one format, by number of threads; a narrow one breaks names and ratios."""
    first = groups[0]
    found = Table(
        title=f"{first.format}: {first.bytes_per_element:.4g} bytes moved per parameter",
        title_justify="left",
        caption=_small(groups),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0 if narrow else 1),
    )
    found.add_column("threads", justify="right", min_width=7)
    found.add_column("by", min_width=None if narrow else 22, no_wrap=not narrow, overflow="fold")
    for name, width in (("M/s", 5), ("GB/s", 5), ("of stream", 16), ("of peer", 7)):
        broken = narrow and width > NARROW_WIDTH
        width = min(width, NARROW_WIDTH) if narrow else width
        found.add_column(
            name, min_width=width, justify="right", no_wrap=not broken, overflow="fold"
        )
    for group in groups:
        for number, figure in enumerate(group.figures):
            found.add_row("" if number else str(group.threads), *_cells(figure))
        found.add_section()
    return found


def _cells(figure: Figure) -> tuple[str, ...]:
    return (
        figure.label,
        f"{figure.parameters_per_s.median / 1e6:.0f}",
        f"{figure.bytes_per_s.median / 1e9:.1f}",
        _ratio(figure.of_stream),
        "-" if figure.of_peer is None else f"{figure.of_peer.median:.2f}",
    )


def _ratio(found: Spread) -> str:
    return f"{found.median:.2f} ({found.min:.2f}-{found.max:.2f})"


def _small(groups: Sequence[Group]) -> str | None:
    """A line about many small tensors, if that was measured."""
    measured = [(group.small, group.threads) for group in groups if group.small is not None]
    if not measured:
        return None
    first = measured[0][0]
    told = [f"{s.extra_us_per_tensor.median:.2f} ({_threads(n)})" for s, n in measured]
    return (
        f"{first.tensors} tensors of {first.elements} in one call: microseconds each on top of the "
        f"memory's time: {', '.join(told)}"
    )


def verdict(groups: Sequence[Group]) -> str:
    """What it means for somebody who trains; by the fastest kernel and number of threads."""
    fastest: dict[str, Group] = {}
    for group in groups:
        known = fastest.setdefault(group.format, group)
        if group.best.seconds.median < known.best.seconds.median:
            fastest[group.format] = group
    told = [_told(next(iter(fastest.values())))]
    others = [f"{name} {_seconds(group)}" for name, group in list(fastest.items())[1:]]
    if others:
        told.append(f"In other formats: {', '.join(others)}.")
    return " ".join(told)


def _told(group: Group) -> str:
    best = group.best
    share = f"{best.of_stream.median:.2f} of an in-place stream"
    memory = best.of_stream.median >= BOUND_BY_MEMORY
    text = (
        f"The update of a {VERDICT_PARAMETERS / 1e9:.0f} B model takes {_seconds(group)} "
        f"({group.format}, {_threads(group.threads)}, {best.name}); bounded by "
        f"{'memory' if memory else 'the processor'} ({share})"
    )
    if best.of_peer is not None:
        peers = [figure for figure in group.figures if figure.role == "peer"]
        peer = min(peers, key=lambda figure: figure.seconds.median)
        text += f"; {best.of_peer.median:.2f} times the speed of {peer.name}"
    return text + "."


def _seconds(group: Group) -> str:
    return f"{VERDICT_PARAMETERS / group.best.parameters_per_s.median:.3g} s"


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
