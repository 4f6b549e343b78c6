"""`offload plan`: what would live where on machines not at hand, and how long a step would take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Suppress

from offload.cli import bad_input, display
from offload.cli.console import Output, emit, table
from offload.cli.flags import AsJson, check_field, parse_flags
from offload.cli.models import models_of
from offload.cli.options import registry
from offload.config import Config
from offload.planning.cluster import Cluster, cluster_of
from offload.planning.layout import Placement, lay_out
from offload.planning.layout import Plan as Layout
from offload.planning.machine import Machine
from offload.planning.planner import BudgetError, Grain, budgets_of, plan_cut
from offload.planning.profile import ALONE, KINDS, Sharding, StateChoice
from offload.planning.tiers import TIERS, format_bytes
from offload.planning.transformer import PARTS, Transformer
from offload.program.compile import compile_program
from offload.program.ops import Verb
from offload.program.predict import predict
from offload.reporting import Prediction
from offload.unit_plan import spills

DEVICE_SHARE = 0.9
"""Of a device's memory, with activations; the rest is torch's and the driver's."""

CAPTION = """\
model: forward and backward; compute: updates and sums of ranks on the device
comm: collectives; h2d, d2h: copies; cpu: updates in CPU memory; disk: drives
share: of the step in which it works; x2: the step if it were twice as fast"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placing(Config):
    """The engine's own settings, as far as they decide a plan."""

    micro_batches: int | None = 1
    """Micro-batches (--batch sequences each) of a GPU in a step. Updates begin in the last one."""

    nvme_path: Suppress[tuple[str, ...]] = ("NVME",)
    exposed_memory: Suppress[int | str | None] = None
    reduce: Suppress[Literal["mean", "sum"]] = "mean"
    wire: Suppress[Literal["exact"]] = "exact"
    comm_timeout: Suppress[float] = 300.0
    durable: Suppress[str | None] = None
    commit_every: Suppress[int | None] = None
    resume: Suppress[bool] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(AsJson):
    """Where the values of a model in bfloat16 would live on machines that need not be there, how
    long its step would take, and what would bound it: from data sheets.
    """

    model: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = "7b"
    """1b, 7b, 13b, 30b, 70b, 175b, 530b, 1t, 2t, 10t, 20t, or layers x width as 96x12288, of a GPT;
    or a folder of Hugging Face, of which config.json is enough."""

    machine: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = "workstation"
    """dgx-h100, dgx-a100, dgx2-v100, workstation, or a file of JSON: the fields that --json shows
    under machine; "like" in it names one of these, for fields that it leaves out."""

    nodes: int = 1
    """Machines, all alike."""

    gpus: int | None = None
    """GPUs of each that train, a rank each. Default: all."""

    batch: int = 1
    """Sequences that go through the model on a GPU at once (a micro-batch)."""

    seq_len: int = 2048
    """Tokens of a sequence."""

    recompute: bool = True
    """Compute each block a second time in backward, so that its activations take no memory."""

    frozen: bool = False
    """Train adapters alone (as of LoRA), which are too small to count."""

    parts: Literal["auto", 1, 2, 4] = "auto"
    """Units of a block, as entries of a list: 1, all of it; 2, attention and feed-forward; 4, each
    matrix. The device holds up to six; auto: as few as fit."""

    exchange: Literal["levels", "flat"] = "levels"
    """Between nodes. levels: a node sums the gradients of its ranks first, as over a mesh of
    (nodes, gpus). flat: each rank sends its own."""

    placing: Annotated[Placing, tyro.conf.arg(name="")] = Placing()

    def __post_init__(self) -> None:
        for name in ("nodes", "batch", "seq_len"):
            check_field(self, name, getattr(self, name) >= 1, "1 or more")
        check_field(self, "gpus", self.gpus is None or self.gpus >= 1, "1 or more")


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is asked, and what comes of it."""

    asked: Plan
    cluster: Cluster
    model: Transformer
    layout: Layout
    step: Prediction

    @property
    def ranks(self) -> int:
        """In all."""
        return self.layout.profile.sharding.ranks

    @property
    def shard(self) -> int | None:
        """As `Config.shard`; None with one rank."""
        how = self.layout.profile.sharding
        return (3 - how.keeps - how.late) if self.ranks > 1 else None

    @property
    def tokens(self) -> int:
        """Of a rank in a step."""
        asked = self.asked
        return (asked.placing.micro_batches or 1) * asked.batch * asked.seq_len

    @property
    def tflops(self) -> float:
        """Of a GPU, what is recomputed counted."""
        done = self.model.flops(self.tokens, self.asked.seq_len)
        return done / self.step.step_seconds / 1e12


def command(arguments: Sequence[str]) -> None:
    """Shows a plan."""
    asked = parse_flags(Plan, "offload plan", arguments, registry())
    with bad_input():
        found = estimated(asked)
    if asked.json:
        emit(as_json(found))
    else:
        show(Output(), found)


def estimated(asked: Plan) -> Estimate:
    """The plan of one rank, as all are alike, and its step."""
    cluster = cluster_of(asked.machine)
    here = asked.gpus or cluster.gpus
    if here > cluster.gpus:
        raise ValueError(
            f"--gpus {here}: {asked.machine} has {cluster.gpus}; --machine names others"
        )
    levels = asked.exchange == "levels"
    machine = cluster.machine(asked.nodes, here, 1 if levels else here)
    machine = replace(machine, axes_in_turn=levels)
    model, layout = _fitting(asked, machine, here * asked.nodes)
    flops = cluster.gpu_flops_per_s * cluster.compute_share
    tokens = asked.batch * asked.seq_len

    def compute_seconds(unit: int, verb: Verb) -> float:
        return model.flops_of(unit, verb is Verb.BACKWARD, tokens, asked.seq_len) / flops

    count = asked.placing.micro_batches
    program = compile_program(layout)
    step = predict(program, machine, compute_seconds, micro_batches=count or 1, early=bool(count))
    return Estimate(asked, cluster, model, layout, step)


def _fitting(asked: Plan, machine: Machine, ranks: int) -> tuple[Transformer, Layout]:
    """The first way to cut the model that fits: with whole weights kept, and then in few units."""
    how = {"recompute": asked.recompute, "trains": not asked.frozen}
    models, config = models_of(asked.model, asked.parts, **how), asked.placing
    activations = models[0].activation_bytes(asked.batch * asked.seq_len)
    if config.device_memory is None:
        left = int(machine.device_bytes * DEVICE_SHARE) - activations
        if left <= 0:
            raise ValueError(
                f"activations take about {format_bytes(activations)} of a GPU with "
                f"{format_bytes(machine.device_bytes)}: give a smaller --batch or --seq-len"
                + ("" if asked.recompute else ", or leave --no-recompute out")
            )
        config = replace(config, device_memory=left)
    if not machine.nvme_bytes and "nvme" not in (config.params, config.gradients, config.optimizer):
        config = replace(config, nvme_path=())
    allowed = (2, 3) if config.shard == "auto" else (config.shard,)
    ways = [Sharding(0, ranks, s < 3, late=s == 1) for s in allowed] if ranks > 1 else [ALONE]
    told: ValueError | None = None
    for sharding, model in product(ways, models):
        cut = partial(model.profile, sharding=sharding, gradient_dtype=config.gradient_dtype)
        if lack := _lacks(model, sharding, config, machine, asked):
            told = ValueError(lack)
            continue
        try:
            found = plan_cut(cut, config, machine)
            other = partial(cut, sharding=replace(sharding, keeps=False))
            may = sharding.keeps and config.shard == "auto"
            if not (may and spills(found, partial(plan_cut, other, config, machine))):
                return model, found
        except BudgetError as error:
            told = error
    assert told is not None
    raise told


def _lacks(
    model: Transformer, sharding: Sharding, config: Config, machine: Machine, asked: Plan
) -> str:
    """What a rank surely lacks, and the least that would do; empty if nothing. The planner finds
    more, and takes longer."""
    budgets, states = budgets_of(config, machine), StateChoice("adam", config.states)
    full, most = model.units, 3 * model.parts  # Of alike blocks three are laid out.
    few = [u for at, u in enumerate(full) if at < most or full[at - most].flat is not u.flat]
    profile = replace(model, units=few).profile(Grain(), replace(sharding, keeps=False, late=False))
    homes = [Placement("cpu", "cpu", "cpu")] * len(profile.units)
    least = lay_out(profile, homes, budgets=budgets, clips=False, states=states, weight_slots=1)
    slots = least.taken_bytes("device") + 2 * model.parameters * (sharding.keeps + sharding.late)
    if slots > budgets["device"]:
        size = format_bytes(slots, up=True)
        return (
            f"{asked.model} does not fit a GPU of {asked.machine}: the slots of whole units take "
            f"{size}, and their budget is {format_bytes(budgets['device'])}; try --device-memory "
            f"and fewer tokens at once, --parts {PARTS[-1]}{', --shard 3' * (sharding.ranks > 1)} "
            "or a narrower model"
        )
    sizes = (least.sizes.value[kind] for kind in KINDS)
    taken = {id(one.flat): size for one, size in zip(few, map(sum, zip(*sizes)))}
    needed = sum(taken[id(one.flat)] for one in full)
    room = sum(budgets.values()) - slots
    if needed <= room:
        return ""
    more = f"about --nodes {-(-asked.nodes * needed // room)} would do"
    more = more if sharding.ranks > 1 else f"give it {format_bytes(needed - room, up=True)} more"
    smaller = replace(config, states="compact")
    if config != smaller and not _lacks(model, sharding, smaller, machine, asked):
        more += ", or --states compact, which fit"
    return (
        f"{asked.model} does not fit {asked.nodes} x {asked.machine}: values take "
        f"{format_bytes(needed, up=True)} of a rank, and its budgets are "
        + ", ".join(f"{format_bytes(budgets[tier])} on {tier}" for tier in TIERS)
        + f"; {more}"
    )


def show(console: Output, found: Estimate) -> None:
    """The plan for people."""
    asked, step, count = found.asked, found.step, found.asked.placing.micro_batches or 1
    size = found.model.parameters
    console.sentence(
        f"{f'{size / 1e9:,.1f} billion' if size >= 1e8 else f'{size:,}'} "
        f"{'frozen ' * asked.frozen}parameters, "
        f"{found.model.layers} blocks of width {found.model.hidden}\n"
        f"on {asked.nodes} x {asked.machine}, {found.ranks} GPU{'s' * (found.ranks > 1)}; "
        f"a GPU has {count} micro-batch{'es' * (count > 1)} of {asked.batch} x {asked.seq_len} "
        "tokens a step"
    )
    console.print(display.homes(found.layout.rows(), found.layout.tiers(), device_is_cpu=False))
    lanes = table("Lanes", "lane", "busy", "share", "moved", "x2")
    for lane, busy in sorted(step.busy.items(), key=lambda one: -one[1]):
        lanes.add_row(
            lane,
            _seconds(busy),
            f"{busy / step.step_seconds:.0%}",
            format_bytes(step.moved[lane]) if step.moved[lane] else "-",
            _seconds(step.faster[lane]) if lane in step.faster else "-",
        )
    console.print(lanes)
    console.sentence(CAPTION, style="dim")
    everyone = found.tokens * found.ranks / step.step_seconds
    console.sentence(
        f"a step takes {_seconds(step.step_seconds)}: {found.tflops:.0f} TFLOPS a GPU, "
        f"{found.tflops * 1e12 / found.cluster.gpu_flops_per_s:.0%} of its peak, "
        f"{everyone:,.0f} tokens a second"
    )
    console.sentence(f"it is bound by {step.bound_by}", style="bold")
    console.notes(list(_notes(found)))


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _notes(found: Estimate) -> Iterator[str]:
    """What else there is to know."""
    asked, cluster = found.asked, found.cluster
    yield (
        f"{asked.machine}: {cluster.compute_share:.1%} of the peak and {cluster.nic_share:.1%} of "
        f"the NICs count. {cluster.source}"
    )
    budget = found.layout.budgets["device"]
    beside = found.model.activation_bytes(asked.batch * asked.seq_len)
    size = format_bytes(budget).replace(" ", "")
    yield (
        f"planned with Config(device_memory='{size}'); attach takes half of a GPU by default; "
        f"activations take about {format_bytes(beside)} beside it"
        + ", and it has less: fewer tokens at once"
        * (budget + beside > cluster.gpu_bytes)
    )
    if found.shard:
        kept = {3: "for each use"}.get(found.shard, "kept on each device until the update")
        late = ", and whole gradients of a rank's micro-batches" if found.shard == 1 else ""
        yield f"--shard {found.shard}: whole weights are gathered, {kept}{late}"
    if found.model.parts > 1:
        yield (
            f"--parts {found.model.parts}: so many units of a block, which are entries of a list "
            "in the model then"
        )
    if asked.nodes > 1 and found.ranks > asked.nodes and asked.exchange == "levels":
        sizes = f"({asked.nodes}, {found.ranks // asked.nodes})"
        yield f"--exchange levels: give attach a mesh of {sizes}; else gradients go --exchange flat"


def as_json(found: Estimate) -> dict[str, Any]:
    """The plan for programs."""
    shown = ("layers", "hidden", "vocabulary", "parts", "recompute", "parameters")
    return {
        "kind": "plan",
        "nodes": found.asked.nodes,
        "ranks": found.ranks,
        "shard": found.shard,
        "tokens_per_step": found.tokens * found.ranks,
        "tflops_per_gpu": found.tflops,
        "bound_by": found.step.bound_by,
        **asdict(found.step),
        "values": [asdict(row) for row in found.layout.rows()],
        "tiers": [asdict(use) for use in found.layout.tiers()],
        "model": {name: getattr(found.model, name) for name in shown},
        "machine": asdict(found.cluster),
    }
