"""Stop strings are found across pieces and never shown in part."""

from hypothesis import given
from hypothesis import strategies as st

from localllm.text.stop_strings import StopMatcher


def feed(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.has_stopped:
            return shown, True
    return shown + matcher.flush(), False


def test_what_may_begin_a_stop_string_waits() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == "the "
    assert matcher.push("N") == ""
    assert matcher.push("d") == "ENd"
    assert matcher.push("…EN") == "…"
    assert matcher.push("D and more") == ""
    assert matcher.has_stopped


def test_the_first_of_several_stops_wins() -> None:
    assert feed(["b", "ab"], ["xxab"]) == ("xx", True)
    matcher = StopMatcher(["b", "ab"])
    matcher.push("xxab")
    assert matcher.stopped_by == "ab"


def test_without_stops_everything_passes_at_once() -> None:
    assert StopMatcher([]).push("abc") == "abc"


@given(
    st.text("ab\n", max_size=40),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_any_split_shows_the_text_before_the_first_stop(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, stopped = feed(stops, pieces)
    if stopped:
        assert any(text[len(shown) :].startswith(stop) for stop in stops)
        assert not any(stop in shown for stop in stops)
    else:
        assert shown == text
        assert not any(stop in text for stop in stops)
