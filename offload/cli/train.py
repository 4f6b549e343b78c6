"""`offload train`: a small GPT on real text, its state in any tier."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import cpu_adam
import offload
from offload import recording, reporting
from offload.cli import BadInput, Signals, Stopped, bad_input, data, display, gpt
from offload.cli.console import Output, emit, warnings_of
from offload.cli.flags import flag
from offload.cli.options import Train, parse, translation
from offload.planning.machine import ranks_of_job
from offload.planning.tiers import format_bytes
from offload.reporting import Run
from offload.runtime.device import compute_device
from offload.runtime.stats import Report

LR_10M = 2e-3
"""Default of the smallest model's peak learning rate."""

COURSE = ("seed", "lr", "warmup", "weight_decay", "batch", "micro_batches", "seq_len", "data")
"""Settings with which a durable run goes on as it began; --steps may be more, or fewer."""

LR_FLOOR = 0.05
"""Share of the peak learning rate that is left at the last step."""


def command(arguments: Sequence[str]) -> None:
    """Trains as `arguments` say. What can be refused is refused before the first step."""
    settings, typed = parse(arguments), ["offload", "train", *arguments]
    if ranks_of_job() > 1:
        raise BadInput(
            f"offload train is one process, and {ranks_of_job()} were started (WORLD_SIZE, as "
            "torchrun sets it): examples/ranks.py is a program for several"
        )
    with bad_input():
        corpus = data.load(settings.data, settings.seq_len)
    # Results go to standard output, progress and remarks to standard error.
    console, remarks = Output(stderr=settings.json), Output(stderr=True)
    if settings.deepspeed is not None:
        lines = translation(settings.deepspeed).report()
        what = f"what {settings.deepspeed} became, where no flag says otherwise:"
        remarks.notes(["\n    ".join([what, *lines])])
    remarks.notes(corpus.notices)
    with Signals() as signals:
        with bad_input():
            remarks.notes(warnings_of(cpu_adam.kernel)[1])
            remarks.sentence(f"making the model, {settings.size}...")
            (model, optimizer), told = warnings_of(lambda: build(settings))
        with optimizer.engine as engine:
            known = engine.notices
            remarks.notes([*told, *known, *_go_on(settings, corpus, engine)])
            _introduce(console, settings, model, corpus, engine)
            reached = Reached()
            try:
                with display.TrainingProgress(remarks, settings.steps) as progress:
                    _train(settings, model, optimizer, corpus, signals, progress, reached)
                    # Before what is no part of training.
                    reached.run = recording.run_of(engine, typed)
                    engine.settle()
                    reached.report = engine.report()
                    remarks.notes([one for one in engine.notices if one not in known])
                    _judge(settings, model, corpus, progress, reached)
            except BaseException as error:
                # What goes wrong in telling must not take the place of the error.
                with contextlib.suppress(Exception, Stopped, KeyboardInterrupt):
                    name = type(error).__name__.replace("KeyboardInterrupt", "Ctrl-C")
                    reached.stopped_by = error.by if isinstance(error, Stopped) else name
                    if isinstance(error, Stopped) and not signals.hurried:
                        engine.settle()  # The last step's updates are part of what is told.
                    if reached.steps or isinstance(error, Stopped):
                        reached.report = reached.report or engine.report()
                        _conclude(console, settings, reached)
                    reached.run = reached.run or recording.run_of(engine, typed)
                raise
            else:
                _conclude(console, settings, reached)
            finally:
                _leave(remarks, reached)


@contextlib.contextmanager
def memory_short(where: str) -> Iterator[None]:
    """Names what to try where torch or numpy are refused memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # Of the CPU torch raises a plain RuntimeError.
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if known or "DefaultCPUAllocator" in str(error):
            raise MemoryError(
                f"no memory is left {where}: lower --batch (and raise --micro-batches instead), or "
                "--seq-len, or give --recompute"
            ) from error
        raise


def _leave(remarks: Output, reached: Reached) -> None:
    """A file for `offload report`. A failure is told, no more: the run has its result, or an error
    of its own."""
    if reached.run is None or not reached.run.stepped:
        return
    try:
        reporting.save(reached.run, reporting.last())
        remarks.notes(["offload report shows where the time went"])
    except OSError as error:
        remarks.notes(
            [
                f"no trace was left at {error.filename}: {error.strerror}; likely the cache is "
                "another user's, or its drive full; try XDG_CACHE_HOME=DIRECTORY"
            ]
        )


def _go_on(settings: Train, corpus: data.Corpus, engine: Any) -> Iterator[str]:
    """Refuse a course other than that of the run that goes on, and tell of other steps. Where in
    its data a run is, and its rate, follow from these and the number of the step."""
    course = {name: getattr(settings, name) for name in COURSE}
    course |= {
        name: getattr(settings.placing, name) for name in ("max_grad_norm", "gradient_dtype")
    }
    course |= {"lr": peak_lr(settings), "data": f"{len(corpus.training):,} bytes"}
    engine.user_state = lambda: {**course, "steps": settings.steps}
    before = engine.resumed[1] if engine.resumed else {}
    for name, now in course.items():
        if before.get(name, now) != now:
            raise BadInput(
                f"{flag(name)} {now}: {settings.placing.durable} has a run with {before[name]}, "
                "and goes on with that; give the flags of then, or another --durable"
            )
    steps = before.get("steps", settings.steps)
    if steps != settings.steps and engine.resumed[0] < settings.steps:
        yield f"--steps was {steps}: the learning rate falls from here to the end of now"
        warnings.filterwarnings("ignore", "group . goes on with", RuntimeWarning)


def _train(
    settings: Train,
    model: nn.Module,
    optimizer: Any,
    corpus: data.Corpus,
    signals: Signals,
    progress: display.TrainingProgress,
    reached: Reached,
) -> None:
    """All steps, each told and counted when it is over; between two of them a run is stopped."""
    done, _ = optimizer.engine.resumed or (0, None)
    scheduler = LambdaLR(optimizer, lambda step: rate(settings, step), last_epoch=done - 1)
    tokens = settings.batch * settings.seq_len * settings.micro_batches
    again = "; the same command goes on from there" if settings.placing.durable else ""
    started = time.perf_counter()
    for step in range(done + 1, settings.steps + 1):
        record: dict[str, Any] = {"kind": "step", "step": step}
        with signals.hold():  # Until its record is told, too.
            record["lr"] = scheduler.get_last_lr()[0]
            with memory_short(f"in step {step}"):
                loss = train_step(settings, model, optimizer, corpus, step)
            record["loss"] = loss
            if settings.placing.max_grad_norm is not None:
                record["grad_norm"] = optimizer.grad_norm()
            scheduler.step()
            signals.where = f"after step {step} of {settings.steps}{again}"
            _check_finite(loss, f"the loss is {loss} at step {step}", settings)
            now = time.perf_counter()
            record |= {"step_s": now - started, "tokens_per_s": tokens / (now - started)}
            started = now
            progress.update(step, loss, tokens)
            if settings.json:
                emit(record)
            reached.steps, reached.loss = step, loss


def _judge(
    settings: Train,
    model: nn.Module,
    corpus: data.Corpus,
    progress: display.TrainingProgress,
    reached: Reached,
) -> None:
    """The held-out loss, and a sample."""
    with memory_short("after the last step, on held-out text"):
        loss, count = evaluate(settings, model, corpus, progress.evaluating)
    _check_finite(loss, f"the held-out loss is {loss} after the last step", settings)
    reached.held_out_loss, reached.held_out_bytes = loss, count
    if settings.sample:
        window = settings.seq_len
        prompt, seed = bytes(corpus.held_out[:window]), settings.seed
        with memory_short("for the sample"):
            written = gpt.generate(model, prompt, settings.sample, seed=seed, window=window)
        reached.sample = gpt.readable(written)


@dataclass(slots=True)
class Reached:
    """How far a run has come, as its summary tells."""

    steps: int = 0
    held_out_loss: float | None = None
    """In nats per byte; None for a run that was stopped before it was known."""
    held_out_bytes: int = 0
    sample: str | None = None
    """Text that the model has written; None for none."""
    loss: float | None = None
    """Of the last step."""
    run: Run | None = None
    """What the lanes did in the last steps."""
    report: Report | None = None
    """What they did in all of training, once it is over."""
    stopped_by: str | None = None
    """`Ctrl-C`, the name of another signal or of a kind of error; None for a run that came to its
    end."""


def _introduce(
    console: Output, settings: Train, model: nn.Module, corpus: data.Corpus, engine: Any
) -> None:
    """What is trained on what, and what lives where."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    steps = "1 step" if settings.steps == 1 else f"{settings.steps} steps"
    console.sentence(
        f"{parameters:,} parameters ({settings.dtype}), {steps} of "
        f"{settings.micro_batches * settings.batch} x {settings.seq_len} bytes\n"
        f"on {corpus.name}: {len(corpus.training):,} bytes and {len(corpus.held_out):,} held out"
    )
    if engine.resumed is not None:
        console.sentence(f"going on from step {engine.resumed[0]} in {settings.placing.durable}")
        if engine.resumed[0] >= settings.steps:
            console.sentence("all steps are trained: more with --steps")
    device_is_cpu, rows = compute_device().is_host, list(engine.plan.rows())
    console.print(display.homes(rows, engine.plan.tiers(), device_is_cpu=device_is_cpu))
    if engine.resumed is None and all(row.tier == "device" for row in rows):
        console.sentence(display.HINT)
    slow = device_is_cpu and torch.backends.cpu.get_cpu_capability() == "AVX2"
    if slow and settings.dtype == "bfloat16":  # Torch has no kernel for its products there.
        console.notes(["this CPU is slow in bfloat16: --dtype float32 trains much faster here"])


def _conclude(console: Output, settings: Train, reached: Reached) -> None:
    """What a run has come to, whether to its end or not."""
    report = reached.report
    assert report is not None
    if settings.json:
        emit(_summary(reached, report))
    if any(use.operations for use in report.lanes.values()):
        console.print(display.lanes(report.lanes))
        console.sentence(display.LANES_CAPTION, style="dim")
    console.sentence(
        f"peak memory of the process: {format_bytes(display.peak_rss_bytes())}, "
        "activations and Python included"
    )
    loss = reached.held_out_loss
    if loss is None and reached.loss is not None:
        console.sentence(f"loss {reached.loss:.4f} nats per byte in step {reached.steps}")
    elif loss is not None:
        console.sentence(
            f"held-out loss {loss:.4f} nats per byte ({loss / math.log(2):.4f} bits), "
            f"mean over {reached.held_out_bytes} bytes"
        )
    if reached.sample:
        console.print("\nwhat it writes after some held-out text:", highlight=False)
        for line in reached.sample.splitlines():
            console.print(f"  {line}", highlight=False, markup=False, style="italic")


def build(settings: Train) -> tuple[nn.Module, Any]:
    """The model and its optimizer, attached; the weights depend on the seed alone.

    The model is built without memory, and gets it unit by unit, in the tier where each belongs.
    """
    with torch.device("meta"):
        model = gpt.GPT(gpt.SIZES[settings.size], settings.recompute)
    model.to(getattr(torch, settings.dtype))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    scales = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": scales, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak_lr(settings), betas=(0.9, 0.95), eps=1e-8)
    torch.manual_seed(settings.seed)
    return offload.attach(model, optimizer, settings.placing, initialize=gpt.init)


def peak_lr(settings: Train) -> float:
    """Adam's, in proportion to 1 / width (Yang et al. 2022, arXiv:2203.03466, table 3)."""
    if settings.lr is not None:
        return settings.lr
    return LR_10M * gpt.SIZES["10m"].width / gpt.SIZES[settings.size].width


def rate(settings: Train, step: int) -> float:
    """The learning rate of `step` (from 0) as a share of its peak.

    Of the steps counted from 1, number `warmup` (or 1) has the peak and the last one the floor.
    """
    number, peak = step + 1, max(1, settings.warmup)
    if number <= peak:
        return number / peak
    done = (number - peak) / max(1, settings.steps - peak)
    return 1 - (1 - LR_FLOOR) * min(1.0, done)


def _check_finite(loss: float, found: str, settings: Train) -> None:
    if not math.isfinite(loss):
        raise ArithmeticError(
            f"{found}: training has diverged. Try a lower --lr than {peak_lr(settings):g}, or "
            "--max-grad-norm 1"
        )


def train_step(
    settings: Train, model: nn.Module, optimizer: Any, corpus: data.Corpus, step: int
) -> float:
    """One optimizer step, `step` counted from 1; the mean loss of its micro-batches."""
    total = 0.0
    for part in range(settings.micro_batches):
        index = (step - 1) * settings.micro_batches + part
        batch = corpus.batch(settings.seed, index, settings.batch, settings.seq_len)
        loss = next_byte_loss(model, *batch) / settings.micro_batches
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def evaluate(
    settings: Train, model: nn.Module, corpus: data.Corpus, told: Callable[[int, int], None]
) -> tuple[float, int]:
    """Mean loss on held-out text in nats per byte, and the number of bytes it was measured on.

    `told` is called before each forward, with its number from 1 and how many there will be.
    """
    total, count = 0.0, 0
    batches = corpus.held_out_batches(settings.eval_windows, settings.batch, settings.seq_len)
    model.eval()
    with torch.no_grad():
        for number, (inputs, targets) in enumerate(batches, 1):
            told(number, len(batches))
            total += next_byte_loss(model, inputs, targets).item() * targets.numel()
            count += targets.numel()
    model.train()
    return total / count, count


def next_byte_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, computed in float32."""
    device = next(model.parameters()).device
    logits = model(inputs.to(device)).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())


def _summary(reached: Reached, report: Any) -> dict[str, Any]:
    tiers = {
        use.tier: {"peak_bytes": display.taken(use), "budget_bytes": use.budget_bytes}
        for use in report.tiers
    }
    return {
        "kind": "summary",
        "steps": reached.steps,
        "held_out_loss": reached.held_out_loss,
        "held_out_bytes": reached.held_out_bytes,
        "sample": reached.sample,
        "stopped_by": reached.stopped_by,
        "misses": report.misses,
        "compute_s": report.compute_s,
        "wall_s": report.wall_s,
        "peak_rss_bytes": display.peak_rss_bytes(),
        "lanes": {name: asdict(use) for name, use in report.lanes.items()},
        "tiers": tiers,
    }
