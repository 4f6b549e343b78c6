"""The order of collectives by itself: ranks as threads, and what they begin."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from offload.parallel.group import Message
from offload.parallel.order import Order, Topic
from offload.runtime.entry import EngineError
from tests.training import some_fast, some_rows_fast

SEEDS = 200
PATIENCE_S = 20


class Rank:
    """A rank whose collectives are entries of a log."""

    def __init__(self, number: int, table: Table) -> None:
        self.number, self.table = number, table
        self.log: list[Message] = []
        self.rounds = 0
        self.order = Order(self._tell, self.log.append)

    def _tell(self, message: Message) -> list[Message]:
        self.rounds += 1
        return self.table.said(self.number, message)

    def use(self, *requests: Message, backward: bool = False) -> int:
        """A pass in which the rank needs these; the ranks that were at its end."""
        self.order.open("backward" if backward else "forward")
        for one in requests:
            self.order.request(one, lambda one=one: self.log.append(one))
        return self.order.close(1 << self.number, backward=backward)


class Table:
    """Where all ranks say something and hear the others."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self._barrier = ranks, threading.Barrier(ranks, timeout=PATIENCE_S)
        self._said: list[Any] = [None] * ranks

    def said(self, rank: int, message: Message) -> list[Message]:
        self._said[rank] = message
        self._barrier.wait()
        found = list(self._said)
        self._barrier.wait()
        return found

    def run(self, job: Callable[[Rank], None]) -> tuple[list[Rank], list[Exception]]:
        """The ranks after a job, and what they raised."""
        ranks, errors = [Rank(number, self) for number in range(self.ranks)], list[Exception]()

        def work(rank: Rank) -> None:
            try:
                job(rank)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in ranks]
        for one in threads:
            one.start()
        for one in threads:
            one.join(PATIENCE_S)
            assert not one.is_alive(), "a rank hangs"
        return ranks, errors


def gathers(*units: int) -> list[Message]:
    return [Message(Topic.GATHER, unit) for unit in units]


@pytest.mark.parametrize("ranks", some_fast([3, 2, 4]))
@pytest.mark.parametrize("part", some_fast(range(4)))
def test_all_ranks_begin_the_same_in_the_same_order(ranks: int, part: int) -> None:
    """Whatever each of them needs, and nobody hangs."""
    for seed in range(part * SEEDS // 4, (part + 1) * SEEDS // 4):
        usual = [random.Random(seed).randrange(6) for _ in range(5)]

        def job(rank: Rank, seed: int = seed, usual: Sequence[int] = usual) -> None:
            mine = random.Random(seed * 10 + rank.number)
            for step in range(6):
                needs = list(usual)
                if mine.random() < 0.4:
                    needs = mine.sample(range(6), mine.randrange(6))
                rank.use(*gathers(*needs))
                rank.order.meet(Topic.STEP, 0, step)

        found, errors = Table(ranks).run(job)
        assert not errors, (seed, errors)
        assert all(one.log == found[0].log for one in found), seed
        assert all(one.rounds == found[0].rounds for one in found), seed


def test_an_order_that_comes_again_needs_no_questions() -> None:
    def job(rank: Rank) -> None:
        for _ in range(3):
            rank.use(*gathers(0, 1, 2, 3))

    found, errors = Table(2).run(job)
    assert not errors
    assert found[0].log == gathers(0, 1, 2, 3) * 3
    assert found[0].rounds == 6 + 4  # Two a pass, and one for each unit in the first.


def test_who_leaves_a_known_order_does_it_for_the_others_first() -> None:
    def job(rank: Rank) -> None:
        rank.use(*gathers(0, 1, 2))
        rank.use(*gathers(*((0, 1, 2), (0, 5))[rank.number]))
        rank.use(*gathers(0, 1, 2))

    found, errors = Table(2).run(job)
    assert not errors
    assert found[0].log == found[1].log == gathers(0, 1, 2, 0, 1, 2, 5, 0, 1, 2)


def test_other_numbers_of_passes_end() -> None:
    """As with generations of other lengths."""

    def job(rank: Rank) -> None:
        for _ in range(1 + 2 * rank.number):
            rank.use(*gathers(0, 1))
        rank.order.meet(Topic.STEP)

    found, errors = Table(3).run(job)
    assert not errors
    assert all(one.log == found[0].log for one in found)


@pytest.mark.parametrize(("ranks", "seeds"), some_rows_fast([(3, 15), (2, 50), (3, 50), (4, 50)]))
def test_a_gradient_is_exchanged_once_and_by_all(ranks: int, seeds: int) -> None:
    """Whatever units each rank has, and whatever it needs between them."""
    for seed in range(seeds):

        def job(rank: Rank, seed: int = seed) -> None:
            mine = random.Random(seed * 10 + rank.number)
            for _ in range(3):
                for _ in range(mine.randrange(3)):  # Generations of other lengths.
                    rank.use(*gathers(*mine.sample(range(6), 2)))
                rank.use(*gathers(1, 2))
                needs = list[Message]()
                for unit in sorted(mine.sample(range(6), mine.randrange(1, 6)), reverse=True):
                    needs += gathers(unit)[: mine.randrange(2)]
                    needs.append(Message(Topic.EXCHANGE, unit))
                assert rank.use(*needs, backward=True) == (1 << ranks) - 1
                rank.order.meet(Topic.STEP)
                rank.log.append(Message(Topic.STEP, 0))

        found, errors = Table(ranks).run(job)
        assert not errors, (seed, errors)
        assert all(one.log == found[0].log for one in found), seed
        exchanged = set[int]()
        for one in found[0].log:
            if one.kind == Topic.STEP:
                exchanged.clear()
            elif one.kind == Topic.EXCHANGE:
                assert one.unit not in exchanged, seed
                exchanged.add(one.unit)


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ((Topic.STEP, 0, 0), (Topic.VALUES, 0, 0), "rank 0 called step.*rank 1 asked for values"),
        ((Topic.VALUES, 1, 0), (Topic.VALUES, 2, 0), "asked for values.*for different ones"),
    ],
)
def test_ranks_at_different_places_are_told(one: Any, other: Any, text: str) -> None:
    def job(rank: Rank) -> None:
        rank.order.meet(*(one, other)[rank.number])

    _, errors = Table(2).run(job)
    assert len(errors) == 2
    for error in errors:
        with pytest.raises(EngineError, match=text):
            raise error
