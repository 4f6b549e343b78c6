"""The cases of a pairwise covering: every pair that may meet does, no other one, and few cases."""

from __future__ import annotations

from itertools import combinations
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from tests.covering import Setting, pairwise
from tests.examples import cheap


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.integers(0, 1 << 32))
@cheap(100)
def test_every_pair_that_may_meet_does_and_no_other(sizes: list[int], seed: int) -> None:
    factors = {f"f{i}": [f"v{j}" for j in range(size)] for i, size in enumerate(sizes)}

    def excluded(one: Setting, other: Setting) -> bool:
        plain = "v0" in (one[1], other[1])
        return not plain and crc32(repr((seed, one, other)).encode()) % 4 == 0

    cases = pairwise(factors, excluded)
    met = {pair for case in cases for pair in combinations(case.items(), 2)}
    for one, other in combinations(factors, 2):
        for a in factors[one]:
            for b in factors[other]:
                pair = ((one, a), (other, b))
                assert (pair in met) is not excluded(*pair)


def test_hardly_more_cases_than_the_two_largest_factors_ask_for() -> None:
    sizes = {"a": 20, "b": 9, "c": 9, "d": 3, "e": 2}
    factors = {name: [f"{name}{i}" for i in range(size)] for name, size in sizes.items()}
    assert len(pairwise(factors, lambda *_: False)) <= 1.1 * 20 * 9
