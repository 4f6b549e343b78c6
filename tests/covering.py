"""Few cases of many: every two values of two factors meet, or any values of all factors but one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any
from zlib import crc32

import pytest

Setting = tuple[str, str]
"""A factor and one of its values."""

Case = dict[str, str]
"""A value for every factor."""


def pairwise(
    factors: Mapping[str, Sequence[str]], excluded: Callable[[Setting, Setting], bool]
) -> list[Case]:
    """Cases that hold every pair of settings which may meet. The same input gives the same cases.

    Greedy: a case starts from the first pair not yet covered, and takes for each further factor
    the value that covers most of what is left together with what it has already.

    Args:
        factors: the values of each; the first value goes with every value of the others.
        excluded: whether two settings, in the order of `factors`, must not meet.
    """
    names = list(factors)
    left: dict[tuple[Setting, Setting], None] = {}
    for one, other in combinations(names, 2):
        for pair in [((one, a), (other, b)) for a in factors[one] for b in factors[other]]:
            if not excluded(*pair):
                left[pair] = None

    def gain(setting: Setting, case: Case) -> int:
        at = names.index(setting[0])
        pairs = [
            (setting, chosen) if at < names.index(chosen[0]) else (chosen, setting)
            for chosen in case.items()
        ]
        return -1 if any(excluded(*pair) for pair in pairs) else sum(p in left for p in pairs)

    cases: list[Case] = []
    while left:
        case = dict(next(iter(left)))
        for name in names:
            if name not in case:
                # Of equals any one: it should not be the same company that meets again and again.
                ranks = {
                    value: (gain((name, value), case), crc32(f"{len(cases)} {value}".encode()))
                    for value in factors[name]
                }
                case[name] = max(ranks, key=lambda value: ranks[value])
        case = {name: case[name] for name in names}
        cases.append(case)
        for pair in combinations(case.items(), 2):
            left.pop(pair, None)
    return cases


def by_turns(*factors: Sequence[Any]) -> list[Any]:
    """Parameters of a test: half of the product of `factors` in the fast tier, the others slow.

    Values of all factors but one, whichever, meet in each way; the last one's take turns.
    """
    return [
        pytest.param(
            *(values[at] for values, at in zip(factors, where)),
            marks=pytest.mark.slow if sum(where) % 2 else (),
            id="-".join(_name(values[at]) for values, at in zip(factors, where)),
        )
        for where in product(*(range(len(values)) for values in factors))
    ]


def _name(value: Any) -> str:
    """What a value is called in a test's name: the same in each process."""
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return str(getattr(value, "__name__", value))
