"""What `offload bench nvme` tells people: a table by drive, a verdict, and what to paste."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from aio.bench import Together
from aio.figures import Figure, Found
from aio.fio import ENGINES, Compared
from aio.ratio import Ratio
from offload.cli.bench_nvme_verdict import GPU_SHARE, Verdict
from offload.config import format_bytes

Result = Found | list[Compared] | Together


@dataclass(slots=True)
class Report:
    """All that has been found so far."""

    found: list[Found] = field(default_factory=list)
    compared: list[list[Compared]] = field(default_factory=list)
    together: list[Together] = field(default_factory=list)
    drives: tuple[int, ...] = ()
    """By path the number of the first that is on the same drive; none: each is on its own."""

    def add(self, one: Result) -> None:
        """Sorts a result in."""
        if isinstance(one, Found):
            self.found.append(one)
        elif isinstance(one, Together):
            self.together.append(one)
        else:
            self.compared.append(one)

    def each_way_bytes_per_s(self) -> float:
        """Read and as much written, by all drives together: at once, or in turns if faster."""
        at_once = {one.mode: one.bytes_per_s for one in self.together}
        if len(self.found) > 1 and "both" in at_once:
            return at_once["both"] / 2
        rates: dict[int, float] = {}
        for number, found in enumerate(self.found):
            drive = self.drives[number] if self.drives else number
            rates[drive] = max(rates.get(drive, 0.0), each_way(found))
        return sum(rates.values())

    @property
    def count(self) -> int:
        """Drives, however many of the paths are on each."""
        return len(set(self.drives)) if self.drives else len(self.found)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        compared = [[asdict(c) | {"ratio": asdict(c.ratio)} for c in one] for one in self.compared]
        return {
            "found": [asdict(found) for found in self.found],
            "compared": compared,
            "together": [asdict(one) for one in self.together],
            "each_way_bytes_per_s": self.each_way_bytes_per_s(),
        }


def each_way(found: Found) -> float:
    """Bytes per second read, and as many written, by one drive.

    Where no more than the file could be written, its first write stands for writing.
    """
    rates = {figure.mode: figure.bytes_per_s for figure in found.figures}
    at_once = rates.get("both", 0.0) / 2
    write = rates.get("write", found.fill_bytes_per_s)
    in_turns = 1 / (1 / rates["read"] + 1 / write)
    return max(at_once, in_turns)


def shown(one: Result) -> list[RenderableType]:
    """A result as it is printed."""
    if isinstance(one, Found):
        return [_figures(one)]
    if isinstance(one, Together):
        return [
            f"all drives at once, {one.mode}: {one.bytes_per_s / 1e9:.2f} GB/s, "
            f"{one.of_sum:.2f} of the sum of each alone"
        ]
    return [_compared(one)]


def _table(title: str, columns: Sequence[tuple[str, int]], caption: str | None = None) -> Table:
    table = Table(
        title=Text(title, style="italic"),  # Names of files may hold brackets.
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name, width in columns:
        left = name in ("", "setting", "states")
        justify: Any = "left" if left else "right"
        table.add_column(name, min_width=width, justify=justify, no_wrap=True)
    return table


def _figures(found: Found) -> Table:
    direct = (
        "O_DIRECT" if found.direct else "without O_DIRECT: the page cache's speed, not only its"
    )
    columns = [("", 5), ("setting", 23), ("GB/s", 5), ("GiB/s", 5)]
    columns += [("p50 ms", 6), ("p99 ms", 6), ("CPU s/GB", 8)]
    table = _table(
        f"{found.path} ({found.file_system}, {direct})",
        columns,
        f"GB/s: 10^9 bytes a second, in both directions together; GiB/s: 2^30. Latency of one "
        f"block, between powers of two. Written in all: {format_bytes(found.bytes_written)}; "
        f"{len(found.cells)} settings tried.",
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
        f"{figure.p50_s * 1e3:.3g}",
        f"{figure.p99_s * 1e3:.3g}",
        f"{figure.cpu_s_per_gb:.3f}",
    )


def block_size(count: int) -> str:
    """Bytes of a block, in MiB where they are whole."""
    return f"{count >> 20} MiB" if count % (1 << 20) == 0 else f"{count >> 10} KiB"


def _compared(compared: Sequence[Compared]) -> RenderableType:
    if not compared:
        return "not compared with fio: as many bytes as allowed have been written (--writes-max)"
    pooled = Ratio.of([ratio for one in compared for ratio in one.ratios])
    table = _table(
        "beside fio, in turns",
        [("", 5), ("setting", 20), ("fio engine", 10), ("ratio", 18), ("CPU ratio", 9)],
        f"Our speed in multiples of fio's; geometric means, in brackets 95% intervals. All: "
        f"{_interval(pooled)}.",
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
    ("states", 10),
    ("bytes", 5),
    ("M/s", 6),
    ("s/step", 6),
    ("tokens/step", 11),
    ("GB/step", 8),
    ("steps endured", 13),
)


def formats(verdict: Verdict) -> Table:
    """A row for each state format."""
    table = _table(
        f"Optimizer state on these drives, {verdict.model} parameters, {verdict.gpu}",
        _FORMAT_COLUMNS,
        "bytes: of state for each parameter; M/s: million parameters whose state is read and "
        "written back; GB/step: written; tokens/step: from which the GPU, at "
        f"{GPU_SHARE:.0%} of its peak, takes longer than the drives.",
    )
    for one in verdict.formats:
        table.add_row(
            one.name,
            f"{one.bytes_per_parameter:.3g}",
            f"{one.parameters_per_s / 1e6:.0f}",
            f"{one.step_seconds:.3g}",
            f"{one.tokens_per_step:,.0f}",
            f"{one.written_bytes_per_step / 1e9:.4g}",
            f"{one.steps_endured:,.0f}",
        )
    return table


def verdict(found: Verdict, report: Report) -> str:
    """What it means for somebody who trains, in a few sentences."""
    exact = found.formats[0]
    drives = "this drive" if report.count == 1 else f"these {report.count} drives"
    text = (
        f"The optimizer state ({exact.name}) of {exact.parameters_per_s / 1e6:.0f} M parameters "
        f"streams through {drives} each second, that of a {found.model} model in "
        f"{exact.step_seconds:.3g} s; from {exact.tokens_per_step:,.0f} tokens per step on, "
        f"{found.gpu} is what bounds it and no longer the drive. Each step writes "
        f"{exact.written_bytes_per_step / 1e9:.4g} GB: {exact.steps_endured:,.0f} steps use up "
        f"the {found.endurance_bytes / 1e12:.4g} TB that the drives endure."
    )
    if not all(one.direct for one in report.found):
        text += " Without O_DIRECT this is the page cache's speed too: the drive may be far slower."
    return text


def config(paths: Sequence[str], report: Report, backends: Sequence[str]) -> str:
    """Lines to paste: flags, and the same in Python."""
    listed = "".join(f"{path!r}, " for path in paths).rstrip()
    lines = [
        f"offload train --optimizer nvme --nvme-path {' '.join(map(shlex.quote, paths))}",
        f"offload.Config(optimizer='nvme', nvme_path=({listed}))",
    ]
    chosen = list(dict.fromkeys(_backends(report)))
    if len(chosen) == 1 and chosen[0] != backends[0]:
        lines.insert(0, f"export AIO_BACKEND={chosen[0]}")
    return "\n".join(lines)


def _backends(report: Report) -> Iterator[str]:
    for found in report.found:
        if (both := found.figure("both")) is not None:
            yield both.setting.backend
