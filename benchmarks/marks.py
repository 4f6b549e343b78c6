"""Published steps of large models beside those predicted for them: `python -m benchmarks.marks`.

[Note: How a row is predicted]
`ZeRO` rows are simulated as `offload plan` does it: the program of one rank, with the values where
the source has them. Budgets are left out, as sources cut large matrices in ways of their own, and
so is their tensor parallelism beside ZeRO. Gradients go between nodes once, in their own dtype, as
in a reduce-scatter.

`3D` rows are no business of this engine: t ranks share each matrix, p stages follow one another.
They check the two constants. A step of m micro-batches a pipeline takes 1 + (p - 1) / m of its
compute, and six all-reduces of a block's output by the ranks of a matrix, 2 (t - 1) / t of it each,
on the links of a node: two in forward, again where that is repeated, and two in backward
(Narayanan et al. 2021, arXiv:2104.04473, sections 2.2 and 3.2).

[Note: What a row shows]
A row is balanced where the second of its lanes is busy for three quarters of the time of the first:
then the result depends on how well they overlap, which is perfect here, and a published step may be
as much as 1.3 times as long. Others depend on one lane and are held to 20%. Constants are fitted to
the rows with an f: their mean shows nothing, but their spread does. Other rows are predictions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from offload.planning.cluster import LINK_SHARE, Cluster, cluster_of
from offload.planning.layout import Placement, lay_out
from offload.planning.planner import Grain
from offload.planning.profile import Sharding, StateChoice
from offload.planning.tiers import TIERS, Tier
from offload.planning.transformer import gpt
from offload.program.compile import compile_program
from offload.program.ops import Verb
from offload.program.predict import predict
from offload.reporting import MODEL, Prediction

A100, V100 = cluster_of("dgx-a100"), cluster_of("dgx2-v100")

TP_SHARE = 0.575
"""`compute_share` of A100s with tensor parallelism, whose matrices are smaller."""

BALANCED_FROM, ONE_LANE, BALANCED = 0.75, (0.8, 1.2), (1.0, 1.3)
"""See [Note: What a row shows]."""

PAPER = "arXiv:2104.04473"
AZURE = "DeepSpeed, docs/_posts/2022-07-26-deepspeed-azure.md"
INFINITY = "bars of slide 15 of ZeRO-Infinity, SC21; shapes and batches from memory of its Table 1"
BLOG = "Microsoft's blog on DeepSpeed, 2020-09"

ON_DEVICE: tuple[Tier, Tier, Tier] = ("device", "device", "device")
STATES_ON_CPU: tuple[Tier, Tier, Tier] = ("device", "cpu", "cpu")
ON_NVME: tuple[Tier, Tier, Tier] = ("nvme", "nvme", "nvme")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A published step."""

    what: str
    model: str
    gpus: int
    tflops: float
    """Of a GPU, as published; 0 for none."""
    source: str
    cluster: Cluster = A100
    sequence: int = 2048
    tokens: float = 0.0
    """Of a GPU in a step, with ZeRO; it is one micro-batch."""
    homes: tuple[Tier, Tier, Tier] = ON_DEVICE
    """Of weights, gradients and states."""
    tensor: int = 1
    stages: int = 1
    batch: int = 0
    """Sequences in a step, with 3D parallelism; micro-batches have one."""
    fitted: bool = False
    """Whether a constant is fitted to it, and others."""


def _paper(model: str, gpus: int, tflops: float, micro: int) -> Mark:
    tokens, where = micro * 2048.0, f"{PAPER}, Table 2"
    name = {"175b": "174.6B", "530b": "529.6B"}[model]
    return Mark(
        what=f"ZeRO-3 {name}",
        model=model,
        gpus=gpus,
        tflops=tflops,
        source=where,
        tokens=tokens,
        fitted=micro < 4,  # With four, compute and collectives are balanced.
    )


def _megatron(
    model: str, name: str, gpus: int, stages: int, batch: int, tflops: float, at: str
) -> Mark:
    return Mark(
        what=f"3D {name}",
        model=model,
        gpus=gpus,
        tflops=tflops,
        source=f"{PAPER}, {at}",
        tensor=8,
        stages=stages,
        batch=batch,
        fitted=True,
    )


def _azure(model: str, tflops: float) -> Mark:
    return Mark(
        what=f"ZeRO-3 + CPU {model.upper()}",
        model=model,
        gpus=1024,
        tflops=tflops,
        source=AZURE,
        sequence=1024,
        tokens=8 * 1024.0,
        homes=STATES_ON_CPU,
    )


def _infinity(model: str, name: str, tflops: float, batch: float, *, nvme: bool) -> Mark:
    return Mark(
        what=f"ZeRO-Infinity {name}",
        model=model,
        gpus=512,
        tflops=tflops,
        source=INFINITY,
        cluster=V100,
        sequence=1024,
        tokens=batch * 1024,
        homes=ON_NVME if nvme else STATES_ON_CPU,
        fitted=model != "10t",
    )


MARKS = (
    _megatron("96x12288", "174.6B", 384, 12, 1536, 153, "Table 2"),
    _megatron("96x12288", "174.6B", 768, 12, 1536, 149, "Table 2"),
    _megatron("96x12288", "174.6B", 1536, 12, 1536, 141, "Table 2"),
    _megatron("96x12288", "174.6B", 1024, 16, 1536, 140, "section 5.1"),
    _megatron("80x12288", "145.6B", 1536, 8, 2304, 148, "Table 1"),
    _megatron("96x16384", "310.1B", 1920, 16, 2160, 155, "Table 1"),
    _megatron("105x20480", "529.6B", 2520, 35, 2520, 163, "Table 1"),
    _megatron("128x25600", "1008B", 3072, 64, 3072, 163, "Table 1"),
    _paper("175b", 384, 144, 4),
    _paper("175b", 768, 88, 2),
    _paper("175b", 1536, 44, 1),
    _paper("530b", 640, 138, 4),
    _paper("530b", 1120, 98, 2),
    _paper("530b", 2240, 48, 1),
    replace(_azure("175b", 204.49), gpus=256, sequence=512, tokens=32 * 512.0, fitted=True),
    _azure("530b", 171.37),
    _azure("1t", 165.36),
    _azure("2t", 157),
    replace(
        _megatron("298x17408", "1T", 800, 50, 2048, 47, ""),
        tensor=16,
        cluster=V100,
        sequence=1024,
        source=BLOG,
    ),
    _infinity("124x18432", "0.5T", 46.3, 7, nvme=False),
    _infinity("1t", "1T", 48.8, 5, nvme=False),
    _infinity("174x49152", "5T", 43.9, 3, nvme=True),
    _infinity("10t", "10T", 42.7, 2, nvme=True),
    _infinity("20t", "20T", 37.2, 1.25, nvme=True),
    Mark(
        what="ZeRO-Offload 10B",
        model="50x4096",
        gpus=1,
        tflops=40,
        source="arXiv:2101.06840, abstract; the tutorial's batch of 10",
        cluster=V100,
        sequence=1024,
        tokens=10 * 1024.0,
        homes=STATES_ON_CPU,
    ),
    Mark(
        what="ZeRO-Infinity 1T, one node",
        model="1t",
        gpus=16,
        tflops=0,
        source="arXiv:2104.07857: it fits, no time",
        cluster=V100,
        sequence=1024,
        tokens=7 * 1024.0,
        homes=ON_NVME,
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A published step and the predicted one."""

    mark: Mark
    tflops: float
    seconds: float
    bound: str
    """The busiest lane, or two of them."""

    @property
    def balanced(self) -> bool:
        """See [Note: What a row shows]."""
        return "+" in self.bound

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.tflops / self.mark.tflops if self.mark.tflops else 0.0

    @property
    def right(self) -> bool:
        """Whether the prediction is as near as it should be."""
        low, high = BALANCED if self.balanced else ONE_LANE
        return not self.mark.tflops or low <= self.ratio <= high


def rows() -> Iterator[Row]:
    """All, in their order."""
    for mark in MARKS:
        yield _pipelined(mark) if mark.stages > 1 else _simulated(mark)


def _pipelined(mark: Mark) -> Row:
    """Of a 3D row, see [Note: How a row is predicted]."""
    model, cluster, tensor = gpt(mark.model), mark.cluster, mark.tensor
    share = TP_SHARE if cluster is A100 else cluster.compute_share
    rate = share * cluster.gpu_flops_per_s
    flops = model.flops(mark.sequence, mark.sequence) / tensor / mark.stages
    sent = 6 * 2 * (tensor - 1) / tensor * 2 * mark.sequence * model.hidden
    reduced = sent * model.layers / mark.stages / (LINK_SHARE * cluster.link_bytes_per_s)
    count = mark.batch * tensor * mark.stages / mark.gpus
    compute = flops / rate
    seconds = (count + mark.stages - 1) * compute + count * reduced
    return Row(mark, count * flops / seconds / 1e12, seconds, MODEL)


def _simulated(mark: Mark) -> Row:
    """Of a ZeRO row, see [Note: How a row is predicted]."""
    model, cluster = gpt(mark.model), mark.cluster
    nodes = -(-mark.gpus // cluster.gpus)
    machine = cluster.machine(nodes, min(mark.gpus, cluster.gpus))
    profile = model.profile(Grain(1 << 24, 8), Sharding(0, mark.gpus))
    plan = lay_out(
        profile,
        [Placement(*mark.homes)] * len(profile.units),
        budgets=dict.fromkeys(TIERS, 1 << 62),
        clips=False,
        states=StateChoice(),
        early=True,
    )
    rate = cluster.gpu_flops_per_s * cluster.compute_share

    def compute_seconds(unit: int, verb: Verb) -> float:
        return model.flops_of(unit, verb is Verb.BACKWARD, 1, mark.sequence) * mark.tokens / rate

    step = predict(compile_program(plan), machine, compute_seconds, tries=False)
    done = model.flops(1, mark.sequence) * mark.tokens
    return Row(mark, done / step.step_seconds / 1e12, step.step_seconds, _bound(step))


def _bound(step: Prediction) -> str:
    """The busiest lane, and the next where they are balanced."""
    first, second = sorted(step.busy, key=lambda lane: -step.busy[lane])[:2]
    alike = step.busy[second] >= BALANCED_FROM * step.busy[first]
    return f"{first} + {second}" if alike else first


def main() -> int:
    """Prints the table and the constants; 1 if a row is further off than it should be."""
    print("predicted TFLOPS a GPU over published ones; f: constants are fitted to it, and others\n")
    print(
        f"{'what':<28}{'GPUs':>5}{'published':>11}{'predicted':>11}{'ratio':>7}    source, bound by"
    )
    wrong, sources = 0, dict[str, int]()
    for row in rows():
        mark, number = row.mark, sources.setdefault(row.mark.source, len(sources) + 1)
        known = f"{mark.tflops:>11.1f}" if mark.tflops else f"{'-':>11}"
        ratio = f"{row.ratio:>7.2f}" if mark.tflops else f"{'-':>7}"
        note = "" if row.right else "  <-- off"
        note += "" if mark.tflops else f": {row.seconds:,.0f} s"
        print(
            f"{mark.what:<28}{mark.gpus:>5}{known}{row.tflops:>11.1f}{ratio}"
            f"{' f' if mark.fitted else '  '} [{number}] {row.bound}{note}"
        )
        wrong += not row.right
    print("\nconstants")
    for name, one in (("dgx-a100", A100), ("dgx2-v100", V100)):
        print(
            f"  {name}: compute_share {one.compute_share}, nic_share {one.nic_share}: {one.source}"
        )
    print(f"  with tensor parallelism on A100s: compute_share {TP_SHARE}; links {LINK_SHARE}")
    print("sources")
    for source, number in sources.items():
        print(f"  [{number}] {source}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
