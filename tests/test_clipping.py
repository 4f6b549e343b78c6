"""Gradients on nvme, more than `exposed_memory`, in the hands of torch's clipping and of loops."""

from __future__ import annotations

import copy
import ctypes
import io
import math
import os
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from offload.model import snapshots
from offload.model.snapshots import Snapshots
from offload.runtime.memory import mapped
from tests import training
from tests.forked import Forked, anew
from tests.training import Net, Run, as_in_plain_torch, attached, fp32, plain, same_bits

PLACEMENT = ("cpu", "nvme", "cpu")
ROOM = 40_000
"""Bytes of exposed memory: below a quarter of the gradients in float32, above those of a unit."""

Clip = Callable[[Run], Any]
"""What is done to all gradients, between backward and step; what it returns is compared."""


def grads(run: Run) -> list[Any]:
    return [p.grad for p in run.model.parameters()]


def clip_norm(run: Run, **options: Any) -> float:
    return nn.utils.clip_grad_norm_(run.model.parameters(), 0.1, **options).item()


def clip_value(run: Run, **options: Any) -> None:
    nn.utils.clip_grad_value_(run.model.parameters(), 1e-3, **options)


def by_hand(run: Run) -> float:
    """As repositories have it that are older than torch's own."""
    total = 0.0
    for p in run.model.parameters():
        if p.grad is not None:
            total += p.grad.detach().data.norm(2).item() ** 2
    for p in run.model.parameters():
        p.grad.data.mul_(0.1 / (total**0.5 + 1e-6))  # type: ignore[union-attr]
    return total


def in_other_words(run: Run) -> float:
    norms = [torch.norm(p.grad.detach(), 2) for p in run.model.parameters()]  # type: ignore
    for p in run.model.parameters():
        p.grad *= 0.5
        p.grad = p.grad / 3  # type: ignore[operator]
        p.grad[0] += 1e-3
        torch.nan_to_num(p.grad, out=p.grad)
    signs = [one.sign() for one in grads(run)]
    torch._foreach_add_(grads(run), signs, alpha=1e-4)
    torch._foreach_mul_(signs, grads(run))
    return torch.norm(torch.stack(norms)).item() + sum(one.sum().item() for one in signs)


def unscaled(run: Run) -> float:
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(run.optimizer)
    return clip_norm(run)


def halved(one: torch.Tensor) -> None:
    """What an extension does: no version counter tells of it."""
    if has_torch_function_unary(one):
        return handle_torch_function(halved, (one,), one)  # type: ignore[no-any-return]
    one.data.mul_(0.5)
    return None


def averaged(run: Run) -> None:
    """As `docs/limits.md` advises in place of DistributedDataParallel."""
    for p in run.model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def extended(run: Run) -> None:
    for p in run.model.parameters():
        halved(p.grad)  # type: ignore[arg-type]


def penalized(run: Run) -> None:
    """Steps of one's own, by parameters at rest and gradients at rest in one call."""
    with torch.no_grad():
        for p in run.model.parameters():
            p.add_(p.grad, alpha=-1e-2)  # type: ignore[arg-type]
            p.grad.add_(p, alpha=1e-2)  # type: ignore[union-attr]


def noted(run: Run) -> float:
    """Through what no version counter tells of: an address, NumPy, `.data` of a view."""
    for p in run.model.parameters():
        ctypes.c_float.from_address(p.grad.data_ptr()).value = 0.25  # type: ignore[union-attr]
    for p in run.model.parameters():
        p.grad.numpy(force=True).reshape(-1)[:3] *= 2  # type: ignore[union-attr]
    for p in run.model.parameters():
        p.grad.view(-1).data[-1] = 0.5  # type: ignore[union-attr]
    return clip_norm(run)


CLIPS: dict[str, Clip] = {
    f"norm-{kind}-{foreach}": partial(clip_norm, norm_type=kind, foreach=foreach)
    for kind in (2.0, math.inf)
    for foreach in (None, True, False)
}
CLIPS["error"] = partial(clip_norm, error_if_nonfinite=True)
CLIPS |= {f"value-{foreach}": partial(clip_value, foreach=foreach) for foreach in (None, False)}
CLIPS |= {one.__name__: one for one in (by_hand, in_other_words, unscaled, averaged, penalized)}
CLIPS |= {"extended": extended, "noted": noted}
SLOW = (
    "norm-2.0-False",
    "norm-inf-None",
    "norm-inf-True",
    "error",
    "value-None",
    "extended",
    "by_hand",
)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}-group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def feature(clip: Clip, run: Run, number: int) -> None:
    for _ in range(2):
        run.loss().backward()
    run.extra.append(clip(run))
    run.step()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "clip", [pytest.param(one, marks=pytest.mark.slow if one in SLOW else ()) for one in CLIPS]
)
def test_they_are_clipped_with_the_bits_of_torch(
    clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in the memory that there is: at most `exposed_memory`, and no file."""
    peaks, lend = [0], Snapshots.lend

    def watched(self: Snapshots, key: Any) -> Any:
        found = lend(self, key)
        peaks.append(self.bytes)
        return found

    def in_memory(size: int, directory: str | None = None) -> torch.Tensor:
        assert directory is None, "shown in a file"
        return mapped(size)

    monkeypatch.setattr(Snapshots, "lend", watched)
    monkeypatch.setattr(snapshots, "mapped", in_memory)
    dtype = torch.float32 if clip == "noted" else torch.bfloat16
    room = ROOM if dtype is torch.float32 else ROOM // 2
    options: Any = {"dtype": dtype, "exposed_memory": room}
    as_in_plain_torch(partial(feature, CLIPS[clip]), PLACEMENT, tmp_path, **options)
    assert 0 < max(peaks) <= room


# -- what is read and written ----------------------------------------------------------------------


def half(run: Run) -> None:
    for p in run.model.parameters():
        p.grad *= 0.5


MOVED: dict[str, tuple[Clip, int, int]] = {
    "norm": (lambda run: nn.utils.get_total_norm(grads(run)), 1, 0),
    "clip": (clip_norm, 2, 1),
    "by hand": (by_hand, 2, 1),
    "value": (partial(clip_value, foreach=False), 1, 1),
    "half": (half, 1, 1),
    "nothing": (grads, 0, 0),
}


LARGE = partial(Net, width=384, layers=2)


@pytest.mark.parametrize(
    ("clip", "build"),
    [
        pytest.param(clip, build, marks=() if number % 2 == at else pytest.mark.slow)
        for number, clip in enumerate(MOVED)
        for at, build in enumerate([Net, LARGE])
    ],
)
def test_a_norm_reads_once_and_a_scaling_reads_and_writes_once(
    clip: str, build: Callable[[], Net], tmp_path: Path
) -> None:
    """Also where a gradient lies in two chunks."""
    work, reads, writes = MOVED[clip]
    room = ROOM if build is Net else 5 << 20
    with attached(PLACEMENT, tmp_path, **fp32(build=build, exposed_memory=room)) as run:
        run.loss().backward()
        run.engine.runner.idle()
        store, plan = run.engine.runner.store, run.engine.plan
        assert store is not None
        assert any(len(unit.chunks) > 1 for unit in plan.profile.units) == (build is not Net)
        gradients = sum(sum(sizes) for (kind, _), sizes in plan.file.items() if kind == "gradient")
        read, written = store.chunks.bytes_read, store.chunks.bytes_written
        work(run)
        run.engine.boundary()
        assert store.chunks.bytes_read - read == reads * gradients
        assert store.chunks.bytes_written - written == writes * gradients


MEASURED = """
import sys, threading, time
import torch
from torch import nn
import offload

def resident():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem", "RssFile"))

def watch():
    while not done.is_set():
        peaks.append(resident())
        time.sleep(0.001)

model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
config = offload.Config(params="cpu", gradients="nvme", optimizer="cpu", nvme_path=sys.argv[1],
                        cpu_memory="250MiB", device_memory="64MiB", exposed_memory=int(sys.argv[2]))
model, optimizer = offload.attach(model, optimizer, config)
for _ in range(2):
    model(torch.randn(2, 1024)).pow(2).mean().backward()
    optimizer.engine.runner.idle()
    baseline, peaks, done = resident(), [0], threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    optimizer.engine.boundary()
    done.set()
    thread.join()
    optimizer.step()
    optimizer.zero_grad()
print(max(peaks) - baseline, sum(p.numel() * 4 for p in model.parameters()))
optimizer.engine.close()
"""


def test_clipping_takes_no_more_memory_than_is_exposed(tmp_path: Path) -> None:
    """And a chunk on its way; as the system sees it, whatever malloc keeps."""
    room, chunk = 12 << 20, 4 << 20
    measured = Forked(lambda: anew(MEASURED, tmp_path, room))
    printed, errors = measured.communicate()
    assert measured.returncode == 0, errors
    taken, gradients = map(int, printed.split())
    assert gradients > 3 * (room + 3 * chunk)
    assert taken <= room + 3 * chunk


# -- what a gradient at rest is to its holder ------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with attached(PLACEMENT, tmp_path, **fp32(exposed_memory=ROOM)) as made:
        plain(made, 0)
        yield made


@pytest.fixture
def truth() -> list[torch.Tensor]:
    """The gradients of the second step, in plain PyTorch."""
    found: list[torch.Tensor] = []

    def second(run: Run, number: int) -> None:
        run.loss().backward()
        found[:] = [one.clone() for one in grads(run)]
        run.step()

    training.train_alone(second, steps=2, dtype=torch.float32)
    return found


def test_it_says_what_it_is_and_reads_nothing(run: Run) -> None:
    run.loss().backward()
    assert run.engine.runner.store is not None
    read = run.engine.runner.store.chunks.bytes_read
    for p in run.model.parameters():
        g: Any = p.grad
        assert isinstance(g, torch.Tensor)
        assert p.grad is g
        assert (g.shape, g.dtype, g.device) == (p.shape, p.dtype, p.device)
        assert g.stride() == torch.empty(p.shape).stride()
        assert g.is_contiguous()
        assert g.is_leaf
        assert not g.requires_grad
        assert (len(g), g.numel(), g.element_size()) == (len(p), p.numel(), 4)
    assert run.engine.runner.store.chunks.bytes_read == read


LOOKS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda g: g.clone(),
    "cpu": lambda g: g.cpu(),
    "detach": lambda g: g.detach() + 0,
    "data": lambda g: g.data[:],
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy of two": lambda g: copy.deepcopy([g, g])[1],
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "numpy": lambda g: torch.from_numpy(g.numpy()),
    "list": lambda g: torch.tensor(g.tolist()),
    "tensor": lambda g: torch.as_tensor(g).view_as(g),
    "view": lambda g: g.view(-1).view(g.shape),
    "rows": lambda g: torch.stack(list(g)),
    "to": lambda g: g.to(torch.float64).to(torch.float32),
    "min": lambda g: torch.minimum(g, g.max(dim=0).values),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_shows_the_true_values(look: str, run: Run, truth: list[torch.Tensor]) -> None:
    run.loss().backward()
    shown = [LOOKS[look](one) for one in grads(run)[:4]]
    for found, true in zip(shown, truth):
        assert torch.equal(found, true)
        if look not in ("cpu", "detach"):
            assert type(found) is torch.Tensor
    g: Any = grads(run)[-1]
    assert torch.equal(g, truth[-1])
    assert torch.equal(truth[-1], g)
    assert repr(g) == repr(truth[-1])
    assert f"{g.sum():.6f}" == f"{truth[-1].sum():.6f}"


def test_all_of_them_are_saved_and_copied_as_plain_tensors(
    run: Run, truth: list[torch.Tensor]
) -> None:
    run.loss().backward()
    file = io.BytesIO()
    torch.save(grads(run), file)
    file.seek(0)
    saved = torch.load(file)
    assert all(type(one) is torch.Tensor for one in saved)
    assert all(torch.equal(one, true) for one, true in zip(saved, truth, strict=True))
    copied = copy.deepcopy(grads(run))
    assert all(torch.equal(one, true) for one, true in zip(copied, truth, strict=True))


def test_an_edit_is_seen_by_the_next_look_and_by_the_step(run: Run) -> None:
    last: Any = list(run.model.parameters())[-1]
    first: Any = next(run.model.parameters())
    run.loss().backward()
    held = last.grad
    held.fill_(1.0)
    first.grad.sum()  # Of another unit: the one before goes home.
    assert last.grad is held
    assert last.grad.eq(1).all()
    last.grad[0] = 2
    last.grad += 1
    first.grad = None
    assert first.grad is None
    before = first.detach().clone()
    run.optimizer.step()
    moment = run.optimizer.state[last]["exp_avg"]
    assert (moment[0] - moment[1]).gt(0.09).all()
    assert same_bits(first.detach(), before)


@pytest.mark.parametrize("end", ["step", "zero_grad", "backward", "assign", "none"])
def test_one_that_is_held_keeps_what_it_showed(
    end: str, run: Run, truth: list[torch.Tensor]
) -> None:
    run.loss().backward()
    (weight,) = (p for name, p in run.model.named_parameters() if name == "head.weight")
    true = next(one for one in reversed(truth) if one.shape == weight.shape)
    held: Any = weight.grad
    held *= 2
    grads(run)[0].sum()  # Of another unit: the values are at home alone.
    ends: dict[str, Callable[[], object]] = {
        "step": run.optimizer.step,
        "zero_grad": run.optimizer.zero_grad,
        "backward": lambda: run.loss().backward(),
        "assign": lambda: setattr(weight, "grad", torch.ones_like(weight)),
        "none": lambda: setattr(weight, "grad", None),
    }
    ends[end]()
    assert torch.equal(held, true * 2)
    held.zero_()
    assert held.eq(0).all()
    assert weight.grad is None or not weight.grad.eq(0).all()
    run.optimizer.zero_grad()
    plain(run, 2)


def test_zeros_are_put_home(run: Run) -> None:
    run.loss().backward()
    run.model.zero_grad(set_to_none=False)
    assert all(one.eq(0).all() for one in grads(run))


def test_what_is_not_finite_is_told_and_may_be_skipped(run: Run) -> None:
    run.loss().backward()
    grads(run)[-1][0, 0] = math.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0, error_if_nonfinite=True)
    run.optimizer.zero_grad()
    plain(run, 2)


def test_one_is_refused_where_the_engine_cannot_be_used(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.loss().backward()
    held: Any = grads(run)[0]
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="a forked process touched"):
            held.norm()
    run.engine.close()
    with pytest.raises(RuntimeError, match="was closed"):
        held.norm()


def test_clipping_takes_them_for_tensors_that_go_in_lists(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an accelerator norms in lists are rounded otherwise than alone."""
    given: list[int] = []
    norm = torch._foreach_norm
    monkeypatch.setattr(
        torch, "_foreach_norm", lambda of, *args: (given.append(len(of)), norm(of, *args))[1]
    )
    run.loss().backward()
    clip_norm(run)
    assert given == [len(grads(run))]


def test_where_all_have_room_they_are_plain(tmp_path: Path) -> None:
    with attached(PLACEMENT, tmp_path, exposed_memory="1MiB") as run:
        run.loss().backward()
        assert all(type(one) is torch.Tensor for one in grads(run))
