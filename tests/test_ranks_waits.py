"""Each wait for other ranks, and each link of their order, taken out in turn: the bits differ, or a
rank raises or hangs."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests import test_ranks_order
from tests.ranks import Failed, How, Trained, World, digest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
HANGS_S = 20.0


class Site(NamedTuple):
    """A place in a module of `offload.parallel`, or another one of `offload`, and the source
    without it."""

    file: str
    present: str
    absent: str

    @property
    def module(self) -> str:
        return f"offload.{self.file}" if "." in self.file else f"offload.parallel.{self.file}"

    @property
    def text(self) -> str:
        return (ROOT / self.module.replace(".", "/")).with_suffix(".py").read_text()

    @property
    def other(self) -> tuple[str, str]:
        """The module, and its source without the place."""
        return self.module, self.text.replace(self.present, self.absent)


SITES = {
    "gather: until it is there": Site(
        "collectives",
        "        self._land(Message(Kind.GATHER, entry.unit))\n        self",
        "        self",
    ),
    "gather: for the shard and the slot": Site(
        "collectives",
        "                self._runner.begin(task)\n            works",
        "                pass\n            works",
    ),
    "exchange: for the fold of the one before": Site(
        "collectives", "        self.end_exchange()\n        self._busy", "        self._busy"
    ),
    "collecting: for the exchange of the slot": Site(
        "gradients", "            self.collectives.end_exchange()\n", "            pass\n"
    ),
    "exchange: for the gradient": Site("gradients", "            self._runner.begin(task)\n", ""),
    "end of a pass: for what has begun": Site(
        "collectives", "backward=backward)\n        self._land()\n", "backward=backward)\n"
    ),
    "landing: for the collective": Site(
        "collectives", "                self.group.wait(works)\n", ""
    ),
    "fold: for the slot": Site(
        "gradients", "        self._runner.begin(task)\n        for p", "        for p"
    ),
    "fold: for the sum so far": Site(
        "gradients", "            self._start(bring_sum, unit)\n", "            pass\n"
    ),
    "norm: for the sums here": Site(
        "optim.update", "                    runner.begin(self._normed)\n", ""
    ),
    "norm: of all ranks": Site(
        "group", "                clip.put(leaf, nodes)\n", "                pass\n"
    ),
    "sum: in the order of ranks": Site(
        "gradients", "            for part in parts:\n", "            for part in parts[::-1]:\n"
    ),
    "what did not come: zeros that change nothing": Site(
        "gradients", ".fill_(-0.0)\n        if self._factor", "\n        if self._factor"
    ),
    "order: who leaves it does it first": Site(
        "order", "        for one in rest:\n            self._serve(one)\n", ""
    ),
    "order: what others ask for": Site(
        "order", "            else:\n                self._serve(one)\n", ""
    ),
    "order: until all are there": Site(
        "order",
        "            if earlier or not kinds.isdisjoint(busy):\n                continue\n",
        "",
    ),
    "order: the end of a backward, for the ends of forwards": Site("order", "earlier or ", ""),
    "step: for own sums": Site(
        "gradients", "        self._send_own()\n        self.coll", "        self.coll"
    ),
    "two levels: for the column, before weights go around in the row": Site(
        "two_level_group",
        "self.wait(self._gather(mine, part, self._column))",
        "self._gather(mine, part, self._column)",
    ),
    "two levels: for the row, before its gradients are added": Site(
        "two_level_group",
        "self.wait(self._exchange(into, source, self._row))",
        "self._exchange(into, source, self._row)",
    ),
    "order: followed only where all know it": Site(
        "order", "deque(known) if same and known is not None", "deque(known) if known is not None"
    ),
}

SCALED_BESIDE = Site(
    "gradients",
    "        with self._group.comm_stream():\n            self._runner.begin(task)\n"
    "            self._prepare(unit, source, new)\n",
    "        self._prepare(unit, source, new)\n"
    "        with self._group.comm_stream():\n            self._runner.begin(task)\n",
)
"""A gradient is scaled on the user's stream while another stream sends it."""

HOW = {
    "memory": How("twice", micro=2, config={"shard": 3, "max_grad_norm": 0.5}),
    "turns": How("braided", micro=2, config={"shard": 3, "gradients": "nvme"}),
    "away": How(
        "adapter",
        torch.float32,
        micro=2,
        config={
            "shard": 3,
            "max_grad_norm": 0.5,
            **dict.fromkeys(("params", "gradients", "optimizer"), "nvme"),
        },
    ),
    "skips": How("unused", micro=2, config={"shard": 2}),
    "chooses": How("experts", micro=2, config={"shard": 3}),
    "own sums": How("generates", micro=3, config={"shard": 1}),
}


def of(how: How, tmp_path: Path) -> How:
    nvme = {"nvme_path": str(tmp_path)} if "nvme" in how.config.values() else {}
    return How(how.kind, how.dtype, how.micro, 3, "AdamW", {**how.config, **nvme})


def test_the_sites_are_in_the_source() -> None:
    for name, site in [*SITES.items(), ("scaled", SCALED_BESIDE)]:
        assert site.text.count(site.present) == 1, name


@pytest.mark.parametrize("name", SITES)
def test_what_is_taken_out_is_missed(name: str, tmp_path: Path) -> None:
    assert missed(SITES[name], tmp_path)


@pytest.mark.parametrize("file", sorted({site.file for site in SITES.values()}))
def test_where_nothing_is_taken_out_nothing_is_missed(file: str, tmp_path: Path) -> None:
    assert not missed(Site(file, "", ""), tmp_path)


def missed(site: Site, tmp_path: Path) -> bool:
    """Whether ranks without a site are seen to be."""
    if site.file == "order" and _missed_alone(site.other[1]):
        return True
    mesh = (2, 2) if site.file == "two_level_group" else ()
    whole = World(4 if mesh else 2, tmp_path)
    less = World(whole.ranks, tmp_path, other=site.other)
    hows = [replace(of(how, tmp_path), mesh=mesh) for how in HOW.values()]
    try:
        return any(_missed(whole, less, how) for how in hows)
    finally:
        whole.close()
        less.close()


def _missed_alone(source: str) -> bool:
    """Whether ranks that are threads miss something of the order."""
    made = types.ModuleType("offload.parallel.order")
    exec(compile(source, "order", "exec"), vars(made))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(test_ranks_order, "Order", made.Order)
        try:
            test_ranks_order.test_all_ranks_begin_the_same_in_the_same_order(3, 0)
            test_ranks_order.test_a_gradient_is_exchanged_once_and_by_all(3, 20)
        except AssertionError:
            return True
    return False


def test_work_on_the_wrong_stream_is_a_race(tmp_path: Path) -> None:
    pytest.importorskip("offload.runtime._runner", reason="not compiled here")
    less = World(2, tmp_path, other=SCALED_BESIDE.other)
    less.begin("paced", 3, "train", How())
    try:
        found = less.results()
    finally:
        less.close()
    assert any(isinstance(one, Failed) and " on stream " in one.message for one in found)


def _missed(whole: World, less: World, how: How) -> bool:
    wanted: list[Trained] = whole.run("train", how)
    other = How("unused", config={"shard": 3}, mesh=how.mesh)
    usual, ours = [whole.run("diverge", other)], []
    try:
        for job, args in (("late", (how, 2)), ("diverge", (other,))):
            less.begin(job, *args)
            found = less.results(HANGS_S)
            if any(one is None or isinstance(one, Failed) for one in found):
                less.close()
                return True
            ours.append(found)
    except TimeoutError:
        return True
    for rank, runs in enumerate(ours[0]):
        if set(runs) != {digest(wanted[rank].values)}:
            return True
    return any(
        not torch.equal(ours[1][rank][key][1], value)
        for rank in range(whole.ranks)
        for key, (_, value) in usual[0][rank].items()
    )
