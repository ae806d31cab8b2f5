"""A conversation grows, is taken back, and goes on where it stopped."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import scripted_model

from localllm import LLM, SamplingParams
from localllm.answer.opening import open_model
from localllm.chat.conversation import ChatSession
from localllm.chat.transcript import Transcript, Turn
from localllm.cli.draw.render import Shown
from localllm.cli.repl.repl import Repl
from localllm.cli.repl.slash_turns import edit
from localllm.engine.config import EngineConfig
from localllm.engine.loading import load_engine
from localllm.errors import ContextLengthError, GpuMemoryError, RequestError
from localllm.schedule.request import FinishReason
from localllm.text.prompt import Text

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def say(session: ChatSession, text: str, params: SamplingParams = GREEDY) -> str:
    completion, events = session.reply(text, params)
    list(events)
    return completion.text


@pytest.fixture
def session(make_checkpoint: Callable[..., Path]) -> ChatSession:
    return ChatSession(LLM(str(make_checkpoint()), max_num_seqs=1).model, system="Be brief.")


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3, max_tokens=24, ignore_eos=True)])
@pytest.mark.parametrize("num_read", [1, 5, 17])
def test_an_interrupted_answer_goes_on_as_if_it_had_not_been(
    session: ChatSession, params: SamplingParams, num_read: int
) -> None:
    whole = say(session, "Hello?", params)
    session.clear()
    _, events = session.reply("Hello?", params)
    for _ in range(num_read):
        next(events)
    events.close()
    rest, events = session.resume(params)
    list(events)
    assert session.messages[-1]["content"][: len(whole)] == whole
    assert session.num_turns == 1
    assert rest.num_cached_tokens > 0 or rest.num_prompt_tokens < 32


def test_a_character_cut_in_half_by_an_interruption_is_made_whole(
    make_checkpoint: Callable[..., Path],
) -> None:
    session = ChatSession(scripted_model(make_checkpoint(), ["Zwölf €"]))
    completion, events = session.reply("?", SamplingParams())
    for _ in range(4):  # Z w and half of ö
        next(events)
        if completion.num_generated_tokens == 3:
            break
    events.close()
    assert session.messages[-1]["content"].startswith("Zw")
    _, events = session.resume(SamplingParams())
    list(events)
    assert session.messages[-1]["content"] == "Zwölf €"


def test_a_complete_answer_does_not_go_on(make_checkpoint: Callable[..., Path]) -> None:
    session = ChatSession(scripted_model(make_checkpoint(), ["Done."]))
    with pytest.raises(RequestError, match="no answer"):
        session.resume(GREEDY)
    say(session, "?", SamplingParams())
    with pytest.raises(RequestError, match="complete"):
        session.resume(GREEDY)


def test_an_answer_is_made_anew_in_the_place_of_the_old(session: ChatSession) -> None:
    first = say(session, "One")
    second = say(session, "Two")
    completion, events = session.regenerate(SamplingParams(seed=5, max_tokens=9, ignore_eos=True))
    next(events)
    # Whoever is killed here has the old answer still.
    assert [turn.answer for turn in session.transcript().turns] == [first, second]
    list(events)
    assert [m["content"] for m in session.messages] == ["One", first, "Two", completion.text]


def test_an_interruption_before_the_first_token_changes_nothing(session: ChatSession) -> None:
    say(session, "One")
    before = list(session.messages)
    for start in (session.regenerate, lambda params: session.reply("Two", params)):
        _, events = start(GREEDY)
        events.close()
        assert session.messages == before


def test_a_stop_string_set_later_does_not_end_what_was_said_before(
    make_checkpoint: Callable[..., Path],
) -> None:
    session = ChatSession(scripted_model(make_checkpoint(), ["Once upon a time."]))
    completion, events = session.reply("?", SamplingParams())
    while "upon" not in completion.text:
        next(events)
    events.close()
    _, events = session.resume(SamplingParams(stop=("upon",)))
    list(events)
    assert session.messages[-1]["content"] == "Once upon a time."


def test_a_turn_is_taken_back_with_its_question(session: ChatSession) -> None:
    first = say(session, "One")
    say(session, "Two")
    undone = session.undo()
    assert undone is not None
    assert undone.question == "Two"
    assert [m["content"] for m in session.messages] == ["One", first]
    assert say(session, "Two") == session.messages[-1]["content"]
    session.clear()
    assert session.undo() is None
    assert session.system == "Be brief."


def test_a_question_that_is_refused_leaves_the_conversation_as_it_was(
    session: ChatSession,
) -> None:
    say(session, "One")
    before = list(session.messages)
    with pytest.raises(RequestError):
        session.reply("x" * 5000, GREEDY)
    assert session.messages == before
    assert say(session, "Two")


def test_text_that_goes_on_from_a_raw_prompt_keeps_its_leading_space(
    make_checkpoint: Callable[..., Path],
) -> None:
    from text.test_special_text import metaspace_tokenizer

    folder = make_checkpoint()
    metaspace_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    model = scripted_model(folder, ["hello"])
    raw, events = model.ask(Text("hello world"), SamplingParams())
    list(events)
    assert raw.text == " hello"
    chat, events = model.ask(Text([5]), SamplingParams())
    list(events)
    assert chat.text == " hello"


def test_what_no_longer_fits_names_the_ways_out(session: ChatSession) -> None:
    say(session, "y" * 150)
    with pytest.raises(ContextLengthError) as caught:
        session.reply("x" * 300, GREEDY)
    assert "drop-oldest" in caught.value.hint
    assert "512" in caught.value.message
    # What would not fit alone either is helped by none of that: as tokens, and before it is any.
    for text in ("x" * 3000, "x" * 500_000):
        with pytest.raises(ContextLengthError) as caught:
            session.reply(text, GREEDY)
        assert "drop-oldest" not in caught.value.hint
        assert "more than 512 tokens" in caught.value.hint


def test_a_question_without_an_answer_is_kept_and_can_be_taken_back(session: ChatSession) -> None:
    say(session, "One")
    with pytest.raises(ContextLengthError):
        session.reply("x" * 3000, GREEDY)
    kept = session.transcript()
    assert [turn.question[:3] for turn in kept.turns] == ["One", "xxx"]
    assert [message["role"] for message in kept.messages][-2:] == ["assistant", "user"]
    again = Transcript.from_json(kept.to_json())
    assert [turn.question for turn in again.turns] == [turn.question for turn in kept.turns]
    assert [turn.answer for turn in again.turns] == [turn.answer for turn in kept.turns]
    assert again.system == "Be brief."
    session.restore(again.turns)
    assert session.unanswered == "x" * 3000
    taken = session.undo()
    assert taken is not None
    assert taken.question == "x" * 3000
    assert session.num_turns == 1
    # A new answer that fails leaves the old one, and no second question.
    with pytest.raises(RequestError):
        session.regenerate(SamplingParams(stop_token_ids=(10_000,)))
    assert [turn.question for turn in session.transcript().turns] == ["One"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "assistant", "content": "Yes."}]}',
        '{"messages": [{"role": "tool", "content": "Yes."}]}',
    ],
)
def test_what_is_no_exported_conversation_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Transcript.from_json(text)


def test_oldest_turns_are_dropped_and_counted(session: ChatSession) -> None:
    session.overflow = "drop-oldest"
    whole = []
    for i in range(8):
        completion, events = session.reply(f"Question {i}: " + "tell me more " * 8, GREEDY)
        list(events)
        whole.append(completion)
    cut = [completion.truncation for completion in whole]
    assert cut[0] is None
    assert cut[-1] is not None
    assert cut[-1].num_turns >= 1
    assert cut[-1].num_tokens > 0
    assert all(c.num_prompt_tokens + GREEDY.max_tokens <= 512 for c in whole)  # type: ignore[operator]
    assert session.num_turns == 8  # the conversation itself is whole
    # Once turns are dropped the next prompt begins where this one did, as long as it fits.
    dropped = [c.num_turns for c in cut if c is not None]
    assert dropped == sorted(dropped)


def test_a_model_is_let_go_before_the_next_one_is_loaded(
    make_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a GPU's memory the first one's cache takes nearly all."""
    first, second = (str(make_checkpoint()) for _ in range(2))
    repl = Repl(
        ChatSession(open_model(first)), EngineConfig(), {"max_tokens": 4}, Shown("plain", "fold")
    )
    repl.ask("Hello?")
    old = weakref.ref(repl.session.model.text_engine.engine)
    alive = []

    def load(*arguments: Any) -> Any:
        alive.append(old() is not None)
        return load_engine(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localllm.answer.opening.load_engine", load)
        repl.load_model(second)
    assert alive == [False]
    assert repl.session.model.name == second
    repl.ask("And now?")
    assert repl.session.num_turns == 2
    assert capsys.readouterr().out


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_model_that_cannot_be_loaded_brings_the_one_before_back(
    make_checkpoint: Callable[..., Path], comes_back: bool
) -> None:
    first, second = make_checkpoint(), make_checkpoint(num_hidden_layers=3)
    config = EngineConfig()
    repl = Repl(
        ChatSession(open_model(str(first))), config, {"max_tokens": 4}, Shown("plain", "fold")
    )
    repl.ask("Hello?")

    def load(folder: Path, *arguments: Any) -> Any:
        if folder == second or not comes_back:
            raise GpuMemoryError("it does not fit")
        return load_engine(folder, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localllm.answer.opening.load_engine", load)
        with pytest.raises(GpuMemoryError):
            repl.load_model(str(second))
    assert repl.is_over == (not comes_back)
    assert repl.session.num_turns == 1
    if comes_back:
        assert repl.session.model.name == str(first)
        repl.ask("Are you there?")
        assert repl.session.num_turns == 2
    repl.session.close()


def test_another_answer_leaves_a_later_question_that_got_none(session: ChatSession) -> None:
    say(session, "One")
    with pytest.raises(ContextLengthError):
        session.reply("x" * 3000, GREEDY)
    _, events = session.regenerate(GREEDY)
    assert [turn.question[:3] for turn in session.transcript().turns] == ["One", "xxx"]
    list(events)
    assert session.unanswered == "x" * 3000
    assert [turn.question[:3] for turn in session.transcript().turns] == ["One", "xxx"]


def test_a_refused_edit_leaves_the_turn_and_files_go_once(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    repl = Repl(
        ChatSession(open_model(str(make_checkpoint()))),
        EngineConfig(),
        {"max_tokens": 4},
        Shown("plain", "fold"),
    )
    repl.attach("notes.txt", "milk")
    repl.ask("What?")
    assert repl.attachments == []
    monkeypatch.setattr(repl.editor, "edit", lambda text: "x" * 3000)
    with pytest.raises(ContextLengthError):
        edit(repl, "")
    assert [turn.question for turn in repl.session.turns] == ["milk\n\nWhat?"]
    assert repl.session.unanswered is None
    with pytest.raises(RequestError, match="is too long"):
        repl.attach("book.txt", "x" * 5000)
    repl.session.close()


def test_a_question_that_was_saved_and_never_answered_is_kept_and_not_said_again(
    make_checkpoint: Callable[..., Path],
) -> None:
    model = scripted_model(make_checkpoint(), ["So."])
    session = ChatSession(model)
    session.restore([Turn("First?", "scripted", "One.", finish_reason=FinishReason.STOP)])
    session.restore([*session.turns, Turn("Lost?", "scripted")])
    session.pose("Other?")
    saved = [turn.question for turn in session.transcript().turns]
    assert saved == ["First?", "Lost?", "Other?"]
    assert say(session, "Other?") == "So."
    assert [turn.question for turn in session.turns] == saved
    assert session.num_turns == 2
    assert "Lost?" not in model.tokenizer.decode(model.text_engine.engine.prompts[-1])  # type: ignore[attr-defined]
    # What is written down is read again as it is.
    kept = session.transcript()
    assert [turn.question for turn in Transcript.from_json(kept.to_json()).turns] == saved
    # The same question takes its own place.
    session.restore([Turn("Lost?", "scripted")])
    say(session, "Lost?")
    assert [turn.question for turn in session.turns] == ["Lost?"]
    assert kept.asking("Other?", "m").turns[-2:] == (kept.turns[-1], Turn("Other?", "m"))
    lost = Transcript("m", None, (Turn("Lost?", "scripted"),))
    assert lost.asking("Lost?", "m").turns == (Turn("Lost?", "m"),)
