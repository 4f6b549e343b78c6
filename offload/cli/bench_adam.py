"""`offload bench adam`: the update against this machine's memory and against its peers."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import platform
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import torch
import tyro

import cpu_adam
from cpu_adam import FORMATS, bench, choice, peers
from cpu_adam.figures import Group
from offload.cli import Signals, bad_input, bench_adam_report, display, measuring, nearest
from offload.cli.console import Output
from offload.cli.flags import Flags, flag
from offload.config import format_bytes, parse_bytes
from offload.machine import host_free_bytes

ELEMENTS_MAX = 2**40
THREADS_MAX = 1024
SECONDS_MAX = 3600
CACHED_ELEMENTS = 16 << 20
"""With fewer, the caches of a large processor may hold what should stream from memory."""

_List = tyro.conf.arg(help_behavior_hint="")


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """Measure the update of parameters in CPU memory: parameters per second by state format, kernel
    and number of threads, as a share of what memory gives, beside torch's and DeepSpeed's.

    Raises:
        ValueError: a field holds what it cannot mean; the message names the flag.
    """

    elements: Annotated[str, tyro.conf.arg(metavar="COUNT")] = "64Mi"
    """Parameters in one update, such as 1Mi or 256Mi."""

    formats: Annotated[tuple[str, ...], _List] = ()
    """Formats of the states, such as exact fp32. Default: all."""

    kernels: Annotated[tuple[str, ...], _List] = ()
    """Kernels, such as avx2 portable python. Default: all compiled ones that run here."""

    threads: Annotated[tuple[int, ...], _List] = ()
    """Numbers of threads to try, such as 2 1. Default: one per core, and 1."""

    gradients: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type of the gradients."""

    seconds: float = 25.0
    """Seconds to measure, about; a few rounds are made however long they take."""

    peers: bool = True
    """Compare with torch's fused optimizers and, if installed, DeepSpeed's."""

    plot: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """File for a bar chart too (.png, .svg, .pdf); needs matplotlib. Default: none."""

    json: bool = False
    """One JSON object on standard output, nothing else there."""

    def __post_init__(self) -> None:
        right = 1 <= self.count <= ELEMENTS_MAX
        self._check("elements", right, "a number of parameters, such as 64Mi, at most 1Ti")
        right = all(1 <= count <= THREADS_MAX for count in self.threads)
        self._check("threads", right, f"numbers from 1 to {THREADS_MAX}")
        right = 0 <= self.seconds <= SECONDS_MAX
        self._check("seconds", right, f"0 to {SECONDS_MAX}")
        self._check("plot", self.plot != "", "the path of a file")
        self._check_names("formats", tuple(FORMATS))
        self._check_names("kernels", choice.available())

    @property
    def count(self) -> int:
        """`elements` as a number, 0 where it is none."""
        try:
            return parse_bytes(self.elements)
        except ValueError:
            return 0

    def _check(self, name: str, right: bool, expected: str) -> None:
        if not right:
            value = getattr(self, name)
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise ValueError(f"{flag(name)} {shown}: expected {expected}")

    def _check_names(self, name: str, known: Sequence[str]) -> None:
        for found in getattr(self, name):
            if found not in known:
                raise ValueError(
                    f"{flag(name)} {found}: there is none of that name here"
                    f"{nearest(found, known)}; there are {', '.join(known)}"
                )


FLAGS = Flags(
    kind=Adam,
    command="offload bench adam",
    known=tuple(field.name for field in dataclasses.fields(Adam)),
)
"""The flags of `offload bench adam`."""


def command(arguments: Sequence[str]) -> None:
    """Measures as `arguments` say; what can be refused is refused before.

    Raises:
        BadInput: the arguments, or there is too little memory; nothing has been measured.
        Stopped: by Ctrl-C or SIGTERM.
    """
    asked = FLAGS.parse(arguments)
    # Results go to standard output, progress and remarks to standard error.
    console, remarks = Output(stderr=asked.json), Output(stderr=True)
    with Signals() as signals:
        signals.where, busy = "before the first figure", measuring.busy()
        with bad_input():
            draw = asked.plot and measuring.drawing(asked.plot, "offload.cli.bench_adam_plot")
        if asked.peers and importlib.util.find_spec("deepspeed") is not None:
            remarks.sentence("note: DeepSpeed compiles its CPUAdam at its first use")
        with bad_input():
            wanted, notices = _wanted(asked)
            _check_memory(asked, wanted)
        notices += [busy] if busy else []
        for notice in notices:
            remarks.sentence(f"note: {notice}")
        machine, versions = _machine(), _versions()
        heading = f"{asked.elements} parameters, {asked.gradients} gradients; {machine['cpu']}, "
        heading += f"{machine['cores']} cores; torch {versions['torch']}"
        console.sentence(heading)
        groups: list[Group] = []
        with measuring.bar(remarks) as progress:

            def told(share: float, what: str) -> None:
                signals.where = f"while measuring {what}"
                progress(share, what)

            for group in bench.measure(wanted, told):
                groups.append(group)
                if len(groups) % len(wanted.threads) == 0:
                    shown, narrow = groups[-len(wanted.threads) :], display.is_narrow(console.width)
                    console.print(bench_adam_report.table(shown, narrow=narrow), "")
        console.print(bench_adam_report.CAPTION, style="dim", highlight=False)
        verdict = bench_adam_report.verdict(groups)
        verdict += f" But {busy}." if busy else ""
        console.print(verdict, highlight=False)
        if draw:
            signals.where = "while drawing"
            remarks.sentence(draw(groups, heading))
    if asked.json:
        found = {
            "kind": "bench adam",
            "machine": machine,
            "versions": versions,
            "elements": wanted.elements,
            "gradients": asked.gradients,
            "notices": notices,
            "groups": [asdict(group) for group in groups],
            "verdict": verdict,
        }
        sys.stdout.write(json.dumps(found, indent=2) + "\n")


def _wanted(asked: Adam) -> tuple[bench.Wanted, list[str]]:
    """What to measure, and what the user should know about it."""
    notices = []
    with warnings.catch_warnings(record=True):  # Said below, once.
        warnings.simplefilter("always")
        kernel = cpu_adam.kernel()
    if kernel.native is None:
        notices.append(
            f"the Python reference serves, and memory is measured by torch ({kernel.reason})"
        )
    formats = asked.formats or tuple(FORMATS)
    found: tuple[peers.Peer, ...] = ()
    if asked.peers:
        found, left_out = peers.usable({FORMATS[name].rule for name in formats})
        notices += [f"without {name}: {why}" for name, why in left_out.items()]
    if asked.count < CACHED_ELEMENTS:
        notices.append(
            f"{asked.elements} parameters may fit into the processor's caches: for the speed of "
            "memory take more, such as --elements 64Mi"
        )
    wanted = bench.Wanted(
        elements=asked.count,
        formats=measuring.once(formats),
        kernels=measuring.once(asked.kernels or bench.default_kernels()),
        threads=measuring.once(asked.threads or (cpu_adam.threads(), 1)),
        gradient=bench.GRADIENTS[asked.gradients],
        peers=found,
        seconds=asked.seconds,
    )
    return wanted, notices


def _check_memory(asked: Adam, wanted: bench.Wanted) -> None:
    """Refuses what would be killed for its memory.

    Raises:
        ValueError: less is free than it needs.
    """
    needed, free = bench.needed_bytes(wanted), host_free_bytes()
    if needed > free:
        fits = wanted.elements * free // needed >> 20
        remedy = f"--elements {fits}Mi" if fits else "end other programs"
        raise ValueError(
            f"asked for updates of {asked.elements} parameters, which take {format_bytes(needed)} "
            f"of memory; found {format_bytes(free)} free; likely cause: more parameters than this "
            f"machine, or the limit of its container, has room for; try: {remedy}"
        )


def _machine() -> dict[str, Any]:
    return {
        "cpu": measuring.processor(),
        "cores": measuring.cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "huge_pages": _huge_pages(),
        "system": platform.platform(),
        "kernel": cpu_adam.kernel().name,
        "kernels": list(choice.available()),
    }


def _huge_pages() -> str:
    """When Linux gives them: always, madvise (which is asked for) or never."""
    with contextlib.suppress(OSError):
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text("utf-8")
        return text.partition("[")[2].partition("]")[0]
    return "unknown"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("offload-engine", "numpy", "deepspeed"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
