"""A recurrence gives the same bits whatever the steps and drafts; those in C and for a
GPU what torch's gives.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from guards import needs_interpreter

from localllm.engine.chosen_operators import library_folder
from localllm_kernels import cpu_ops
from localllm_kernels.recurrence.launch import recurrence
from localllm_kernels.recurrence.recurrence import (
    Heads,
    RecurrenceRows,
    RecurrenceWeights,
    recurrence_reference,
)
from localllm_kernels.recurrence.state_cache import StateCache, StateSave, StateSlots
from localllm_kernels.recurrence.state_rings import keep_inputs

DELTA = Heads(num_keys=2, num_values=6, key_width=24, value_width=40, is_delta=True)
MAMBA = Heads(num_keys=2, num_values=12, key_width=24, value_width=40, is_delta=False)
LENGTH, RING = 45, 9
Rule = Callable[..., torch.Tensor]


class Case(NamedTuple):
    rule: Rule
    heads: Heads
    dtype: torch.dtype = torch.float32  # of the matrices


RULES = ["torch", "C", "triton"]
KINDS = ["delta", "mamba", "delta, half", "mamba, half"]


def rule_of(name: str) -> Rule:
    if name == "torch":
        return recurrence_reference
    return recurrence if name == "triton" else cpu_ops(library_folder()).recurrence


def case_of(rule: str, kind: str) -> Case:
    heads = DELTA if kind.startswith("delta") else MAMBA
    if rule == "triton":  # whose interpreter takes milliseconds for a token of a head
        heads = replace(heads, num_keys=1, num_values=1, key_width=7, value_width=5)
    return Case(rule_of(rule), heads, torch.float16 if "half" in kind else torch.float32)


def every_case(*values: object) -> list[Any]:
    """Every rule and kind with each of `values`; interpreted, each kind with one of them, and each
    with each in the slow suite.
    """
    return [
        pytest.param(
            rule,
            kind,
            *([value] if values else []),
            marks=marks_of(rule, is_slow=bool(values) and i != place % len(values)),
        )
        for rule in RULES
        for place, kind in enumerate(KINDS)
        for i, value in enumerate(values or [None])
    ]


def marks_of(rule: str, *, is_slow: bool) -> list[pytest.MarkDecorator]:
    marks = [needs_interpreter] if rule == "triton" else []
    return [*marks, pytest.mark.slow] if is_slow and rule != "C" else marks


def weights_of(heads: Heads, taps: int = 4) -> RecurrenceWeights:
    decay, bias = -torch.rand(heads.num_values), torch.randn(heads.num_values)
    norm = 1 + 0.2 * torch.randn(heads.value_width if heads.is_delta else heads.values)
    conv = torch.randn(taps, heads.conv_width) / 2
    if heads.is_delta:
        return RecurrenceWeights(conv, None, decay, bias, None, norm, 1e-6, most=2.0)
    skip, conv_bias = torch.randn(heads.num_values), torch.randn(heads.conv_width)
    return RecurrenceWeights(conv, conv_bias, decay, bias, skip, norm, 1e-6)


def rows_of(heads: Heads, count: int) -> torch.Tensor:
    return torch.randn(count, heads.values + heads.row_width)


def columns(rows: torch.Tensor, heads: Heads) -> RecurrenceRows:
    """As they follow one another in Mamba's product."""
    return RecurrenceRows(
        rows[:, heads.values : heads.values + heads.conv_width],
        rows[:, : heads.values],
        rows[:, heads.values + heads.conv_width :],
    )


def cache_of(case: Case, slots: int, ring: int = RING, taps: int = 4) -> StateCache:
    """What a slot held before is not read."""
    rows = torch.full((slots, ring, case.heads.row_width), torch.nan)
    matrix = torch.full((slots, *case.heads.matrix), torch.nan, dtype=case.dtype)
    return StateCache(rows, taps - 1, matrix)


def step(
    case: Case,
    rows: torch.Tensor,
    start: int,
    weights: RecurrenceWeights,
    cache: StateCache,
    saves: tuple[StateSave, ...] = (),
) -> torch.Tensor:
    """One without drafts, of the request in slot 1."""
    end = start + len(rows)
    states = StateSlots((1,), (0, len(rows)), (start,), (start,), (end,), saves)
    return case.rule(columns(rows, case.heads), weights, case.heads, cache, states)


def read(cache: StateCache, slot: int, position: int) -> torch.Tensor:
    """What the slot holds, uint8."""
    found = torch.empty(cache.num_bytes(position), dtype=torch.uint8)
    assert cache.read(slot, position, found) == len(found)
    return found


@pytest.mark.parametrize(
    ("rule", "kind", "sizes"),
    every_case([3, 1, 16, 2, 23], [7, 38], [17, 28], [1] * LENGTH),
)
def test_steps_give_the_same_bits_as_the_whole(rule: str, kind: str, sizes: list[int]) -> None:
    case = case_of(rule, kind)
    rows, weights = rows_of(case.heads, LENGTH), weights_of(case.heads)
    cache, found, start = cache_of(case, 3), [], 0
    for size in sizes:
        found.append(step(case, rows[start : start + size], start, weights, cache))
        start += size
    once = cache_of(case, 2, ring=3)
    assert torch.cat(found).equal(step(case, rows, 0, weights, once))
    assert cache.rows[[0, 2]].isnan().all()


@pytest.mark.parametrize(("rule", "kind", "num_rows"), every_case(1, 16, 21, 35))
def test_a_copy_within_a_step_is_the_state_there(rule: str, kind: str, num_rows: int) -> None:
    case = case_of(rule, kind)
    rows, weights = rows_of(case.heads, LENGTH), weights_of(case.heads)
    cache, other = cache_of(case, 3), cache_of(case, 2, ring=4)
    step(case, rows[:5], 0, weights, cache)
    step(case, rows[5:40], 5, weights, cache, (StateSave(0, num_rows, 2),))
    position = 5 + num_rows
    assert other.write(1, position, read(cache, 2, position)) == read(cache, 2, position).numel()
    found = step(case, rows[position:], position, weights, other)
    assert found.equal(step(case, rows, 0, weights, cache_of(case, 2))[position:])


@pytest.mark.parametrize(("rule", "kind", "accepted"), every_case(0, 2, 5))
def test_a_step_goes_on_behind_accepted_drafts(rule: str, kind: str, accepted: int) -> None:
    case = case_of(rule, kind)
    recur, heads = case.rule, case.heads
    rows, weights = rows_of(heads, LENGTH), weights_of(heads)
    cache, drafts = cache_of(case, 3), rows_of(heads, 5 - accepted)
    step(case, rows[:20], 0, weights, cache)
    # One settled row, then five drafts.
    states = StateSlots((1,), (0, 6), (20,), (20,), (21,))
    drafted = torch.cat([rows[20 : 21 + accepted], drafts])
    recur(columns(drafted, heads), weights, heads, cache, states)
    start = 21 + accepted
    states = StateSlots((1,), (0, LENGTH - start), (start,), (21,), (LENGTH,))
    found = recur(columns(rows[start:], heads), weights, heads, cache, states)
    assert found.equal(step(case, rows, 0, weights, cache_of(case, 2))[start:])


HEADS = [
    DELTA,
    Heads(1, 2, 7, 5, is_delta=True),
    Heads(2, 4, 64, 128, is_delta=True),
    Heads(1, 3, 128, 64, is_delta=True),
    MAMBA,
    Heads(1, 2, 7, 5, is_delta=False),
    Heads(1, 6, 64, 16, is_delta=False),
    Heads(2, 2, 128, 64, is_delta=False),
]


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("rule", ["torch", "C"])
def test_it_gives_what_torch_gives(rule: str, heads: Heads, taps: int) -> None:
    check_against_torch(rule_of(rule), heads, taps)


@needs_interpreter
@pytest.mark.parametrize(
    ("heads", "taps"),
    [
        (HEADS[1], 4),
        (HEADS[5], 2),
        *(
            pytest.param(heads, taps, marks=pytest.mark.slow)
            for heads, taps in [(HEADS[1], 2), (HEADS[5], 4), (HEADS[-1], 2), (HEADS[-1], 4)]
        ),
    ],
)
def test_so_does_the_kernel(heads: Heads, taps: int) -> None:
    check_against_torch(recurrence, heads, taps)


def check_against_torch(rule: Rule, heads: Heads, taps: int) -> None:
    weights = weights_of(heads, taps)
    case = Case(rule, heads)
    caches = [cache_of(case, 5, ring=taps + 4, taps=taps) for _ in range(2)]
    starts, stands = [0, 0], [0, 0]
    # Of each request: its rows, how many of them are drafts, and how many of these are accepted.
    for sizes, drafts, accepted in (
        ([20, 1], [0, 0], [0, 0]),
        ([1, 5], [0, 4], [0, 3]),
        ([4, 18], [3, 2], [0, 0]),
        ([3, 1], [0, 0], [0, 0]),
    ):
        rows = columns(rows_of(heads, sum(sizes) + 1), heads)
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        settled = [end - count for end, count in zip(ends, drafts, strict=True)]
        saves = (StateSave(0, 1, 3), StateSave(1, sizes[1] - drafts[1], 4))
        states = StateSlots(
            (2, 0), (0, sizes[0], sum(sizes)), tuple(starts), tuple(stands), tuple(settled), saves
        )
        found, expected = (
            each(rows, weights, heads, cache, states)
            for each, cache in zip((rule, recurrence_reference), caches, strict=True)
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert not found[-1].any()  # a padding row
        stands = settled
        starts = [each + count for each, count in zip(settled, accepted, strict=True)]
        for slot, position in ((2, settled[0]), (0, settled[1]), (4, settled[1])):
            held = [read(cache, slot, position).view(torch.float32) for cache in caches]
            torch.testing.assert_close(*held, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("rule", ["torch", "C", pytest.param("triton", marks=needs_interpreter)])
def test_a_matrix_in_half_precision_is_rounded_as_torch_rounds_it(rule: str, kind: str) -> None:
    case = case_of(rule, kind)
    rows, weights = rows_of(case.heads, LENGTH), weights_of(case.heads)
    half = case._replace(dtype=torch.float16)
    caches = [cache_of(half, 2) for _ in range(2)]
    found = step(half, rows, 0, weights, caches[0])
    expected = step(half._replace(rule=recurrence_reference), rows, 0, weights, caches[1])
    # Sums in another order may round to the neighbour, here and there: 2^-11 of values below 8.
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-3)
    matrices = [cache.matrix[1].float() for cache in caches if cache.matrix is not None]
    torch.testing.assert_close(*matrices, atol=8e-3, rtol=2e-3)
    # Without rounding at every token, what is found is further away than that almost everywhere.
    plain = step(case._replace(dtype=torch.float32), rows, 0, weights, cache_of(Case(*case[:2]), 2))
    assert not plain.equal(found)


@needs_interpreter
@pytest.mark.parametrize("num_rows", [1, 4, 20])
def test_rings_keep_the_newest_inputs(num_rows: int) -> None:
    rows, width, ring, start = torch.randn(num_rows, 12), 10, 7, 5
    first = torch.randn(3, ring, 12)
    found, expected = (StateCache(first.clone(), 3) for _ in range(2))
    save = StateSave(0, 1, 2)
    states = StateSlots((1,), (0, num_rows), (start,), (start,), (start + num_rows,), (save,))
    keep_inputs(rows[:, :width], rows[:, width:], width, found, states.on(torch.device("cpu")))
    held = torch.cat([first[1, expected.places(start)], rows])
    expected.keep(2, held[:4], start + 1)
    expected.keep(1, rows, start + num_rows)
    assert found.rows[1].equal(expected.rows[1])
    # Of a copy, what the next token needs.
    assert read(found, 2, start + 1).equal(read(expected, 2, start + 1))
