"""The way to a form's end, and what looking for it may cost."""

from typing import Any, cast

import pytest
from engines import EOS_TOKEN_ID, byte_state
from llguidance import LLMatcher

from localllm.schedule.form_ends import MAX_GUESSES, FormEnds
from localllm.text.grammar import Grammar


class CountedState:
    """A grammar's state that counts the masks it is asked for."""

    def __init__(self, expression: str) -> None:
        self.state = byte_state(Grammar("regex", expression))
        self.num_masks = 0

    def compute_bitmask(self) -> bytes:
        self.num_masks += 1
        return self.state.compute_bitmask()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.state, name)


def way_of(state: CountedState, most: int = 512) -> str | None:
    ends = FormEnds(lambda char: 3 + ord(char), [EOS_TOKEN_ID])
    way = ends.way(cast(LLMatcher, state), most)
    return None if way is None else bytes(each - 3 for each in ends.without_end(way)).decode()


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (r'\{"a": \["[a-z]*"(, "[a-z]*")*\]\}', '{"a": [""]}'),
        ("(x|y)z{3}", "xzzz"),
        ("a*", ""),
        (r'\{"a":\n {0,32}\[\]\}', '{"a":\n[]}'),
    ],
)
def test_a_form_closes_as_soon_as_it_may(expression: str, text: str) -> None:
    assert way_of(CountedState(expression)) == text


def test_a_way_that_is_longer_than_it_may_be_is_none_however_much_of_it_is_forced() -> None:
    state = CountedState("x{20}(y|z)")
    assert way_of(state, 22) == "x" * 20 + "y"  # and the end
    assert way_of(state, 12) is None
    assert way_of(CountedState("x{20}"), 12) is None
    assert way_of(state, 22) is not None  # the state is as it was


def test_where_only_a_word_ends_a_pattern_few_masks_are_asked_for() -> None:
    state = CountedState("(ab|cd)*e")
    assert way_of(state) is None
    assert state.num_masks == MAX_GUESSES
