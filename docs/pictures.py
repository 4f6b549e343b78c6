"""Draws the pictures of the docs with the project's own planner and simulator, and matplotlib."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from offload.config import Config
from offload.planning.machine import Machine
from offload.planning.planner import plan
from offload.planning.profile import Wanted, lay_out_unit, profile_of
from offload.planning.tiers import TIERS
from offload.program.compile import compile_program
from offload.program.ops import Verb
from offload.program.simulate import simulate

HERE = Path(__file__).resolve().parent
GIB = 1 << 30
BLOCKS, BLOCK_PARAMETERS = 40, 317_000_000
TOKENS, FLOPS = 65536, 150e12
MACHINE = Machine(
    device_bytes=24 * GIB,
    cpu_bytes=96 * GIB,
    nvme_bytes=1000 * GIB,
    disk_read_bytes_per_s=12e9,
    disk_write_bytes_per_s=8e9,
    cpu_bytes_per_s=60e9,
)
CONFIG = Config(
    device_memory=14 * GIB, cpu_memory=80 * GIB, nvme_path=("/mnt/nvme",), micro_batches=1
)
KINDS = {"weight": "#2f6db3", "gradient": "#d98032", "state": "#5c9a6b", "slots": "#b6bec8"}
LANES = ("model", "h2d", "d2h", "cpu", "disk")


def planned():
    """A plan for blocks that are all alike."""
    units = [
        lay_out_unit(
            f"block{k}",
            [Wanted(f"block{k}.weight", (BLOCK_PARAMETERS,), "bfloat16", True)],
            gradient_dtype="param",
        )
        for k in range(BLOCKS)
    ]
    return plan(profile_of(units), CONFIG, MACHINE)


def tiers(made, path):
    """A bar for each tier: what lives there."""
    canvas = Figure(figsize=(7.2, 2.3), dpi=120)
    axis = canvas.subplots()
    for row, tier in enumerate(TIERS):
        sizes = {one.kind: one.bytes for one in made.rows() if one.tier == tier}
        use = next(use for use in made.tiers() if use.tier == tier)
        sizes["slots"] = use.staging_bytes
        left = 0.0
        for kind, colour in KINDS.items():
            size = sizes.get(kind, 0) / GIB
            axis.barh(row, size, left=left, color=colour, height=0.6)
            left += size
        axis.text(left + 1, row, f"{left:.0f} GiB", va="center", fontsize=9)
    axis.set_yticks(range(len(TIERS)), TIERS)
    axis.invert_yaxis()
    axis.set_xlabel("GiB")
    _finish(canvas, axis, [Patch(color=c, label=k) for k, c in KINDS.items()], path)


def step(made, path):
    """The last but one of some steps, lane by lane."""
    per_block = 2 * BLOCK_PARAMETERS * TOKENS / FLOPS
    timeline = simulate(
        compile_program(made),
        MACHINE,
        lambda unit, verb: per_block * (1 if verb is Verb.FORWARD else 2),
        steps=3,
        updates_in_backward=True,
    )
    since, until = timeline.steps[-2], timeline.steps[-1]
    canvas = Figure(figsize=(7.2, 2.5), dpi=120)
    axis = canvas.subplots()
    colours = {Verb.FORWARD: "#2f6db3", Verb.BACKWARD: "#16406e", Verb.UPDATE: "#5c9a6b"}
    for span in timeline.spans:
        name = "model" if span.op.verb in (Verb.FORWARD, Verb.BACKWARD) else span.lane.value
        start, stop = max(span.start, since), min(span.stop, until)
        if start < stop and name in LANES:
            colour = colours.get(span.op.verb, "#d98032")
            axis.barh(LANES.index(name), stop - start, left=start - since, color=colour)
    axis.set_yticks(range(len(LANES)), LANES)
    axis.invert_yaxis()
    axis.set_xlabel(f"seconds; {timeline.exposed / timeline.step_seconds:.0%} of the step exposed")
    named = {"forward": "#2f6db3", "backward": "#16406e", "update": "#5c9a6b", "moves": "#d98032"}
    _finish(canvas, axis, [Patch(color=c, label=k) for k, c in named.items()], path)


def _finish(canvas, axis, handles, path):
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    canvas.legend(handles=handles, loc="upper center", ncols=4, frameon=False, fontsize=9)
    canvas.tight_layout(rect=(0, 0, 1, 0.92))
    canvas.savefig(path)


if __name__ == "__main__":
    found = planned()
    tiers(found, HERE / "tiers.png")
    step(found, HERE / "step.png")
