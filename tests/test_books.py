"""The compiled books do as the reference: same waits, same order of starts, all bytes copied."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from offload.program.ops import Lane, Op, Value, Verb
from offload.program.schedule import State
from offload.runtime.books import BOOKS_VARIABLE, Books, CompiledBooks, native_books
from tests.submitting import submit
from tests.training import some_fast

offload_books = pytest.importorskip("offload.runtime._books", reason="not compiled here")

LANES = (Lane.H2D, Lane.CPU)


def op(lane: Lane, deadline: int = 0, *, user: bool = False) -> Op:
    verb = Verb.FORWARD if user else Verb.UPDATE
    return Op(lane, verb, Value("state", 0, 0), (), (), 0, deadline)


class Pair:
    """The same done to both books; whatever they answer must be the same."""

    def __init__(self) -> None:
        self.both: tuple[Any, Any] = (Books(LANES), CompiledBooks())
        self.tasks: list[tuple[Any, Any]] = []
        self.running: list[tuple[Any, Any]] = []
        self.started: list[int] = []

    def submit(self, wanted: Any, key: Any, *, user: bool = False) -> None:
        """Queue ops, each of a lane and with the cells that it reads and writes."""
        issued = []
        for number, books in enumerate(self.both):
            work = None if user or number else print
            known = [books.know(op(lane, key[1], user=user), *pick, work) for lane, pick in wanted]
            waits = [one.serial for one in books.touching(*wanted[0][1])]
            issued.append((waits, books.issue(known, key[0])))
        assert issued[0][0] == issued[1][0]
        self.tasks += zip(issued[0][1], issued[1][1], strict=True)

    def take(self, lane: Lane) -> None:
        """Begin what is next on a lane."""
        reference, compiled = self.both
        task = reference._schedule.take(lane)
        other = compiled.first(lane)
        assert (task and task.serial) == (other and other.serial)
        if task is not None:
            self.begun(task, other)

    def begin(self, pair: tuple[Any, Any]) -> None:
        """Begin the user's own."""
        began = [books.begin(task, 0.0) for books, task in zip(self.both, pair)]
        assert began[0] == began[1]
        if began[0]:
            self.begun(*pair)

    def begun(self, task: Any, other: Any) -> None:
        assert task.state is State.RUNNING
        self.running.append((task, other))
        self.started.append(task.serial)

    def finish(self, pair: tuple[Any, Any]) -> None:
        self.running.remove(pair)
        for books, task in zip(self.both, pair):
            books.finish(task)

    def look(self) -> None:
        """All that can be seen of every task, and of the places."""
        board, other_board = ([one.serial for one in books.all()] for books in self.both)
        assert sorted(board) == sorted(other_board)
        for task, other in self.tasks:
            key, other_waits = self.both[1].look(other)
            assert task.over or task.key == key
            for name in ("over", "begun", "cancelled"):
                assert getattr(task, name) == getattr(other, name), name
            if not task.over:
                waits = [one.serial for one in task.waits if not one.over]
                assert waits == other_waits
                path = [
                    [lane for lane, _ in books.path(one)]
                    for books, one in zip(self.both, (task, other))
                ]
                assert path[0] == path[1]


def startable(task: Any) -> bool:
    return bool(task.of_user and not task.begun and not task.over)


@pytest.mark.parametrize("seed", some_fast(range(60), fast=30))
def test_random_ops_start_in_the_order_of_the_reference(seed: int) -> None:
    luck, pair = random.Random(seed), Pair()
    cells = range(luck.choice([2, 6, 20]))
    for step in range(150):
        what = luck.random()
        key = (luck.randrange(4), luck.randrange(6))
        if what < 0.35:
            pick = [luck.sample(cells, luck.choice([0, 1, 1, 2])) for _ in range(2)]
            pair.submit([(luck.choice(LANES), pick)], key, user=luck.random() < 0.3)
        elif what < 0.45:
            several = [
                (lane, [luck.sample(cells, luck.choice([0, 1])) for _ in range(2)])
                for lane in luck.choices(LANES, k=luck.randrange(1, 4))
            ]
            pair.submit(several, key)
        elif what < 0.55:
            chosen = luck.sample(pair.tasks, min(len(pair.tasks), luck.randrange(3)))
            for index, books in enumerate(pair.both):
                books.cancel([both[index] for both in chosen])
        elif what < 0.75:
            pair.take(luck.choice(LANES))
        elif what < 0.85 and (mine := [both for both in pair.tasks if startable(both[0])]):
            pair.begin(luck.choice(mine))
        elif pair.running:
            pair.finish(luck.choice(pair.running))
        if step % 10 == 0:
            pair.look()
    while any(not task.over for task, _ in pair.tasks):
        before = len(pair.started)
        for lane in LANES:
            pair.take(lane)
        for both in [one for one in pair.tasks if startable(one[0])]:
            pair.begin(both)
        assert pair.running or len(pair.started) > before
        while pair.running:
            pair.finish(pair.running[0])
    pair.look()
    assert len(set(pair.started)) == len(pair.started) > 10


def copy_of(into: torch.Tensor, source: torch.Tensor) -> Any:
    places = (into.data_ptr(), 0), (source.data_ptr(), 0)
    return offload_books.copies([(*places, source.numel())])


def test_copies_are_done_by_the_lane_itself_and_counted() -> None:
    books = CompiledBooks()
    source = torch.arange(5000).to(torch.uint8)
    into = [torch.zeros_like(source) for _ in range(2)]
    gate = submit(books, op(Lane.COMPUTE, user=True), [], (0, 0))
    first, second = (
        submit(books, replace(op(Lane.H2D), bytes=5000), [gate], (0, at), None, work)
        for at, work in enumerate(copy_of(one, source) for one in into)
    )
    behind = submit(books, op(Lane.H2D), [first], (0, 9))
    assert books.first(Lane.H2D) is None
    assert books.begin(gate, 0.0)
    books.finish(gate)
    assert books.first(Lane.H2D) is behind
    assert first.over
    assert second.over
    assert all(torch.equal(one, source) for one in into)
    seconds, moved, operations = books.used(Lane.H2D)
    assert seconds > 0
    assert (moved, operations) == (10000, 2)
    assert books.used(Lane.H2D) == (0.0, 0, 0)
    assert [one.lane for one in books.ran()] == [Lane.COMPUTE, Lane.H2D, Lane.H2D]
    assert books.ran() == []


def test_a_small_copy_is_done_by_who_makes_it_ready_where_its_lane_sleeps() -> None:
    books = CompiledBooks()
    lane = threading.Thread(target=books.take, args=(Lane.H2D,))
    lane.start()
    source = torch.arange(128 << 10).to(torch.uint8)
    at_hand = False
    try:
        for number in range(1000):  # The first may come before the lane sleeps.
            into = torch.zeros_like(source)
            work = copy_of(into, source)
            task = submit(books, op(Lane.H2D), [], (0, number), None, work)
            at_hand = task.over
            while not books.over(task, 1.0):
                pass
            assert torch.equal(into, source)
            if at_hand:
                break
        assert at_hand
    finally:
        books.stop(closing=True)
        lane.join()


def test_what_must_not_be_is_refused_and_changes_nothing() -> None:
    books = CompiledBooks()
    task = submit(books, op(Lane.CPU), [], (0, 0))
    with pytest.raises(RuntimeError, match="what is finished has begun"):
        books.finish(task)
    assert books.first(Lane.CPU) is task
    books.finish(task)
    with pytest.raises(RuntimeError, match="what is finished has begun"):
        books.finish(task)
    with pytest.raises(ValueError, match="a copy of no bytes"):
        offload_books.copies([((8, 0), (16, 0), 0)])
    with pytest.raises(ValueError, match="was given no memory"):
        offload_books.copies([((0, 0), (16, 0), 8)])
    mine = submit(books, op(Lane.COMPUTE, user=True), [], (0, 0))
    books.cancel([mine])
    with pytest.raises(RuntimeError, match="what begins has not begun"):
        books.begin(mine, 0.0)


def test_python_serves_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BOOKS_VARIABLE, raising=False)
    assert native_books() is offload_books
    monkeypatch.setenv(BOOKS_VARIABLE, "python")
    assert native_books() is None
