"""The suffix index against a search through the whole text."""

import time
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.engine.suffix_index import END_OF_TEXT, NO_MATCH, Match, SuffixIndex

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
def test_the_match_of_a_text_is_its_longest_and_last(
    text: list[int], limits: tuple[int, int]
) -> None:
    index = SuffixIndex(*limits)
    for i, token in enumerate(text):
        index.extend([token])
        assert index.match == search(text[:i], text[: i + 1], *limits)
        index.extend([])
        assert index.match == search(text[:i], text[: i + 1], *limits)
    whole = SuffixIndex(*limits)
    whole.extend(text)
    assert whole.match == index.match
    assert whole.num_entries == index.num_entries


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
        assert each.match == whole.match
        assert each.find(text) == whole.find(text)
        assert each.num_entries == whole.num_entries
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


def test_text_that_does_not_repeat_takes_an_entry_a_token() -> None:
    index = SuffixIndex(2, 8)
    index.extend(range(10_000))
    assert index.num_entries == 9_999
    index.extend(range(10_000))
    assert index.num_entries < 8 * 10_000


def test_a_look_up_does_not_depend_on_the_length() -> None:
    def seconds(length: int) -> float:
        index = SuffixIndex(2, 8)
        text = [(i * i) % 977 % 50 for i in range(length)]
        index.extend(text)
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            for token in text[:200]:
                index.extend([token])
                index.repetition(8)
            best = min(best, (time.perf_counter() - started) / 200)
        return best

    # Four hundred times the text; a search through it would take four hundred times as long.
    assert seconds(400_000) < 10 * seconds(1_000)
