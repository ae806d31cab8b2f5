"""The suffix index against a search through the whole text."""

import time
from collections.abc import Sequence
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.drafting.suffix_index import END_OF_TEXT, MOST_TRIED, NO_MATCH, Match, SuffixIndex

# Few different tokens, so that everything has stood before somewhere.
texts = st.lists(st.integers(0, 3), max_size=60)
bounds = st.integers(1, 4).flatmap(lambda low: st.tuples(st.just(low), st.integers(low, low + 5)))


def search(text: Sequence[int], newest: Sequence[int], low: int, high: int) -> Match:
    """The last place in `text` of the longest end of `newest`, which is not its own end."""
    for length in range(min(high, len(newest)), low - 1, -1):
        tail = list(newest[-length:])
        if END_OF_TEXT in tail:
            continue
        for end in range(len(text), length - 1, -1):
            if text[end - length : end] == tail:
                return Match(length, end)
    return NO_MATCH


@settings(max_examples=400, deadline=None, derandomize=True)
@given(texts, bounds)
def test_the_match_of_a_text_is_its_longest_that_goes_on_or_is_the_last(
    text: list[int], limits: tuple[int, int]
) -> None:
    index, goes_on = SuffixIndex(*limits), NO_MATCH
    for i, token in enumerate(text):
        index.extend([token])
        found = search(text[:i], text[: i + 1], *limits)
        if goes_on.length and text[goes_on.end] == token:
            goes_on = Match(min(limits[1], goes_on.length + 1), goes_on.end + 1)
            found = goes_on if goes_on.length == found.length else found
        assert index.match == found
        index.extend([])
        assert index.match == found
        goes_on = found
    whole = SuffixIndex(*limits)
    whole.extend(text)
    assert whole.match == search(text[:-1], text, *limits)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(texts, texts, texts, bounds)
def test_copies_go_on_by_themselves(
    text: list[int], one: list[int], other: list[int], limits: tuple[int, int]
) -> None:
    index = SuffixIndex(*limits)
    index.extend(text)
    copy = index.copy()
    for each, more in ((index, one), (copy, other)):
        each.extend(more)
        whole = SuffixIndex(*limits)
        whole.extend(text + more)
        assert each.match.length == whole.match.length
        assert each.find(text) == whole.find(text)
        assert each.begins([*text, *more, 1])
        assert not each.begins([*text, *more][:-1]) or not text + more


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(texts, max_size=4), texts, bounds)
def test_another_text_is_found_in_several(
    said: list[list[int]], newest: list[int], limits: tuple[int, int]
) -> None:
    index, joined = SuffixIndex(*limits), list[int]()
    for text in said:
        joined += [*text, END_OF_TEXT]
        index.extend([*text, END_OF_TEXT])
    found = index.find(newest)
    assert found == search(joined, newest, *limits)
    after = joined[found.end :]
    after = after[: after.index(END_OF_TEXT)] if END_OF_TEXT in after else after
    assert index.continuation(found.end, 5) == after[:5]


def test_a_repetition_goes_around_and_around() -> None:
    index = SuffixIndex(2, 8)
    index.extend([9, 8, 1, 2, 3, 1, 2])
    assert index.match == Match(2, 4)
    assert index.repetition(7) == [3, 1, 2, 3, 1, 2, 3]
    index.extend([5])
    assert index.repetition(7) == []


def test_a_copy_goes_on_where_it_was_though_the_same_stands_at_a_later_place_too() -> None:
    shared = [50, 51, 52, 53]
    first, last = [1, 2, *shared, 60, 61], [3, 4, *shared, 70, 71]
    index = SuffixIndex(2, 3)
    index.extend([*first, *last])
    for token in (1, 2, *shared):
        index.extend([token])
        assert index.match.end <= len(first)
    assert index.repetition(2) == [60, 61]
    index.extend([70])  # as behind the later one, of which the longest match is now
    assert index.repetition(1) == [71]


def test_text_that_repeats_takes_no_more_memory_than_other_text() -> None:
    def num_bytes(text: Sequence[int]) -> int:
        index = SuffixIndex(2, 8)
        index.extend(text)
        return index.num_bytes()

    assert num_bytes([*range(10_000)] * 2) < num_bytes(range(20_000)) < 150 * 20_000


def test_the_last_places_are_tried_where_there_are_many() -> None:
    index = SuffixIndex(2, 8)
    index.extend([9, 8, 7, 1, 2, *([1, 2] * MOST_TRIED), 5, 7, 1, 2])
    assert index.match == Match(2, 5 + 2 * MOST_TRIED)


def test_no_match_goes_on_into_another_text() -> None:
    index = SuffixIndex(2, 8)
    index.extend([1, 2, 3, END_OF_TEXT, 1, 2, 3])
    assert index.match == Match(3, 3)
    assert index.repetition(2) == []  # the text ends there
    index.extend([END_OF_TEXT])
    assert index.match == NO_MATCH
    index.extend([1, 2])
    assert index.match == Match(2, 6)


def test_a_look_up_does_not_depend_on_the_length() -> None:
    def seconds(length: int) -> float:
        index, random = SuffixIndex(2, 8), Random(length)
        index.extend([random.randrange(20) for _ in range(length)])
        best = float("inf")
        for _ in range(5):
            new = [random.randrange(20) for _ in range(200)]
            started = time.perf_counter()
            for token in new:
                index.extend([token])
                index.repetition(8)
            best = min(best, (time.perf_counter() - started) / 200)
        return best

    # A hundred times the text, in which each pair of tokens stands a thousand times instead of ten.
    assert seconds(400_000) < 20 * seconds(4_000)
