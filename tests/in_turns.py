"""Combinations of what a test is given: in the gate each value once, in the slow suite all."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def in_turns(*lists: Sequence[Any]) -> list[Any]:
    """Every combination of a value from each list. Those of the gate take them in turns: each value
    of the longest list once, with one of each other.
    """
    kept = {tuple(i % len(each) for each in lists) for i in range(max(map(len, lists)))}
    return [
        pytest.param(
            *(values[i] for values, i in zip(lists, places, strict=True)),
            marks=[] if places in kept else pytest.mark.slow,
        )
        for places in product(*(range(len(each)) for each in lists))
    ]
