"""Copies in pieces: every byte once, few under way, and what is more urgent goes between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.program.ops import Lane, Op, Value, Verb
from offload.program.schedule import Fence
from offload.runtime import executor as copies
from offload.runtime.device import CPU, Device
from offload.runtime.entry import EngineError
from offload.runtime.executor import in_pieces
from offload.runtime.lanes import Lanes
from tests.training import RESIDENT, assert_same, train

PIECE = copies.PIECE_BYTES_MAX
BLOCK = 4096


class Late(Device):
    """Copies when somebody waits for them, in the order in which they were queued."""

    def __init__(self) -> None:
        super().__init__(CPU.torch_device)
        self.queued: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.sizes: list[int] = []
        self.most = 0

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        self.queued.append((into, source))
        self.sizes.append(into.numel())
        self.most = max(self.most, len(self.queued))

    def stream(self) -> object:
        return "the only one"

    def fence(self, stream: object) -> Fence:
        return Event(self, len(self.sizes))

    def settle(self, left: int) -> None:
        while len(self.queued) > left:
            into, source = self.queued.pop(0)
            into.copy_(source)


class Event:
    def __init__(self, device: Late, behind: int) -> None:
        self.device, self.behind = device, behind

    def synchronize(self) -> None:
        self.device.settle(len(self.device.sizes) - self.behind)

    wait = synchronize

    def query(self) -> bool:
        return len(self.device.sizes) - len(self.device.queued) >= self.behind


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    most = 4 * BLOCK
    monkeypatch.setattr(copies, "PIECE_BYTES_MAX", most)
    return most


@pytest.mark.parametrize("blocks", [0, 1, 3, 4, 5, 8, 9, 13, 64])
@pytest.mark.parametrize("more", [0, 1, BLOCK - 1])
def test_every_byte_arrives_in_even_pieces_of_which_few_are_under_way(
    blocks: int, more: int, small: int
) -> None:
    size = blocks * BLOCK + more
    source = torch.arange(size).to(torch.uint8)
    into, device = torch.zeros_like(source), Late()
    yields = len(list(in_pieces(device, into, source)))
    assert device.most <= copies.UNDER_WAY_MAX
    assert not device.sizes or yields == len(device.sizes) - 1 == -(-size // small) - 1
    if yields:
        assert max(device.sizes) <= small
        assert min(device.sizes[:-1]) > small // 2
    device.settle(0)
    assert torch.equal(into, source)


def test_pieces_are_of_the_size_that_is_asked_for() -> None:
    assert 32 << 20 <= PIECE // 2 < PIECE <= 64 << 20


# -- on a lane --------------------------------------------------------------------------------


def op(lane: Lane) -> Op:
    return Op(lane, Verb.MOVE, Value("weight", 0), (), (), 1, 0)


class Course:
    """An op in three pieces on a lane, of urgency 5, that waits in each until it is let go on."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.lanes = Lanes([Lane.H2D, Lane.CPU], device=CPU)
        self.main = self.lanes.submit(op(Lane.H2D), [], (0, 5), self._pieces)
        self.begun.acquire()

    def _pieces(self) -> Iterator[None]:
        for piece in range(3):
            self.begun.release()
            self.go_on.acquire()
            self.done.append(f"piece {piece}")
            yield

    def submit(self, name: str, key: int, **options: Any) -> Any:
        def run() -> None:
            self.done.append(name)

        return self.lanes.submit(op(Lane.H2D), [], (0, key), options.get("run", run))

    def end(self) -> None:
        for _ in range(3):
            self.go_on.release()


@pytest.fixture
def course() -> Iterator[Course]:
    made = Course()
    try:
        yield made
    finally:
        made.end()
        made.lanes.close()


def test_what_is_more_urgent_goes_between_two_pieces(course: Course) -> None:
    tasks = [course.submit(name, key) for name, key in (("late", 6), ("as", 5), ("soon", 4))]
    course.go_on.release()
    course.begun.acquire()
    tasks.append(course.submit("at once", 0))
    course.end()
    course.lanes.wait([course.main, *tasks])
    assert course.done == ["piece 0", "soon", "piece 1", "at once", "piece 2", "as", "late"]
    used = course.lanes.stats.use[Lane.H2D]
    assert (used.operations, used.bytes) == (5, 5)


class Never:
    def synchronize(self) -> None:
        raise AssertionError("a copy under way waited for what could go after it")

    wait = synchronize

    def query(self) -> bool:
        return False


def test_what_the_device_is_not_ready_for_does_not_go_between(
    python_books: None, course: Course
) -> None:
    urgent = course.submit("urgent", 0)
    urgent.fences = [Never()]
    course.go_on.release()
    course.begun.acquire()
    assert course.done == ["piece 0"]
    urgent.fences = []
    course.end()
    course.lanes.wait([course.main, urgent])
    assert course.done == ["piece 0", "piece 1", "urgent", "piece 2"]


def test_a_failure_between_two_pieces_is_the_failure_of_the_lane(course: Course) -> None:
    def fails() -> None:
        raise OSError("between two pieces")

    urgent = course.submit("", 0, run=fails)
    course.end()
    with pytest.raises(EngineError) as raised:
        course.lanes.wait([urgent])
    assert isinstance(raised.value.__cause__, OSError)


def test_an_unstarted_end_of_a_copy_is_cut_short_by_closing(course: Course) -> None:
    urgent = course.submit("urgent", 0)
    closing = threading.Thread(target=course.lanes.close)
    closing.start()
    while not course.lanes.closed:
        pass
    course.end()
    closing.join()
    assert course.done == ["piece 0", "piece 1", "piece 2"]
    assert not urgent.begun


def test_training_is_the_same_in_the_smallest_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = train(RESIDENT, tmp_path, steps=2)
    monkeypatch.setattr(copies, "PIECE_BYTES_MAX", BLOCK)
    assert_same(train(("cpu", "cpu", "cpu"), tmp_path, steps=2), resident)
