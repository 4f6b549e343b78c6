"""What `offload bench nvme` tells people: a table by drive, a verdict, and what to paste."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from aio.bench import Together
from aio.figures import DOING, MODES, Figure, Found
from aio.fio import ENGINES, Compared
from aio.ratio import Ratio
from offload.cli.bench_nvme_verdict import GPU_SHARE, EachWay, Verdict
from offload.config import format_bytes

Result = Found | list[Compared] | Together


NARROW_WIDTH = 11
"""Columns of a narrow table break what is wider."""

FIGURE_SECONDS_MIN = 0.3
"""What was measured for less says little: it is told, and not saved."""

WRITES_ODD = 1.5
"""Times as fast as they read: where drives write so, something else took the bytes."""


@dataclass(slots=True)
class Report:
    """All that has been found so far, one path on each drive."""

    found: list[Found] = field(default_factory=list)
    compared: list[list[Compared]] = field(default_factory=list)
    together: list[Together] = field(default_factory=list)

    def add(self, one: Result) -> None:
        """Sorts a result in."""
        if isinstance(one, Found):
            self.found.append(one)
        elif isinstance(one, Together):
            self.together.append(one)
        else:
            self.compared.append(one)

    def each_way(self) -> EachWay:
        """All drives together: as fast as they were at once, else the sum of each alone."""
        alone = [_rates(found) for found in self.found]
        rates: dict[str, float] = {one.mode: one.bytes_per_s for one in self.together}
        for mode in MODES:
            if mode not in rates and all(mode in rate for rate in alone):
                rates[mode] = sum(rate[mode] for rate in alone)
        return EachWay.of(rates)

    @property
    def too_brief(self) -> str | None:
        """What there is to say of figures that were measured for next to no time."""
        figures = [(figure, found) for found in self.found for figure in found.figures]
        brief = [one for one in figures if one[0].seconds < FIGURE_SECONDS_MIN]
        if not brief:
            return None
        figure, found = min(brief, key=lambda one: one[0].seconds)
        smaller = ", or a smaller --size, whose writing takes less of them"
        return (
            f"{DOING[figure.mode]} in {found.path} was measured for {figure.seconds:.2g} s only, "
            f"too little to plan by; try: more --seconds{'' if self.writes_odd else smaller}"
        )

    @property
    def writes_odd(self) -> float | None:
        """Times as fast as it reads that a drive writes, where that is more than drives do."""
        rates = [_rates(found) for found in self.found]
        odd = max((rate["write"] / rate["read"] for rate in rates if rate.get("read")), default=0.0)
        return odd if odd >= WRITES_ODD else None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        compared = [[asdict(c) | {"ratio": asdict(c.ratio)} for c in one] for one in self.compared]
        return {
            "found": [asdict(found) for found in self.found],
            "compared": compared,
            "together": [asdict(one) for one in self.together],
            "each_way": asdict(self.each_way()),
        }


def _rates(found: Found) -> dict[str, float]:
    """Bytes per second by mode, of one drive.

    Where no more than the file could be written, its first write stands for writing.
    """
    rates: dict[str, float] = {figure.mode: figure.bytes_per_s for figure in found.figures}
    return {"write": found.fill_bytes_per_s} | rates


def shown(one: Result, *, narrow: bool = False) -> list[RenderableType]:
    """A result as it is printed; a narrow table breaks settings and headings."""
    if isinstance(one, Found):
        return [_figures(one, narrow)]
    if isinstance(one, Together):
        return [
            f"all drives together, {DOING[one.mode]}: {one.bytes_per_s / 1e9:.2f} GB/s, "
            f"{one.of_sum:.2f} of the sum of each alone"
        ]
    return [_compared(one, narrow)]


def _table(title: str, columns: Sequence[tuple[str, int]], caption: str, *, narrow: bool) -> Table:
    table = Table(
        title=Text(title, style="italic"),  # Names of files may hold brackets.
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0 if narrow else 1),
    )
    for name, width in columns:
        left = name in ("", "setting", "states")
        justify: Any = "left" if left else "right"
        broken = narrow and (width > NARROW_WIDTH or " " in name)
        table.add_column(
            name,
            min_width=min(width, NARROW_WIDTH if broken else len(name)) if narrow else width,
            justify=justify,
            no_wrap=not broken,
            overflow="fold",
        )
    return table


def _figures(found: Found, narrow: bool) -> Table:
    direct = "O_DIRECT" if found.direct else "without O_DIRECT: the page cache's speed"
    columns = [("", 5), ("setting", 23), ("GB/s", 5), ("GiB/s", 5)]
    columns += [("p50 ms", 6), ("p99 ms", 6), ("CPU s/GB", 8)]
    table = _table(
        f"{found.path} ({found.file_system}, {direct})",
        columns,
        "both: reading and writing at once, GB/s (10^9 bytes a second; GiB/s: 2^30) of the two "
        "together. p50, p99: half of the blocks, and 99 of 100, take no longer; counted in powers "
        f"of two. Written in all: {format_bytes(found.bytes_written)}; {len(found.cells)} settings "
        "tried.",
        narrow=narrow,
    )
    for figure in found.figures:
        table.add_row(*_cells(figure))
    return table


def _cells(figure: Figure) -> tuple[str, ...]:
    setting = figure.setting
    return (
        figure.mode,
        f"{block_size(setting.block_bytes)} x {setting.depth} {setting.backend}",
        f"{figure.bytes_per_s / 1e9:.2f}",
        f"{figure.bytes_per_s / 2**30:.2f}",
        milliseconds(figure.p50_s),
        milliseconds(figure.p99_s),
        f"{figure.cpu_s_per_gb:.3f}",
    )


def milliseconds(seconds: float) -> str:
    """To three digits, and never as a power of ten.

    >>> milliseconds(1.42), milliseconds(0.0512), milliseconds(64e-6)
    ('1420', '51.2', '0.064')
    """
    found = seconds * 1e3
    return f"{found:.0f}" if found >= 99.95 else f"{found:.3g}"


def block_size(count: int) -> str:
    """Bytes of a block, in MiB where they are whole."""
    return f"{count >> 20} MiB" if count % (1 << 20) == 0 else f"{count >> 10} KiB"


def _compared(compared: Sequence[Compared], narrow: bool) -> RenderableType:
    if not compared:
        return "not compared with fio: as many bytes as allowed have been written (--writes-max)"
    pooled = Ratio.of([ratio for one in compared for ratio in one.ratios])
    table = _table(
        "beside fio, in turns",
        [("", 5), ("setting", 20), ("fio engine", 10), ("ratio", 18), ("CPU ratio", 9)],
        "Our speed in multiples of fio's; geometric means, in brackets 95% intervals. CPU ratio: "
        f"the same of processor time, where less is better. All speeds: {_interval(pooled)}.",
        narrow=narrow,
    )
    for one in compared:
        setting = one.setting
        table.add_row(
            one.mode,
            f"{block_size(setting.block_bytes)} x {setting.depth}",
            ENGINES[one.fio_setting.backend],
            _interval(one.ratio),
            f"{one.ours_cpu_s_per_gb / max(one.fio_cpu_s_per_gb, 1e-9):.2f}",
        )
    return table


def _interval(ratio: Ratio) -> str:
    return f"{ratio.mean:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


_FORMAT_COLUMNS = (
    ("states", 15),
    ("bytes", 5),
    ("M/s", 6),
    ("s/step", 6),
    ("tokens/step", 11),
    ("GB/step", 7),
    ("endured", 9),
)


def formats(verdict: Verdict, *, narrow: bool = False) -> Table:
    """A row for each state format."""
    table = _table(
        f"Optimizer state on nvme, {verdict.model} parameters, {verdict.gpu}",
        _FORMAT_COLUMNS,
        "states: Config(states=), dtype of the weights, optimizer where it is not Adam; bytes: "
        "of state for each parameter; M/s: million parameters whose state is read and "
        f"written back, {verdict.each_way.how}; GB/step: written; tokens/step: from which the GPU, "
        f"at {GPU_SHARE:.0%} of its peak, takes longer than the drives; endured: steps.",
        narrow=narrow,
    )
    for one in verdict.formats:
        table.add_row(
            one.label,
            f"{one.bytes_per_parameter:.3g}",
            f"{one.parameters_per_s / 1e6:.0f}",
            f"{one.step_seconds:.3g}",
            _rounded(one.tokens_per_step),
            f"{one.written_bytes_per_step / 1e9:.4g}",
            _rounded(one.steps_endured),
        )
    return table


def _rounded(number: float) -> str:
    """To three digits: no drive is steadier than that.

    >>> _rounded(347409.6)
    '347,000'
    """
    return f"{float(f'{number:.3g}'):,.0f}"


_NOT_LOOKED_AT = (
    " All this is of the drive alone: whether weights, gradients and activations fit the memory of "
    "the GPU and of this machine was not looked at."
)


def verdict(found: Verdict, report: Report) -> str:
    """What it means for somebody who trains, in a few sentences."""
    exact, count = found.formats[0], len(report.found)
    drives = "this drive" if count == 1 else f"these {count} drives"
    they = "it endures" if count == 1 else "they endure"
    gpu = f"{found.gpu} ({'assumed, as none is given: ' * found.gpu_assumed}--gpu)"
    endured = f"{found.endurance_bytes / 1e12:.4g} TB"
    if found.endurance_assumed:
        endured += f", assumed (--endurance: the data sheet says what {they})"
    else:
        endured = f"the {endured} that {they} (--endurance)"
    text = (
        f"The optimizer state ({exact.label}) of {exact.parameters_per_s / 1e6:.0f} M parameters "
        f"streams through {drives} each second, {found.each_way.how}, that of a {found.model} "
        f"model in {exact.step_seconds:.3g} s; from {_rounded(exact.tokens_per_step)} tokens per "
        f"step on, {gpu} is what bounds it and no longer the drive. Each step writes "
        f"{exact.written_bytes_per_step / 1e9:.4g} GB: {_rounded(exact.steps_endured)} steps use "
        f"up {endured}."
    )
    text += _room(found) + _NOT_LOOKED_AT + _caches(report)
    if not all(one.direct for one in report.found):
        text += " Without O_DIRECT this may be the page cache's speed: the drive may be far slower."
    if report.too_brief:
        text += f" But {report.too_brief}."
    return text


def _room(found: Verdict) -> str:
    """Whether the optimizer state fits what is free."""
    if found.free_bytes is None:
        return ""
    first = found.formats[0]
    sizes = {
        one.states: one.bytes_per_parameter * found.parameters
        for one in found.formats
        if (one.weights, one.rule) == (first.weights, first.rule)
    }
    name, size = next(iter(sizes.items()))
    free = f"{found.free_bytes / 1e9:.4g} GB are free"
    told = f" The state ({name}) of a {found.model} model takes {size / 1e9:.4g} GB; {free}: "
    if size <= found.free_bytes:
        return f"{told}it fits."
    fits = [one for one in sizes if sizes[one] <= found.free_bytes]
    return f"{told}it does not fit{f', with states={fits[0]!r} it would' if fits else ''}."


def _caches(report: Report) -> str:
    """A doubt about drives that write much faster than they read."""
    if report.writes_odd is None:
        return ""
    return (
        f" But writing was {report.writes_odd:.2g} times as fast as reading: likely a cache took "
        "the bytes, and long training will write slower; a larger --size and more --seconds tell."
    )


def memory(paths: Sequence[str]) -> str:
    """What it means that files in these directories are in memory."""
    which = f"{' and '.join(paths)} {'is' if len(paths) == 1 else 'are'}"
    return (
        f"{which} memory and no drive: what is measured says nothing of training from a drive, so "
        "there is no verdict; to measure a drive, give a directory on it"
    )


def config(paths: Sequence[str], report: Report, backends: Sequence[str]) -> str:
    """Lines to paste: flags, and the same in Python."""
    given = repr(paths[0] if len(paths) == 1 else tuple(paths))
    lines = [
        f"{_typed()} train --optimizer nvme --nvme-path {' '.join(map(shlex.quote, paths))}",
        f"offload.Config(optimizer='nvme', nvme_path={given})",
    ]
    chosen = list(dict.fromkeys(_backends(report)))
    if len(chosen) == 1 and chosen[0] != backends[0]:
        lines.insert(0, f"export AIO_BACKEND={chosen[0]}")
    return "\n".join(lines)


def _typed() -> str:
    """What stands for `offload` where this process was started."""
    typed = sys.argv[0]
    if os.path.basename(typed) == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m offload"
    found = shutil.which("offload")
    reached = found is not None and os.path.realpath(found) == os.path.realpath(typed)
    return "offload" if reached or os.path.basename(typed) != "offload" else shlex.quote(typed)


def _backends(report: Report) -> Iterator[str]:
    for found in report.found:
        if (both := found.figure("both")) is not None:
            yield both.setting.backend
