"""Text in, text out: the seam that the command line and Python share."""

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from localllm import LLM, SamplingParams
from localllm.answer.llm import DEFAULT_CHAT_TOKENS, DEFAULT_TEXT_TOKENS
from localllm.answer.opening import open_model
from localllm.chat.conversation import ChatSession
from localllm.errors import ContextLengthError, RequestError, StepMemoryError
from localllm.schedule.request import FinishReason, TokenEvent
from localllm.text.prompt import Text

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def llm(make_checkpoint: Callable[..., Path]) -> LLM:
    return LLM(str(make_checkpoint()), max_num_seqs=8)


def test_many_prompts_together_give_what_each_gives_alone(llm: LLM) -> None:
    prompts = ["one", "two words", "a third prompt"]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [c.text for c in together] == [c.text for c in alone]
    assert [c.num_generated_tokens for c in together] == [12, 12, 12]


def test_a_refused_prompt_has_an_error_and_the_others_go_on(llm: LLM) -> None:
    good, bad, empty = llm.generate(["fine", "x" * 600, ""], GREEDY)
    assert good.error is None
    assert good.num_generated_tokens == 12
    assert isinstance(bad.error, ContextLengthError)
    assert isinstance(empty.error, RequestError)
    assert bad.finish_reason is FinishReason.ERROR


def test_streamed_pieces_join_to_the_text(llm: LLM) -> None:
    assert "".join(llm.stream("some words", GREEDY)) == llm.generate("some words", GREEDY)[0].text


def test_closing_a_stream_frees_its_blocks(llm: LLM) -> None:
    pieces = llm.stream("some words", SamplingParams(temperature=0, ignore_eos=True))
    next(pieces)
    engine = llm.model.text_engine.engine
    assert engine.has_unfinished()
    pieces.close()  # type: ignore[attr-defined]
    assert not engine.has_unfinished()
    scheduler = engine.scheduler
    assert scheduler.num_free_blocks == scheduler.num_usable_blocks


def test_an_event_behind_the_end_of_a_sample_is_dropped(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llm.model
    _, stream = model.ask(Text("some words"), GREEDY)
    error = StepMemoryError("no memory")
    events = [
        TokenEvent(0, 0, 5, FinishReason.LENGTH),
        TokenEvent(0, 0, None, FinishReason.ERROR, error=error),
    ]
    monkeypatch.setattr(model.text_engine.engine, "step", lambda: events)
    assert [event.error for event in stream] == [None]


def test_closing_a_stream_that_was_never_read_frees_it_too(llm: LLM) -> None:
    _, events = llm.model.ask(Text("some words"), GREEDY)
    assert llm.model.text_engine.engine.has_unfinished()
    events.close()
    assert not llm.model.text_engine.engine.has_unfinished()


def test_a_long_prompt_can_be_stopped_between_its_chunks(
    make_checkpoint: Callable[..., Path],
) -> None:
    llm = LLM(str(make_checkpoint()), max_num_seqs=1, max_num_batched_tokens=16)
    completion, events = llm.model.ask(Text("x" * 200), GREEDY)
    asked = []
    events.should_stop = lambda: bool(asked.append(1)) or len(asked) == 3
    assert list(events) == []
    assert completion.finish_reason is None
    assert not llm.model.text_engine.engine.has_unfinished()


@pytest.mark.parametrize("prompt", ["bad \ud800 text", "y" * 40_000, [1.5], [[]]])
def test_a_prompt_that_cannot_be_encoded_is_refused_alone(llm: LLM, prompt: object) -> None:
    bad, good = llm.generate([prompt, "fine"], GREEDY)  # type: ignore[list-item]
    assert bad.error is not None
    assert good.num_generated_tokens == 12


def test_a_template_that_refuses_one_conversation_leaves_the_others(
    make_checkpoint: Callable[..., Path],
) -> None:
    folder = make_checkpoint()
    refuse = "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}hi"
    (folder / "chat_template.jinja").write_text(refuse)
    llm = LLM(str(folder), max_num_seqs=2)
    message = {"role": "user", "content": "x"}
    bad, good = llm.chat([[message, message], [message]], GREEDY)
    assert "one only" in str(bad.error)
    assert good.num_generated_tokens == 12


def test_samples_do_not_count_each_other_s_blocks_as_cached(llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=1, max_tokens=4, n=2, ignore_eos=True)
    [cold] = llm.generate("a prompt that nobody has asked so far, of some length", params)
    assert cold.num_cached_tokens == 0


def test_two_streams_read_in_turns_give_what_each_gives_alone(llm: LLM) -> None:
    first, second = llm.stream("first", GREEDY), llm.stream("second", GREEDY)
    texts = ["", ""]
    for one, other in zip_longest(first, second, fillvalue=""):
        texts[0] += one
        texts[1] += other
    assert texts == [llm.generate(prompt, GREEDY)[0].text for prompt in ("first", "second")]


def test_samples_come_with_a_text_each(llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=3, max_tokens=10, n=3, ignore_eos=True)
    [completion] = llm.generate("some words", params)
    assert len(completion.samples) == 3
    assert len({sample.text for sample in completion.samples}) == 3
    [again] = llm.generate("some words", params)
    assert [s.text for s in again.samples] == [s.text for s in completion.samples]


def test_a_stop_string_ends_one_sample_and_not_its_siblings(llm: LLM) -> None:
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 20, "n": 3, "ignore_eos": True}
    [whole] = llm.generate("some words", SamplingParams(**params))  # type: ignore[arg-type]
    first = whole.samples[0].text
    stop = first[5:9]
    [stopped] = llm.generate("some words", SamplingParams(**params, stop=(stop,)))  # type: ignore[arg-type]
    for before, after in zip(whole.samples, stopped.samples, strict=True):
        if stop in before.text:
            assert after.text == before.text[: before.text.index(stop)]
            assert after.finish_reason is FinishReason.STOP
        else:
            assert after.text == before.text
    assert not llm.model.text_engine.engine.has_unfinished()


def test_the_end_token_ends_an_answer_and_is_not_in_its_text(llm: LLM) -> None:
    bias = {0: 100.0}  # <|endoftext|>
    [completion] = llm.generate("words", SamplingParams(temperature=0, logit_bias=bias))
    assert completion.text == ""
    assert completion.finish_reason is FinishReason.STOP
    [again] = llm.generate(
        "words", SamplingParams(temperature=0, logit_bias=bias, ignore_eos=True, max_tokens=3)
    )
    assert again.num_generated_tokens == 3


def test_end_tokens_come_from_every_file_that_names_them(
    make_checkpoint: Callable[..., Path], edit_json: Callable[..., None]
) -> None:
    folder = make_checkpoint()
    edit_json(folder / "config.json", eos_token_id=[5, 6])
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    model = open_model(str(folder))
    assert model.text_engine.engine.limits.eos_token_ids == {0, 5, 6, 7}


def test_defaults_come_from_generation_config_and_what_is_given_wins(
    make_checkpoint: Callable[..., Path],
) -> None:
    folder = make_checkpoint()
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.3, "top_k": 7, "max_new_tokens": 5}'
    )
    llm = LLM(str(folder), max_num_seqs=1)
    params = llm.sampling_params(top_k=9)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.3, 9, 5)
    (folder / "generation_config.json").write_text('{"do_sample": false}')
    assert LLM(str(folder), max_num_seqs=1).sampling_params().temperature == 0


def test_a_second_turn_finds_the_first_in_the_cache(llm: LLM) -> None:
    session = ChatSession(llm.model, system="Be brief and clear.")
    for turn, text in enumerate(("Good morning to you.", "And to you?")):
        completion, events = session.reply(text, GREEDY)
        for _ in events:
            pass
        cached = completion.num_cached_tokens
        assert (cached > 50) == (turn == 1)
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2


def test_an_interrupted_answer_is_kept(llm: LLM) -> None:
    session = ChatSession(llm.model)
    completion, events = session.reply("Good morning.", GREEDY)
    for _ in range(4):
        next(events)
    events.close()  # type: ignore[attr-defined]
    assert session.messages[-1] == {"role": "assistant", "content": completion.text}
    assert completion.text


def test_an_unknown_option_is_refused_by_name(make_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(RequestError, match="max_sequences"):
        LLM(str(make_checkpoint()), max_sequences=3)


def test_the_built_in_model_gives_a_request_the_same_text_in_a_batch_of_16() -> None:
    llm = LLM(max_num_seqs=16, max_num_batched_tokens=64)
    prompts = [f"Chapter {i}. The king said to his {i % 3} sons" for i in range(16)]
    params = llm.sampling_params(seed=7, max_tokens=24)
    together = llm.generate(prompts, params)
    for prompt, completion in zip(prompts, together, strict=True):
        assert llm.generate(prompt, params)[0].text == completion.text


def test_a_text_alone_is_a_conversation_of_one_message() -> None:
    llm = LLM(max_num_seqs=2)
    params = llm.sampling_params(temperature=0.0, max_tokens=20)
    [alone] = llm.chat("What is the KV cache?", params)
    [whole] = llm.chat([{"role": "user", "content": "What is the KV cache?"}], params)
    assert alone.text == whole.text != ""
    shown = repr(alone)
    assert shown.startswith("Completion('")
    assert len(shown) < 250
    assert "tokens=20" in shown


def test_an_answer_has_a_limit_without_being_told_one(llm: LLM, monkeypatch: Any) -> None:
    """Of text and of conversations; the model is one that never ends by itself."""
    seen: list[SamplingParams] = []
    complete = llm.model.text_engine.submit

    def submit(prompt: Any, params: SamplingParams, **more: Any) -> int:
        seen.append(params)
        return complete(prompt, replace(params, max_tokens=1), **more)

    monkeypatch.setattr(llm.model.text_engine, "submit", submit)
    llm.generate(["a"])
    llm.generate("a", SamplingParams(temperature=0.5))
    list(llm.stream("a"))
    llm.chat("a")
    llm.chat({"role": "user", "content": "a"})
    list(llm.stream({"role": "user", "content": "a"}))
    llm.generate("a", max_tokens=3, temperature=0.0)
    llm.chat(["a", "b"], SamplingParams(max_tokens=5000))
    text, said = DEFAULT_TEXT_TOKENS, DEFAULT_CHAT_TOKENS
    limits = [text, text, text, said, said, said, 3, 5000, 5000]
    assert [params.max_tokens for params in seen] == limits
    assert seen[1].temperature == 0.5
    assert seen[6].temperature == 0.0


@pytest.mark.parametrize(
    ("ask", "message", "told"),
    [
        (lambda llm: llm.generate("a", max_new_tokens=3), "did you mean max_tokens?", "top_k"),
        (lambda llm: llm.chat("a", temp=0), "there is no 'temp'; did you mean temp", "min_p"),
        (lambda llm: llm.stream("a", repeat_penalty=2), "did you mean repetition_penalty?", "seed"),
        (lambda llm: llm.sampling_params(xyzzy=2), "there is no 'xyzzy'", "max_tokens"),
        (lambda llm: llm.generate("a", {"max_tokens": 3}), "must be SamplingParams", ""),
        (lambda llm: llm.generate("a", GREEDY, seed=3), "either params or seed", ""),
        (lambda llm: LLM(max_seqs=3), "did you mean max_num_seqs?", "kv_cache_dtype"),
        (lambda llm: llm.generate("a", max_tokens=0), "max_tokens must be a whole number", ""),
    ],
)
def test_a_wrong_parameter_is_refused_with_those_there_are(
    llm: LLM, ask: Callable[[LLM], Any], message: str, told: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ask(llm)
    assert message in caught.value.message
    assert told in caught.value.where
    assert "pooling" not in caught.value.where


def test_a_bar_shows_on_a_terminal_only(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert capfd.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY, progress=True)
    assert "of 2 answers" in capfd.readouterr().err
