"""Hard budgets: what is really taken, and what is refused before anything has happened."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import attachment
from offload.config import Config
from offload.planning.machine import Machine
from offload.planning.planner import plan, remarks
from offload.runtime.store import Store
from tests.faults import nothing_leaks
from tests.forked import Forked, anew
from tests.profiles import blocks
from tests.simulated import SimulatedIO
from tests.training import Net, batch, loss_of, plain, same_bits, some_fast, train

SLACK_BYTES = 128 << 20

# -- memory that is really taken --------------------------------------------------------------

MEASURED = """
import json, sys, threading, time
import torch
from torch import nn
import torch.nn.functional as F
import offload

def resident():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))

def watch():
    while not done.is_set():
        peaks.append(resident())
        time.sleep(0.005)

path, layers, device, cpu = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
baseline, peaks, done = resident(), [0], threading.Event()
thread = threading.Thread(target=watch, daemon=True)
thread.start()

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))

with torch.device("meta"):
    model = nn.Sequential(*(Block() for _ in range(layers))).to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = offload.Config(params="nvme", gradients="nvme", optimizer="nvme", nvme_path=path,
                        device_memory=device, cpu_memory=cpu, max_grad_norm=1.0)
model, optimizer = offload.attach(model, optimizer, config)
states = sum(row.bytes for row in optimizer.engine.plan.rows() if row.kind == "state")
x = torch.randn(4, 512).bfloat16()
for micro_batches in (2, 1):
    for _ in range(micro_batches):
        model(x).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.engine.settle()
done.set()
thread.join()
print(json.dumps({"taken": max(peaks) - baseline, "states": states,
                  "parameters": sum(p.numel() for p in model.parameters()),
                  "tiers": [u.resident_bytes + u.staging_bytes
                            for u in optimizer.engine.plan.tiers()]}))
optimizer.engine.close()
"""


def test_memory_stays_within_the_budgets(tmp_path: Path) -> None:
    """All on nvme: what is taken is far below the states, and at most the budgets and a slack."""
    device, cpu = 24 << 20, 88 << 20
    found = Forked(lambda: anew(MEASURED, tmp_path, 9, device, cpu))
    printed, errors = found.communicate()
    assert found.returncode == 0, errors
    told = json.loads(printed)
    assert told["parameters"] > 18e6
    assert told["tiers"][0] <= device
    assert told["tiers"][1] <= cpu
    assert told["states"] + 4 * told["parameters"] > device + cpu + SLACK_BYTES
    assert told["taken"] <= device + cpu + SLACK_BYTES, told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_states_five_times_the_budget(tmp_path: Path) -> None:
    """`offload train --size 500m`, everything on nvme, in 1 GiB of CPU memory."""
    if shutil.disk_usage(tmp_path).free < 12 << 30:
        pytest.skip("needs 12 GiB of disk")
    budgets = {"device": 512 << 20, "cpu": 1 << 30}
    base = [sys.executable, "-c"]
    status = "print(open('/proc/self/status').read())"
    imports = subprocess.check_output([*base, f"import offload.cli.train; {status}"], text=True)
    command = [*base, "from offload.cli import main; raise SystemExit(main())", "train", "--json"]
    command += ["--size", "500m", "--params", "nvme", "--gradients", "nvme", "--optimizer", "nvme"]
    command += f"--cpu-memory 1GiB --device-memory {budgets['device']}".split()
    command += ["--nvme-path", str(tmp_path)]
    command += ["--steps", "2", "--batch", "1", "--seq-len", "32", "--eval-windows", "1"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors)
        peak = 0
        while process.poll() is None:
            try:
                peak = max(peak, anonymous(Path(f"/proc/{process.pid}/status").read_text()))
            except (OSError, KeyError):
                break
            time.sleep(0.02)
        process.wait()
        out.seek(0)
        errors.seek(0)
        assert process.returncode == 0, errors.read()
        records = [json.loads(line) for line in out.read().splitlines()]
    steps = [one for one in records if one["kind"] == "step"]
    assert len(steps) == 2
    summary = records[-1]
    assert summary["tiers"]["nvme"]["peak_bytes"] > 5 * budgets["cpu"]
    for tier, budget in budgets.items():
        assert summary["tiers"][tier]["peak_bytes"] <= budget
    taken = peak - anonymous(imports)
    assert taken <= sum(budgets.values()) + SLACK_BYTES, taken
    assert list(tmp_path.iterdir()) == []


def anonymous(status: str) -> int:
    """RssAnon + RssShmem in bytes, of a /proc/PID/status."""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


# -- budgets that are too small ---------------------------------------------------------------


def started(seed: int = 1) -> tuple[Net, torch.optim.Optimizer]:
    """A model and an optimizer with a state, and a gradient."""
    torch.manual_seed(seed)
    model = Net(layers=3, tied=True).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, batch(torch.Generator().manual_seed(1))).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, batch(torch.Generator().manual_seed(2))).backward()
    return model, optimizer


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All values, gradients and states, in memory of their own."""
    found = []
    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.grad is not None
        assert not hasattr(parameter, "_offload_home")
        found += [parameter.detach().clone(), parameter.grad.clone()]
        found += [optimizer.state[parameter][name].clone() for name in ("exp_avg", "exp_avg_sq")]
    assert not model._forward_pre_hooks
    return found


def assert_untouched(work: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> None:
    """`work` fails to attach; the model goes on as if nobody had tried."""
    model, optimizer = started()
    before = bits(model, optimizer)
    identity = [id(p) for p in model.parameters()]
    with nothing_leaks():
        work(model, optimizer)
    assert [id(p) for p in model.parameters()] == identity
    assert all(same_bits(one, other) for one, other in zip(bits(model, optimizer), before))
    with pytest.raises(ValueError, match="not attached"):
        offload.engine_of(model)
    other, reference = started()
    for one, two in ((model, optimizer), (other, reference)):
        two.step()
        loss_of(one, batch(torch.Generator().manual_seed(3))).backward()
    assert all(same_bits(a, b) for a, b in zip(bits(model, optimizer), bits(other, reference)))


def config(directory: Path | str, tier: Any = "nvme", **more: Any) -> offload.Config:
    budgets = {"device_memory": "64MiB", "cpu_memory": "64MiB", "nvme_space": "64MiB"}
    return offload.Config(
        params=tier,
        gradients=tier,
        optimizer=tier,
        nvme_path=(str(directory),),
        **{**budgets, **more},
    )


TOO_SMALL = {
    "device": ("device", "device_memory"),
    "slots": ("nvme", "device_memory"),
    "cpu": ("cpu", "cpu_memory"),
    "staging": ("nvme", "cpu_memory"),
    "nvme": ("nvme", "nvme_space"),
}


@pytest.mark.parametrize("name", TOO_SMALL)
def test_a_budget_too_small_is_refused_with_a_table(name: str, tmp_path: Path) -> None:
    tier, field = TOO_SMALL[name]
    given = 20 << 10

    def work(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with pytest.raises(offload.BudgetError) as caught:
            offload.attach(model, optimizer, config(tmp_path, tier, **{field: given}))
        lines = str(caught.value).splitlines()
        assert re.search(r"needed\s+given\s+budget", lines[1])
        (marked,) = (line for line in lines if "too small" in line)
        assert f"Config.{field}" in marked
        assert "20.00 KiB" in marked
        (needed,) = re.findall(r"^\w+\s+([\d.]+ [KM]iB)", marked)
        assert float(needed.split()[0]) > 20 or "MiB" in needed
        # With what the table asks for it can be done.
        asked = {field: _more(needed)}
        torch.manual_seed(1)
        other = Net(layers=3, tied=True).to(torch.bfloat16)
        _, attached = offload.attach(
            other, torch.optim.AdamW(other.parameters()), config(tmp_path, tier, **asked)
        )
        loss_of(other, batch(torch.Generator().manual_seed(1))).backward()
        attached.step()
        attached.engine.settle()
        attached.engine.close()

    assert_untouched(work)
    assert list(tmp_path.iterdir()) == []


def _more(size: str) -> int:
    """A size as the table rounds it, and what the rounding may have taken."""
    number, unit = size.split()
    return int((float(number) + 0.01) * {"KiB": 1 << 10, "MiB": 1 << 20}[unit])


def test_budgets_that_the_machine_does_not_have_are_refused() -> None:
    machine = Machine(device_bytes=1 << 20, cpu_bytes=100 << 10, device_is_cpu=True)

    def work(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with pytest.raises(offload.BudgetError, match=r"only 100\.00 KiB is free"):
            offload.attach(model, optimizer, config("/tmp", "cpu"), machine=machine)

    assert_untouched(work)


# -- paths that cannot be used ----------------------------------------------------------------


@pytest.mark.usefixtures("one_call")
@pytest.mark.parametrize("code", some_fast([errno.ENOSPC, errno.EACCES]))
def test_an_nvme_path_that_fails_at_any_call_of_attach(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attach(io: SimulatedIO, model: nn.Module, optimizer: Any) -> Any:
        monkeypatch.setattr(attachment, "Store", partial(Store, io=io))
        return offload.attach(model, optimizer, config(tmp_path))

    whole = SimulatedIO(0)
    model, optimizer = started()
    attach(whole, model, optimizer)[1].engine.close()
    calls = len(whole.calls)
    assert calls > 15
    for number in [1, 2, 3, 4, 5, *range(6, calls + 1, 5)]:
        io = SimulatedIO(0, errors={number: code})
        if whole.calls[number - 1] in ("preadv", "pwritev", "open", "fallocate"):

            def work(
                model: nn.Module, optimizer: torch.optim.Optimizer, io: SimulatedIO = io
            ) -> None:
                with pytest.raises(OSError, match=re.escape(str(tmp_path))) as caught:
                    attach(io, model, optimizer)
                assert caught.value.errno == code

            assert_untouched(work)
            assert not io.inner.files  # type: ignore[attr-defined]


def test_memory_that_is_refused_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError("on purpose")

    monkeypatch.setattr(attachment, "Memory", refuse)

    def work(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with pytest.raises(MemoryError, match="on purpose"):
            offload.attach(model, optimizer, config(tmp_path))

    assert_untouched(work)


def test_a_late_failure_of_attach_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model, optimizer = started()
    optimizer.state[model.norm.weight]["exp_avg"] = torch.zeros(3)
    with nothing_leaks(), pytest.raises(ValueError, match=r"norm\.weight"):
        offload.attach(model, optimizer, config(tmp_path))
    optimizer.state[model.norm.weight]["exp_avg"] = torch.zeros(32).bfloat16()
    values = bits(model, optimizer)
    optimizer.step()
    assert not same_bits(bits(model, optimizer)[0], values[0])


def test_no_hook_is_left_where_the_optimizer_cannot_be_taken_over(tmp_path: Path) -> None:
    model, optimizer = started()
    twice = optimizer.param_groups[0]
    optimizer.param_groups.append({**twice, "params": twice["params"][:1]})
    with nothing_leaks(), pytest.raises(ValueError, match="more than one parameter group"):
        offload.attach(model, optimizer, config(tmp_path))
    assert not any(module._forward_pre_hooks for module in model.modules())


# -- a path in memory -------------------------------------------------------------------------


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory on tmpfs."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("needs /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def test_a_tmpfs_path_works_with_one_notice_and_a_warning(shm: Path, tmp_path: Path) -> None:
    model, optimizer = started()
    with nothing_leaks():
        with pytest.warns(RuntimeWarning, match="which is memory and not a disk") as told:
            _, attached = offload.attach(model, optimizer, config(shm))
        (notice,) = attached.engine.notices
        assert [(str(one.message), one.filename) for one in told] == [(notice, __file__)]
        assert str(shm) in notice
        assert notice.endswith(": what it holds takes memory; give a directory on a drive.")
        attached.engine.close()
        del attached
    everything = ("nvme", "nvme", "nvme")
    one, other = (train(everything, path, plain) for path in (shm, tmp_path))
    assert one.losses == other.losses
    assert list(shm.iterdir()) == []


@pytest.mark.filterwarnings("error")
def test_a_warning_of_a_tmpfs_path_may_be_an_error(shm: Path) -> None:
    model, optimizer = started()
    with nothing_leaks(), pytest.raises(RuntimeWarning, match="is memory and not a disk"):
        offload.attach(model, optimizer, config(shm))
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())


def test_a_disk_gives_no_notice(tmp_path: Path) -> None:
    store = None
    with nothing_leaks():
        model, optimizer = started()
        _, attached = offload.attach(model, optimizer, config(tmp_path))
        store = attached.engine.runner.store
        assert attached.engine.notices == ((store.volume.notice,) if store.volume.notice else ())
        assert store.volume.direct == (store.volume.notice is None)
        attached.engine.close()
        del attached, store


def test_budgets_that_lie_idle_or_are_larger_than_the_machine_are_told() -> None:
    def told(**asked: Any) -> list[str]:
        config = Config(**asked)
        return list(remarks(plan(blocks(4, 100_000), config, machine), config, machine))

    machine = Machine(device_bytes=1 << 30, cpu_bytes=1 << 30, nvme_bytes=1 << 40)
    everywhere = dict.fromkeys(("params", "gradients", "optimizer"), "nvme")
    (idle,) = told(**everywhere, nvme_path="/nvme", cpu_memory="1GiB", device_memory="64MiB")
    assert "of the 1.00 GiB that Config.cpu_memory gives" in idle
    assert "'auto' would use the rest" in idle
    (large,) = told(cpu_memory="2GiB")
    assert "Config.cpu_memory is 2.00 GiB, but only 1.00 GiB is free" in large
    assert told(**everywhere, nvme_path="/nvme") == told(cpu_memory="1GiB") == []
