"""OpenAI's client, unchanged, against our server."""

import math
import time
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from localllm import LLM, SamplingParams
from localllm.answer.evaluation import evaluate
from localllm.engine.config import EngineConfig
from localllm.text.prompt import Text

QUESTION = [{"role": "user", "content": "What is the KV cache?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("pocket")


def test_a_chat_has_the_text_of_the_library(client: OpenAI, llm: LLM) -> None:
    [expected] = llm.chat(QUESTION, GREEDY)
    answer = client.chat.completions.create(
        model="pocket", messages=QUESTION, temperature=0, max_tokens=24
    )
    [choice] = answer.choices
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.num_prompt_tokens
    assert answer.usage.completion_tokens == expected.num_generated_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_a_stream_adds_up_to_the_whole(client: OpenAI, llm: LLM) -> None:
    [expected] = llm.chat(QUESTION, GREEDY)
    # So that the beginning of the prompt is cached.
    client.chat.completions.create(model="pocket", messages=QUESTION, max_tokens=1)
    chunks = list(
        client.chat.completions.create(
            model="pocket",
            messages=QUESTION,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == expected.text
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert len({chunk.id for chunk in chunks}) == 1
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 24
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 16


@pytest.mark.parametrize("is_streamed", [False, True])
def test_samples_of_a_seed_are_those_of_the_library(
    client: OpenAI, llm: LLM, is_streamed: bool
) -> None:
    params = SamplingParams(temperature=0.9, seed=7, n=3, max_tokens=12, top_p=0.9, top_k=50)
    [expected] = llm.generate(["The cache"], params)
    arguments = {
        "model": "pocket",
        "prompt": "The cache",
        "temperature": 0.9,
        "seed": 7,
        "n": 3,
        "max_tokens": 12,
        "top_p": 0.9,
        "extra_body": {"top_k": 50},
    }
    texts = {0: "", 1: "", 2: ""}
    if is_streamed:
        for chunk in client.completions.create(stream=True, **arguments):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        answer = client.completions.create(**arguments)
        texts = {choice.index: choice.text for choice in answer.choices}
    assert [texts[i] for i in range(3)] == [sample.text for sample in expected.samples]
    assert len(set(texts.values())) > 1


def test_many_prompts_as_texts_or_tokens_echoed_or_not(client: OpenAI, llm: LLM) -> None:
    texts = ["The cache", "A token is"]
    ids = [list(llm.model.prompts.write(Text(text)).token_ids) for text in texts]
    expected = [each.text for each in llm.generate(texts, GREEDY)]
    for prompt in (texts, ids):
        answer = client.completions.create(
            model="pocket", prompt=prompt, temperature=0, max_tokens=24
        )
        assert [choice.text for choice in answer.choices] == expected
    echoed = client.completions.create(
        model="pocket", prompt=texts[0], temperature=0, max_tokens=24, echo=True
    )
    assert echoed.choices[0].text == texts[0] + expected[0]
    single = client.completions.create(model="pocket", prompt=ids[1], temperature=0, max_tokens=24)
    assert single.choices[0].text == expected[1]


def test_stop_strings_biases_and_penalties_reach_the_engine(client: OpenAI, llm: LLM) -> None:
    [plain] = llm.chat(QUESTION, GREEDY)
    word = plain.text.split()[3]
    stopped = client.chat.completions.create(
        model="pocket", messages=QUESTION, temperature=0, max_tokens=24, stop=[word]
    )
    assert stopped.choices[0].message.content == plain.text[: plain.text.index(word)]
    assert stopped.choices[0].finish_reason == "stop"
    token = plain.samples[0].tokens[0].token_id
    biased = client.chat.completions.create(
        model="pocket",
        messages=QUESTION,
        temperature=0,
        max_tokens=1,
        logit_bias={str(token): -100},
    )
    assert biased.choices[0].message.content != llm.model.tokenizer.decode([token])
    penalized = client.chat.completions.create(
        model="pocket",
        messages=QUESTION,
        temperature=0,
        max_tokens=60,
        presence_penalty=2,
        frequency_penalty=2,
        extra_body={"repetition_penalty": 1.5},
    )
    [expected] = llm.chat(
        QUESTION,
        SamplingParams(
            temperature=0,
            max_tokens=60,
            presence_penalty=2,
            frequency_penalty=2,
            repetition_penalty=1.5,
        ),
    )
    assert penalized.choices[0].message.content == expected.text


def test_log_probabilities_in_both_forms(client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
    [expected] = llm.chat(QUESTION, params)
    answer = client.chat.completions.create(
        model="pocket",
        messages=QUESTION,
        temperature=0,
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for found, token in zip(logprobs.content, expected.samples[0].tokens, strict=True):
        assert token.logprobs is not None
        assert found.logprob == pytest.approx(token.logprobs.logprob, abs=1e-5)
        assert bytes(found.bytes or []).decode() == found.token
        assert len(found.top_logprobs) == 2
        assert found.top_logprobs[0].token == found.token
    text = client.completions.create(
        model="pocket", prompt="The cache", temperature=0, max_tokens=3, logprobs=2
    )
    old = text.choices[0].logprobs
    assert old is not None
    assert "".join(old.tokens or []) == text.choices[0].text
    assert old.text_offset == [
        0,
        len((old.tokens or [""])[0]),
        len("".join((old.tokens or [])[:2])),
    ]


ECHOED = "The cat said é😀 to the king."


def test_an_echo_tells_how_likely_the_prompt_is_as_eval_does(client: OpenAI, llm: LLM) -> None:
    """In the form that lm-evaluation-harness reads."""
    answer = client.completions.create(
        model="pocket", prompt=ECHOED, temperature=0, max_tokens=2, echo=True, logprobs=1
    )
    [choice] = answer.choices
    found = choice.logprobs
    assert found is not None
    ids = list(llm.model.prompts.write(Text(ECHOED)).token_ids)
    assert len(found.tokens) == len(ids) + 2
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    of_prompt = found.token_logprobs[1:-2]
    measured = evaluate(ECHOED, ["pocket"], EngineConfig(max_model_len=len(ids)))
    assert math.exp(-sum(of_prompt) / len(of_prompt)) == pytest.approx(measured.perplexity, 1e-6)
    for own, top in zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
        assert own in top.values()
        assert max(top.values()) == next(iter(top.values()))
    # Where the texts begin; a token that is part of a character is written as its bytes.
    for token, start in zip(found.tokens, found.text_offset, strict=True):
        expected = token if not token.startswith("bytes:") else "😀"
        assert choice.text.startswith(expected, start)
    assert [each for each in found.tokens if each.startswith("bytes:")] == [
        rf"bytes:\x{byte:02x}" for byte in "😀".encode()
    ]


def test_an_echo_without_an_answer_is_the_prompt_whole_streamed_as_text_and_as_tokens(
    client: OpenAI, llm: LLM
) -> None:
    ids = list(llm.model.prompts.write(Text(ECHOED)).token_ids)
    asked = {"model": "pocket", "max_tokens": 0, "echo": True, "logprobs": 0}
    whole = client.completions.create(prompt=ECHOED, **asked)
    [choice] = whole.choices
    assert (choice.text, choice.finish_reason) == (ECHOED, "length")
    assert whole.usage.completion_tokens == 0
    many = client.completions.create(prompt=[ids, ids[:3]], **asked)
    assert [each.text for each in many.choices] == [ECHOED, llm.model.tokenizer.decode(ids[:3])]
    assert many.choices[0].logprobs == choice.logprobs
    assert many.choices[1].logprobs.token_logprobs == choice.logprobs.token_logprobs[:3]
    chunks = list(client.completions.create(prompt=ids, n=2, stream=True, **asked))
    for index in (0, 1):
        own = [each.choices[0] for each in chunks if each.choices[0].index == index]
        assert "".join(each.text for each in own) == ECHOED
        assert own[0].logprobs == choice.logprobs
        assert [each.finish_reason for each in own] == [None, "length"]
    silent = client.completions.create(model="pocket", prompt=ECHOED, max_tokens=0)
    assert (silent.choices[0].text, silent.choices[0].logprobs) == ("", None)


def test_a_conversation_with_parts_and_all_roles(client: OpenAI, llm: LLM) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is a token?"}]},
        {"role": "assistant", "content": "A piece of text."},
        {"role": "user", "content": "And the cache?"},
    ]
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a token?"},
        *messages[2:],
    ]
    [expected] = llm.chat(plain, GREEDY)
    answer = client.chat.completions.create(
        model="pocket", messages=messages, temperature=0, max_completion_tokens=24
    )
    assert answer.choices[0].message.content == expected.text


def test_the_model_is_listed_and_others_are_unknown(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["pocket"]
    assert client.models.retrieve("pocket").id == "pocket"
    for ask in (
        lambda: client.models.retrieve("gpt-4o"),
        lambda: client.chat.completions.create(model="gpt-4o", messages=QUESTION),
    ):
        with pytest.raises(NotFoundError) as caught:
            ask()
        assert caught.value.code == "model_not_found"
        assert "pocket" in caught.value.message


def test_a_prompt_that_is_too_long_is_told_with_its_length(client: OpenAI) -> None:
    for words in (3000, 300_000):
        with pytest.raises(BadRequestError) as caught:
            client.completions.create(model="pocket", prompt="word " * words)
        assert caught.value.code == "context_length_exceeded"
        assert "2,048" in caught.value.message


def test_metrics_count_what_was_done(server: Any, client: OpenAI) -> None:
    def read() -> dict[str, float]:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in values}

    before = read()
    for is_streamed in (False, True):
        answer = client.completions.create(
            model="pocket", prompt="A metre", temperature=0, max_tokens=5, n=2, stream=is_streamed
        )
        if is_streamed:
            assert list(answer)
    after, deadline = read(), time.monotonic() + 30

    def grown(name: str) -> float:
        key = f'localllm:{name}{{model_name="pocket"}}'
        return after[key] - before.get(key, 0.0)

    # A request is counted behind its last bytes.
    while grown("e2e_request_latency_seconds_count") < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        after = read()

    num_prompt = len(
        client.post("/../tokenize", body={"prompt": "A metre"}, cast_to=dict)["tokens"]
    )
    assert grown("generation_tokens_total") == 20
    assert grown("prompt_tokens_total") == 2 * num_prompt
    assert grown("time_to_first_token_seconds_count") == 2
    assert grown("inter_token_latency_seconds_count") == 16
    assert grown("e2e_request_latency_seconds_count") == 2
    key = 'localllm:request_success_total{finished_reason="length",model_name="pocket"}'
    assert after[key] - before.get(key, 0.0) == 4
    assert after['localllm:num_requests_running{model_name="pocket"}'] >= 0


def test_what_is_not_supported_is_refused(client: OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for arguments in (
        {"tools": [tool]},  # its template knows of none
        {"tool_choice": "required"},
        {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        {"response_format": {"type": "yaml"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}},
        {"n": 9},
        {"temperature": -1},
        {"top_logprobs": 2},
        {"logit_bias": {"99999": 1}},
        {"extra_body": {"chat_template_kwargs": {"messages": []}}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    ):
        with pytest.raises(BadRequestError) as caught:
            client.chat.completions.create(**{"model": "pocket", "messages": QUESTION, **arguments})
        assert caught.value.type == "invalid_request_error"
    with pytest.raises(BadRequestError, match="cannot fill in"):
        client.completions.create(model="pocket", prompt="a", suffix="b")
