"""What a conversation keeps, changes and makes room for, on a terminal."""

import re
import time
from pathlib import Path

import pytest
from window import Open, Window

from localllm.chat.store import SavedSession, SessionStore
from localllm.chat.transcript import SUMMARY_REQUEST, Transcript, Turn

# What a machine with two cores and other tests beside takes for anything.
BUSY_S = 0.6


def saved(tmp_path: Path) -> SavedSession:
    """The latest saved conversation."""
    store = SessionStore(tmp_path / "data" / "localllm" / "sessions.db")
    latest = store.latest()
    assert latest is not None
    store.close()
    return latest


def ask(window: Window, text: str, answer: str) -> None:
    window.say(text)
    window.wait_for(answer)
    window.settle()


def test_a_conversation_is_saved_by_itself_and_taken_up_again(
    open_window: Open, tmp_path: Path
) -> None:
    first = open_window("It is blue.", rows=30, tells_cursor=True)
    ask(first, "What colour is the sky?", r"It is blue\.")
    first.say("/save colours")
    first.wait_for("this conversation is named 'colours'; localllm chat --session colours")
    # The line below the prompt.
    first.wait_for(r"\nscripted · session colours · context \d+/32,768 \(0%\)")
    first.send("\x04")
    assert first.exit_code() == 0
    turns = saved(tmp_path).transcript.turns
    assert [(turn.question, turn.answer) for turn in turns] == [
        ("What colour is the sky?", "It is blue.")
    ]
    second = open_window("Because of the air.", rows=30)
    second.say("/sessions")
    second.wait_for(r"colours +1 turn +just now +What colour is the sky\?")
    second.say("/load colours")
    second.wait_for(r"> What colour is the sky\?\n +It is blue\.")
    ask(second, "Why?", r"Because of the air\.")
    assert len(saved(tmp_path).transcript.turns) == 2
    second.say("/load nothing")
    second.wait_for("there is no session 'nothing'")


def test_after_a_kill_the_partial_answer_is_there(open_window: Open, tmp_path: Path) -> None:
    words = " ".join(f"word{i}" for i in range(2000))
    window = open_window(words, step_ms=5, rows=30)
    window.say("Talk.")
    window.wait_for(r"word100\b")
    window.close()
    (turn,) = saved(tmp_path).transcript.turns
    assert turn.question == "Talk."
    assert turn.finish_reason is None
    assert re.fullmatch(r"(word\d+ )+w?(word|wor|wo)?\d*", turn.answer)
    assert "word30 " in turn.answer
    again = open_window(words, step_ms=1, rows=30)
    again.say("/load 1")
    again.wait_for("the answer was interrupted here; /continue resumes it")


@pytest.mark.parametrize("after_s", [0.05, 0.3, 0.7, 1.1])
def test_ctrl_c_at_any_moment_keeps_what_was_said(
    open_window: Open, tmp_path: Path, after_s: float
) -> None:
    words = " ".join(f"word{i}" for i in range(2000))
    window = open_window(words, step_ms=5, rows=40, prefill_steps=20)
    window.say("Talk.")
    window.wait_for("> Talk")
    time.sleep(after_s)
    began = time.monotonic()
    window.send("\x03")
    window.wait_for("interrupted", seconds=5)
    # The prompt is back within 150 ms; a machine that runs other tests beside may take longer.
    assert time.monotonic() - began < 0.15 + BUSY_S
    window.settle()
    window.close()
    store = SessionStore(tmp_path / "data" / "localllm" / "sessions.db")
    turns = [turn for row in store.rows() for turn in store.load(row.id).transcript.turns]
    if turns:  # else it was stopped before the first word, and nothing was asked
        assert words.startswith(turns[0].answer)
        # The last word on the screen may be half of one.
        shown = re.findall(r"word\d+", window.text)[:-1]
        assert all(word in turns[0].answer for word in shown)
    else:
        assert "word0" not in window.text


def test_undo_clear_and_regen_are_saved_too(open_window: Open, tmp_path: Path) -> None:
    window = open_window("One.", "Two.", "Three.", "Four.", rows=50)
    ask(window, "first", r"One\.")
    ask(window, "second", r"Two\.")
    ask(window, "/regen", r"Three\.")
    assert [turn.answer for turn in saved(tmp_path).transcript.turns] == ["One.", "Three."]
    window.say("/undo")
    window.wait_for("removed: second")
    window.settle()
    assert [turn.answer for turn in saved(tmp_path).transcript.turns] == ["One."]
    window.say("/clear")
    window.wait_for("a new conversation; the old one is in /sessions")
    ask(window, "third", r"Four\.")
    assert saved(tmp_path).id == 2
    assert [turn.answer for turn in saved(tmp_path).transcript.turns] == ["Four."]


def test_a_question_is_edited_in_its_place(open_window: Open, tmp_path: Path) -> None:
    window = open_window("One.", "Two.", rows=40)
    ask(window, "What is a cat", r"One\.")
    window.say("/edit")
    window.wait_for(r"> What is a cat")
    window.send("\x7f\x7f\x7fdog?\r")
    window.wait_for(r"Two\.")
    window.settle()
    turns = saved(tmp_path).transcript.turns
    assert [(turn.question, turn.answer) for turn in turns] == [("What is a dog?", "Two.")]


def test_what_was_not_answered_is_asked_again(open_window: Open, tmp_path: Path) -> None:
    window = open_window("First.", "Second.", step_ms=20, prefill_steps=60, rows=40)
    window.say("Are you there?")
    time.sleep(0.3)
    window.send("\x03")
    window.wait_for("interrupted")
    window.say("/retry")
    window.wait_for(r"Second\.")
    window.settle()
    assert [turn.question for turn in saved(tmp_path).transcript.turns] == ["Are you there?"]


def test_the_context_fills_up_is_said_and_compacted(open_window: Open, tmp_path: Path) -> None:
    long, summary = "Many words. " * 40, "We spoke of words."
    window = open_window(long, long, summary, "Yes.", rows=60, flags=("--ctx", "1200"))
    ask(window, "Talk.", r"context \d+/1,200")
    assert "full" not in window.text
    ask(window, "More.", r"the context is \d\d% full; /compact")
    window.say("/compact")
    window.wait_for(r"We spoke of words\.")
    window.wait_for("this summary\\?")
    window.send("\r")
    window.wait_for(r"went from [\d,]+ to [\d,]+ tokens")
    window.settle()
    turns = saved(tmp_path).transcript.turns
    assert [turn.answer for turn in turns] == [summary, long]
    assert saved(tmp_path).id == 2  # the whole is kept as session 1
    ask(window, "Short?", r"Yes\.")


def test_a_full_context_is_made_room_in_as_its_message_says(
    open_window: Open, tmp_path: Path
) -> None:
    long, summary = "Many words. " * 30, "We spoke of words."
    flags = ("--ctx", "1200")
    window = open_window(long, long, 2 * long, summary, "Yes.", rows=60, flags=flags)
    ask(window, "Talk.", r"context \d+/1,200")
    ask(window, "More.", r"\d\d%|context \d+/1,200")
    ask(window, "Still more.", "cut: the context is full; /compact makes room")
    window.say("/compact")
    window.wait_for("this summary\\?")
    window.send("\r")
    window.wait_for(r"went from [\d,]+ to [\d,]+ tokens")
    window.settle()
    turns = saved(tmp_path).transcript.turns
    # As many of the oldest turns as leave room for the summary; the others stay as they are.
    assert turns[0].answer == summary
    assert turns[-1].question == "Still more."
    assert 2 <= len(turns) <= 3
    ask(window, "Short?", r"Yes\.")


def test_a_summary_that_does_not_end_is_told_as_such(open_window: Open) -> None:
    long = "Many words. " * 40
    window = open_window(long, long, long * 3, rows=60, flags=("--ctx", "1200"))
    ask(window, "Talk.", r"context \d+/1,200")
    ask(window, "More.", r"\d\d% full")
    window.say("/compact")
    window.wait_for(r"nothing was changed; it filled\s+the context")
    window.say("/set max-tokens 20")
    window.wait_for("max-tokens")


def test_a_prompt_that_is_too_long_is_an_error_with_a_way_out(open_window: Open) -> None:
    window = open_window("Many words. " * 20, "x", rows=60, flags=("--ctx", "300"))
    ask(window, "Talk.", r"context\s+\d+/300")
    window.say("word " * 30)
    text = window.wait_for("try: /compact, another model, or start with --overflow drop-oldest")
    assert "error: the prompt has" in text
    # Alone it would not fit either.
    window.say("word " * 150)
    window.settle()
    assert window.text.count("drop-oldest") == 1


def test_why_tells_where_the_prompt_leaves_the_cache(open_window: Open) -> None:
    window = open_window("One.", "Two.", "Three.", rows=60)
    window.say("/why")
    window.wait_for("nothing has been asked yet")
    ask(window, "first", r"One\.")
    ask(window, "second", r"Two\.")
    window.say("/why")
    window.wait_for("it continues all")
    window.say("/system Be brief.")
    ask(window, "third", r"Three\.")
    window.say("/why")
    window.wait_for(
        r"first difference from the previous request: token \d+, in message 1 \(system\)"
    )


@pytest.mark.alone
def test_a_long_prompt_shows_within_200_ms_how_far_it_is_read(open_window: Open) -> None:
    window = open_window("Read.", rows=30, step_ms=30, prefill_steps=100)
    window.say("word " * 60)
    window.wait_for("word word")
    began = time.monotonic()
    window.wait_for(r"reading [\d,]+ of [\d,]+ tokens \(\d+%\)", seconds=5)
    assert time.monotonic() - began < 1.0  # 0.15 s, and what a busy machine adds
    window.wait_for("s left")
    text = window.wait_for(r"Read\.")
    assert "reading" not in text


def test_folded_thoughts_leave_one_line(open_window: Open) -> None:
    thoughts = "\n".join(f"thought number {i}" for i in range(24))
    answer = f"<think>\n{thoughts}\n</think>\n\nThe answer."
    window = open_window(answer, rows=20, step_ms=4, flags=("--thoughts", "fold"))
    window.say("hi")
    text = window.wait_for(r"thought number 1\d")
    assert text.count("thought number") <= 5
    text = window.wait_for(r"The answer\.")
    assert "thought number" not in text
    assert re.search(r"> hi\n+thought for \d+\.\d s, \d+ tokens; Ctrl-O shows it\n\nThe", text)


def test_ctrl_c_right_behind_enter_stops_the_answer(open_window: Open, tmp_path: Path) -> None:
    """While Enter is handled the terminal makes no signal of Ctrl-C, but a character."""
    words = " ".join(f"word{i}" for i in range(500))
    window = open_window(words, "Here.", rows=30, step_ms=5)
    window.send("Talk.\r\x03typed ahead")
    window.wait_for("interrupted")
    window.wait_for("> typed ahead")
    assert "word400" not in window.text
    window.send("\r")
    window.wait_for(r"Here\.")


def test_a_full_context_is_told_as_such_and_continue_names_the_way_out(open_window: Open) -> None:
    long = "Many words. " * 60
    window = open_window(long, long, rows=60, flags=("--ctx", "600"))
    window.say("Talk.")
    window.wait_for("cut: the context is full; /clear begins a new conversation")
    window.settle()
    window.say("/continue")
    window.wait_for("error: the context is full, so the answer cannot continue")
    assert "/compact" not in window.text


def test_the_same_answer_again_is_told(open_window: Open) -> None:
    window = open_window("Blue.", "Blue.", "Red.", rows=40)
    ask(window, "What colour?", r"Blue\.")
    ask(window, "/regen", "the same answer again")
    ask(window, "/regen", r"Red\.")
    assert window.text.count("the same answer again") == 1


def test_a_summary_names_no_conversation(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "sessions.db")
    turns = (Turn(SUMMARY_REQUEST, answer="We spoke."), Turn("What now?", answer="This."))
    store.create(Transcript("pocket", None, turns))
    assert [row.title for row in store.rows()] == ["What now?"]
