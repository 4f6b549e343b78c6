"""The one file that knows CUDA by name, on a runtime of our own; and that it is the only one."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.runtime import device as driver
from offload.runtime.device import Accelerator, PinError
from tests.training import assert_same, attached, batch, loss_of, plain, result_of, train

ROOT = Path(__file__).parents[1]
CUDA = torch.device("cuda", 1)
CPU_TIER = ("cpu", "cpu", "cpu")
REFUSED = 2  # cudaErrorMemoryAllocation


@dataclass
class FakeRuntime:
    """A CUDA runtime whose calls return errors and leave them pending, as the real one's do."""

    fails: bool = False
    pending: int = 0
    calls: list[tuple[str, int, int, int]] = field(default_factory=list)
    devices: list[int] = field(default_factory=list)
    """The thread's current device at each call."""
    current: int = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address, size, flags))
        return self._returned()

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address, 0, 0))
        return self._returned()

    def cudaGetErrorString(self, code: int) -> str:
        return {REFUSED: "out of memory"}[code]

    def get_last_error(self) -> int:
        last, self.pending = self.pending, 0
        return last

    def _returned(self) -> int:
        self.devices.append(self.current)
        code = REFUSED if self.fails else 0
        self.pending = code or self.pending
        return code


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """The runtime of a thread whose current device is the first; a launch finds what is pending."""
    fake = FakeRuntime()

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        before, fake.current = fake.current, device.index
        yield
        fake.current = before

    def launched(*_: object, **__: object) -> None:
        if fake.get_last_error():
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(driver, "_runtime", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch, "ones", launched)
    return fake


def test_memory_is_registered_and_given_back_by_any_thread_on_our_device(
    runtime: FakeRuntime,
) -> None:
    Accelerator(CUDA).pin(4096, 1 << 20)
    Accelerator(CUDA).unpin(4096)
    assert runtime.calls == [("register", 4096, 1 << 20, 0), ("unregister", 4096, 0, 0)]
    assert runtime.devices == [CUDA.index, CUDA.index]
    assert runtime.current == 0


def test_a_refused_registration_says_why_and_leaves_nothing_pending(runtime: FakeRuntime) -> None:
    runtime.fails = True
    told = r"cudaHostRegister of 1.00 MiB returned 2, out of memory"
    with pytest.raises(PinError, match=f"{told}; likely .* is left to pin"):
        Accelerator(CUDA).pin(4096, 1 << 20)
    assert runtime.pending == 0


def test_a_failure_to_give_back_is_taken_out_too(runtime: FakeRuntime) -> None:
    runtime.fails = True
    Accelerator(CUDA).unpin(4096)
    assert runtime.pending == 0


def test_an_attached_model_refuses_to_be_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In forward, in a backward, and where a weight at rest is touched; and goes on afterwards."""
    expected = train(CPU_TIER, tmp_path, steps=2)
    with attached(CPU_TIER, tmp_path) as run:
        torch.manual_seed(2)
        plain(run, 0)
        before = run.generator.get_state()
        loss = loss_of(run.model, batch(run.generator))
        uses: list[Callable[[], Any]] = [
            lambda: run.model(batch(run.generator)),
            loss.backward,
            lambda: run.model.head.weight.detach(),  # type: ignore[union-attr,operator]
        ]
        for use in uses:
            with monkeypatch.context() as patch:
                on = run.engine.runner.device
                patch.setattr(on, "is_host", False)
                patch.setattr(on, "refuse_capture", Accelerator(CUDA).refuse_capture)
                patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                with pytest.raises(RuntimeError, match=r"CUDA graph .*Capture nothing"):
                    use()
        run.optimizer.zero_grad()
        run.generator.set_state(before)
        plain(run, 1)
        assert_same(result_of(run), expected)


class FakeEvent:
    """Keeps what it was asked for; without a stream it would take another device's."""

    def __init__(self, *, blocking: bool) -> None:
        self.blocking = blocking
        self.asked: list[tuple[str, Any]] = []

    def record(self, stream: Any) -> None:
        self.asked.append(("record", stream))

    def wait(self, stream: Any) -> None:
        self.asked.append(("wait", stream))

    def synchronize(self) -> None:
        self.asked.append(("synchronize", None))

    def query(self) -> bool:
        return True


def test_fences_block_without_spinning_on_streams_of_their_own_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[FakeEvent] = []

    def make(**options: Any) -> FakeEvent:
        made.append(FakeEvent(**options))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Event", make)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
    one = Accelerator(CUDA)
    fence = one.fence(one.stream())
    fence.synchronize()
    assert made[0].blocking
    assert made[0].asked == [("record", "current of cuda:1"), ("synchronize", None)]


@pytest.mark.parametrize("index", [0, 1])
def test_to_wait_for_all_of_a_device_makes_no_context_on_another(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's call makes the one current again that was, with a context: so it is ours by then."""
    current: list[int] = [0]
    waited: list[tuple[torch.device, int]] = []

    @contextmanager
    def chosen(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", chosen)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: waited.append((device, current[-1]))
    )
    ours = torch.device("cuda", index)
    Accelerator(ours).drain_all()
    assert waited == [(ours, index)]
    assert current == [0]


# -- names ------------------------------------------------------------------------------------

NAMED = re.compile(r"cuda|nvidia|nccl|\bhip|rocm", re.IGNORECASE)


def named(source: str) -> Iterator[str]:
    """Names, attributes and texts of a program that name the platform; prose does not count."""
    tree = ast.parse(source)
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        found = ""
        if isinstance(node, ast.Attribute):
            found = node.attr
        elif isinstance(node, ast.Name):
            found = node.id
        elif isinstance(node, ast.alias):
            found = node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = "" if id(node) in prose else node.value
        if NAMED.search(found):
            yield found


def test_no_other_file_of_the_engine_names_a_platform() -> None:
    files = [
        file
        for package in ("offload", "cpu_adam", "aio")
        for file in ROOT.glob(f"{package}/**/*.py")
    ]
    found = {str(file.relative_to(ROOT)): {*named(file.read_text())} for file in files}
    assert found.pop("offload/runtime/device.py")
    assert found.pop("offload/cli/findings.py")  # What a person reads.
    assert found.pop("offload/model/parameter.py")  # Torch's tensors have such names.
    assert {file: names for file, names in found.items() if names} == {}
