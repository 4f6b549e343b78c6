"""What a training step costs beside plain torch, fio and DeepSpeed: a table of ratios.

    python -m benchmarks.step DIRECTORY [--rows 2 7] [--rounds 5] [--deepspeed PYTHON] [--json FILE]

Rows 1 to 7 train the GPT of 202 M parameters by which peers are measured (width 1024, 12 layers,
vocabulary 24576, batch 2 x 256, bfloat16, AdamW), each system in a process of its own. Plain is
torch's fused AdamW on bfloat16 weights and moments, which is less work than ours with exact fp32
masters. In each round all take their turns in random order, so that what else the machine does
falls on all alike; a first round is not counted. A turn is some steps after one that is not timed,
which leaves as much of its update to do as the last one leaves. fio moves the bytes that the disk
lane moved in a step by the engine's report, half of them each way, both ways at once, in huge
pages, with the best of a few settings. A figure is the median over the rounds, with the least and
the most; the seconds below it are medians, too.

DIRECTORY lies on a local drive; no file is left there. PYTHON is that of an environment with
DeepSpeed (pip install torch==2.13.0 numpy ninja psutil deepspeed==0.19.8; apt: libaio-dev), which
compiles for minutes when it first runs. Row 12 has durable
runs beside others. Row 1 takes 16 GiB of memory, row 5 13, the others less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import groupby, product
from random import Random
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks import hooks
from benchmarks.disk import Disk
from benchmarks.loops import Loop, Process

GPT = {"width": 1024, "depth": 12, "words": 24576, "length": 256, "batch": 2}
TINY_GPT = {"width": 64, "depth": 2, "words": 512, "length": 16, "batch": 2}
CHAINS, TINY_CHAINS = {128: 64, 256: 64, 512: 32, 1024: 16}, {16: 2, 32: 2}
"""Layers by width, whose units are of 66 KiB to 4 MiB."""

AHEAD_BYTES = 256 << 20
"""What an update may have read before it begins, and may write after the next step has begun."""

Turn = dict[str, float]
Round = dict[str, Turn]
Player = Callable[[], Turn]


def over_stock(ours: Turn, plain: Turn, fio: Turn) -> float:
    """Over the least that the stock loop can take: the update begins at `step()` and ends under the
    next forward, but for what is read before it and written after."""
    left = fio["step"] * max(0.0, 1 - 2 * AHEAD_BYTES / max(1.0, ours["bytes"]))
    return ours["step"] / max(plain["step"], plain["backward"] + max(plain["forward"], left))


TORCH, FIO, LONGER = "over torch", "over fio", "over max(torch, fio)"
STOCK, PEER = "over max(torch, its bound by fio)", "under DeepSpeed"
RATIOS: dict[str, Callable[[Turn, Turn, Turn], float]] = {
    TORCH: lambda ours, peer, fio: ours["step"] / peer["step"],
    FIO: lambda ours, peer, fio: ours["step"] / fio["step"],
    LONGER: lambda ours, peer, fio: ours["step"] / max(peer["step"], fio["step"]),
    STOCK: over_stock,
    PEER: lambda ours, peer, fio: peer["step"] / ours["step"],
}


class Case(NamedTuple):
    """An attached GPT: who runs beside it, where its weights, gradients and states live, what its
    steps are measured by, and further fields of its Config."""

    row: int
    peer: str
    what: str
    asked: str
    tiers: str
    ratio: str
    config: Mapping[str, Any]


DEVICE, RAM, NVME = "device device device", "cpu cpu cpu", "nvme nvme nvme"
RAM_STATES, NVME_STATES = "device device cpu", "cpu cpu nvme"
STOCK_LOOP, EARLY, COMPACT = dict[str, Any](), {"micro_batches": 1}, {"states": "compact"}

CASES = (
    Case(1, "plain", "all on the device", "<= 1.02", DEVICE, TORCH, STOCK_LOOP),
    Case(1, "plain", "states in CPU memory", "<= 1.03", RAM_STATES, TORCH, STOCK_LOOP),
    Case(1, "plain", "gradients and states there", "<= 1.02", "device cpu cpu", TORCH, STOCK_LOOP),
    Case(1, "plain", "weights too", "<= 1.02", RAM, TORCH, STOCK_LOOP),
    Case(2, "plain", "nvme states, declared", "<= 1.08", NVME_STATES, LONGER, EARLY),
    Case(3, "plain", "nvme states, stock loop", "<= 1.10", NVME_STATES, STOCK, STOCK_LOOP),
    Case(4, "plain", "compact, declared", "<= 1.08", NVME_STATES, LONGER, EARLY | COMPACT),
    Case(4, "plain", "all on nvme, declared", "<= 1.25", NVME, LONGER, EARLY),
    Case(5, "DeepSpeed cpu", "states in CPU memory", "2.4", RAM_STATES, PEER, STOCK_LOOP),
    Case(5, "DeepSpeed nvme", "nvme states, declared", "2.1", NVME_STATES, PEER, EARLY),
    Case(5, "DeepSpeed nvme", "compact, declared", "2.5", NVME_STATES, PEER, EARLY | COMPACT),
    Case(7, "", "the update alone", "<= 1.05", NVME_STATES, FIO, STOCK_LOOP),
    Case(7, "", "the update alone, compact", "<= 1.05", NVME_STATES, FIO, COMPACT),
)
"""Rows 1 to 5 and 7. Declared is micro_batches=1, by which updates begin inside backward."""


PREDICTED = tuple(
    " ".join(tiers)
    for tiers in product(("device", "cpu", "nvme"), ("device", "cpu", "nvme"), ("cpu", "nvme"))
    if tiers[:2] != ("device", "device")
)
"""Placements of which no unit lives on the device."""


class Figure(NamedTuple):
    """One figure of the table, by round; without any, why there is none."""

    row: int
    what: str
    asked: str = ""
    values: Sequence[float] = ()
    behind: str = ""
    unit: str = ""

    def show(self, file: str | None) -> None:
        """Print it, and append it to a file."""
        line = f"{self.row:2}  {self.what}"
        if self.values:
            line = f"{line:62}{median(self.values):8.3f} {self.unit:3} "
            line += f"({min(self.values):.3f} to {max(self.values):.3f})"
            line += f", asked {self.asked}" * bool(self.asked)
        print(f"{line}\n    {self.behind}", flush=True)
        if file:
            at = {"at": datetime.now().isoformat(timespec="seconds"), "load": os.getloadavg()[0]}
            with open(file, "a", encoding="utf-8") as kept:
                kept.write(json.dumps(self._asdict() | at) + "\n")


def behind(rounds: Sequence[Round], *names: str) -> str:
    """The medians behind a figure, with the bytes that the disk lane moved."""
    parts = []
    for name in filter(rounds[0].get, names):
        moved = rounds[-1][name].get("bytes", 0.0) / 1e9
        seconds = median(one[name]["step"] for one in rounds)
        parts.append(f"{name} {seconds:.4g} s" + f" ({moved:.3g} GB)" * bool(moved))
    return ", ".join(parts)


class Bench:
    """The rows, each of which gives its figures, and what they share."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked, self._directory, self._tiny = asked, asked.directory, asked.tiny
        self._gpt = TINY_GPT if asked.tiny else GPT
        self._last = dict[str, Turn]()
        """By player."""
        self.opened = contextlib.ExitStack()
        """What a row has opened."""

    # -- who takes part, and in what order -------------------------------------------------------

    def _loop(self, who: str, *, model: Any = None, watch: bool = False, **config: Any) -> Any:
        """One who trains: plain, unfused, "ours" and three tiers, or "DeepSpeed" and one."""
        system, *tiers = who.split()
        spec = {"system": system, "model": model or self._gpt, "tiers": tiers, "config": config}
        # The records of a durable run stay, and go with its directory.
        spec["directory"], python = config.get("durable", self._directory), sys.executable
        if system == "DeepSpeed":
            if not (python := self._asked.deepspeed):
                raise RuntimeError("no DeepSpeed: give --deepspeed PYTHON")
            files = tempfile.TemporaryDirectory(dir=self._directory, ignore_cleanup_errors=True)
            spec["directory"] = self.opened.enter_context(files)
        apart = watch or not self._tiny or system == "DeepSpeed"
        made = Process(spec, python, watch=watch) if apart else Loop(spec)
        self.opened.callback(made.close)
        return made

    def _turns(self, loop: Any, times: int = 1) -> Player:
        return partial(loop.turn, unseen=1, steps=times * self._asked.steps)

    def _disk(self) -> Disk:
        size = 64 << 20 if self._tiny else 4 << 30
        return self.opened.enter_context(Disk(self._directory, size))

    def _rounds(self, players: Mapping[str, Player]) -> list[Round]:
        """All players in random order in each round, but for a first round that is not counted."""
        found, choice, names = list[Round](), Random(0), list(players)
        for number in range(1 + self._asked.rounds):
            for name in choice.sample(names, len(names)) if number else names:
                self._last[name] = players[name]()
            found.append({name: self._last[name] for name in names})
        return found[1:]

    # -- the rows --------------------------------------------------------------------------------

    def compared(self, cases: Sequence[Case]) -> Iterator[Figure]:
        """Cases beside their peer, and beside fio for the bytes that each has moved last."""
        peer = cases[0].peer
        players = {peer: self._turns(self._loop(peer))} if peer else {}
        for case in cases:
            loop = self._loop(f"ours {case.tiers}", **case.config)
            players[case.what] = self._turns(loop) if peer else loop.update
        if "fio" in cases[0].ratio:
            disk = self._disk()
            disk.choose()

            def fio(what: str) -> Turn:
                return {"step": disk.fio(self._last[what]["bytes"])}

            players |= {f"fio for {case.what}": partial(fio, case.what) for case in cases}
        rounds, none = self._rounds(players), {"step": 0.0}
        for case in cases:
            names, ratio = (case.what, peer, f"fio for {case.what}"), RATIOS[case.ratio]
            values = [ratio(*(one.get(name, none) for name in names)) for one in rounds]
            what, told = f"{case.what}, {case.ratio}", behind(rounds, *names)
            yield Figure(case.row, what, case.asked, values, told)

    def row_6(self) -> Iterator[Figure]:
        """Memory."""
        for who, asked in (f"ours {NVME_STATES}", "<= 1.4"), ("DeepSpeed nvme", ""):
            loop = self._loop(who, watch=True)
            begun = len(loop.memory)
            loop.turn(unseen=1, steps=2)
            parts = loop.memory[:begun], loop.memory[begun:]
            made, trained = (max(part, default=0) / 2**30 for part in parts)
            told = f"{made:.2f} GiB to make it, {trained:.2f} GiB in steps"
            yield Figure(6, f"peak memory, {who}", asked, [max(made, trained)], told, "GiB")
            self.opened.close()

    def row_8(self) -> Iterator[Figure]:
        """What a unit costs whatever its size: the intercept of a line through several sizes, for
        which an error counts by its share of the step. Torch has one thread; unfused is AdamW as
        it comes."""
        ram, nvme, found = f"ours {RAM}", f"ours {NVME}", dict[int, list[Round]]()
        chains = TINY_CHAINS if self._tiny else CHAINS
        for width, depth in chains.items():
            players = dict[str, Player]()
            for who in ("plain", "unfused", ram, nvme):
                loop = self._loop(who, model={"width": width, "depth": depth})
                players[who] = self._turns(loop, times=5)
            found[width] = self._rounds(players)
            self.opened.close()
        sizes, depths = [4 * width * (width + 1) for width in chains], [*chains.values()]
        for who, asked in (ram, "<= 30"), (nvme, "<= 400"):
            values = []
            for some in zip(*found.values()):
                ours, plain = (np.array([one[w]["step"] for one in some]) for w in (who, "plain"))
                above = (ours - plain) / depths
                values.append(1e6 * float(np.polyfit(sizes, above, 1, w=depths / ours)[1]))
            told = "; ".join(f"{w}: {behind(r, 'plain', who)}" for w, r in found.items())
            yield Figure(8, f"fixed cost of a unit and step, {who}", asked, values, told, "us")
        least = found[min(chains)]
        for peer, asked in ("unfused", "<= 1.05"), ("plain", ""):
            values = [one[ram]["step"] / one[peer]["step"] for one in least]
            what = f"64 units of 66 KiB, {ram}, over {peer} torch"
            yield Figure(8, what, asked, values, behind(least, peer, ram))

    def row_9(self) -> Iterator[Figure]:
        """Hooks."""
        names = "without an engine", "empty hooks", "weights and gradients on cpu"
        rounds = hooks.measure({name: hooks.KINDS[name] for name in names}, 3 * self._asked.rounds)
        for verb in hooks.VERBS[:2]:
            floor = median(hooks.above(rounds, names[1], verb))
            told = f"as many empty hooks of Python: {floor:.1f} us"
            asked, values = "<= 8, or 1.5 x empty native hooks", hooks.above(rounds, names[2], verb)
            yield Figure(9, f"a streamed unit above plain, {verb}", asked, values, told, "us")
        large, host = hooks.measure(hooks.LARGE, self._asked.rounds, steps=True), list[float]()
        for plain, ours in zip(*large.values()):
            own = ours["step"][0] + sum(ours[v][0] - plain[v][0] for v in hooks.VERBS[:2])
            host.append(own * hooks.BLOCKS / 1e3)
        what = f"the host's own time of a step, {hooks.BLOCKS} blocks of {hooks.PARTS} parameters"
        yield Figure(9, what, "<= 40", host, "forward, backward and step() of the engine", "ms")

    def row_10(self) -> Iterator[Figure]:
        """The drive, where a small batch leaves the step to it."""
        disk = self._disk()
        model = self._gpt | {"batch": 1, "length": self._gpt["length"] // 4}
        ours = self._turns(self._loop(f"ours {NVME}", model=model, **EARLY))
        bench = partial(disk.both, 0.1 if self._tiny else 2.0)
        rounds = self._rounds({"ours": ours, "bench nvme": bench})
        lane, drive = (
            [one[name]["bytes"] / one[name]["busy"] for one in rounds] for name in rounds[0]
        )
        busy = median(one["ours"]["busy"] / one["ours"]["step"] for one in rounds)
        told = f"{median(lane) / 1e9:.2f} GB/s, busy for {busy:.0%} of a step, "
        told += f"of {median(drive) / 1e9:.2f} GB/s"
        values = [a / b for a, b in zip(lane, drive)]
        yield Figure(10, "the disk lane in training over bench nvme", ">= 0.9", values, told)

    def row_11(self) -> Iterator[Figure]:
        """Predictions."""
        ratios = list[float]()
        for tiers in PREDICTED:
            loop = self._loop(f"ours {tiers}", **EARLY)
            loop.turn(unseen=2, steps=2 + self._asked.rounds)
            found = loop.predicted()
            ratios.append(found["predicted"] / found["step"])
            told = f"predicted {found['predicted']:.4g} s, measured {found['step']:.4g} s"
            yield Figure(11, f"predicted over measured, {tiers}", "", ratios[-1:], told)
            self.opened.close()
        what = f"the median of {len(ratios)} placements"
        yield Figure(11, what, "0.93 to 1.07", [median(ratios)], "of the figures above")

    def row_12(self) -> Iterator[Figure]:
        """Commits of a durable run."""
        for tiers, loop, config in (
            (NVME_STATES, "declared", EARLY),
            (NVME_STATES, "stock loop", STOCK_LOOP),
            (RAM, "stock loop, as often as it likes", STOCK_LOOP),
        ):
            run = self.opened.enter_context(tempfile.TemporaryDirectory(dir=self._directory))
            players = {
                who: self._turns(self._loop(f"ours {tiers}", **config, **more))
                for who, more in {"scratch": {}, "durable": {"durable": run}}.items()
            }
            rounds = self._rounds(players)
            values = [one["durable"]["step"] / one["scratch"]["step"] for one in rounds]
            what = f"durable over not, {tiers}, {loop}"
            yield Figure(12, what, "", values, behind(rounds, "scratch", "durable"))
            self.opened.close()


def main() -> None:
    """Print the rows that are asked for, each as it is done."""
    form, every = argparse.RawTextHelpFormatter, range(1, 13)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("directory")
    parser.add_argument("--rows", nargs="+", type=int, choices=every, default=every, metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed in a turn")
    parser.add_argument("--deepspeed", metavar="PYTHON")
    parser.add_argument("--json", metavar="FILE", help="append a line for each figure")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the command")
    asked = parser.parse_args()
    for row in asked.rows:
        bench, cases = Bench(asked), [case for case in CASES if case.row == row]
        parts = [partial(bench.compared, [*some]) for _, some in groupby(cases, lambda c: c.peer)]
        for part in parts or [getattr(bench, f"row_{row}")]:
            with bench.opened:
                try:
                    for figure in part():
                        figure.show(asked.json)
                except (ValueError, RuntimeError) as error:
                    Figure(row, "not measured", behind=str(error)).show(asked.json)


if __name__ == "__main__":
    main()
