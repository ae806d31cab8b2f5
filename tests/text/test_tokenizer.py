"""Text to tokens and back; streaming never shows half a character."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from localllm.errors import CheckpointError, RequestError, TemplateError
from localllm.text.prompt import Conversation
from localllm.text.tokenizer import StreamDecoder, Tokenizer

DATA = Path(__file__).parents[3] / "shared" / "data" / "tokenizers"
BYTES = Tokenizer(byte_tokenizer, {}, {})


def stream(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(token_id) for token_id in token_ids), decoder.flush()]


def test_a_character_of_several_tokens_comes_whole() -> None:
    ids = BYTES.encode("a€b", add_special_tokens=False)
    assert len(ids) == 5
    assert stream(BYTES, ids) == ["a", "", "", "€", "b", ""]


def test_half_a_character_at_the_end_comes_as_a_replacement_on_flush() -> None:
    ids = BYTES.encode("a€", add_special_tokens=False)[:-1]
    pieces = stream(BYTES, ids)
    assert pieces[:-1] == ["a", "", ""]
    assert pieces[-1] in ("\ufffd", "\ufffd\ufffd")


@given(st.text(max_size=30))
def test_streamed_pieces_join_to_the_text(text: str) -> None:
    if any(0xD800 <= ord(char) < 0xE000 for char in text):
        return
    ids = BYTES.encode(text, add_special_tokens=False)
    assert "".join(stream(BYTES, ids)) == text


@given(st.binary(max_size=24))
def test_streamed_pieces_of_any_bytes_join_to_the_decoded_whole(data: bytes) -> None:
    first = BYTES.encode("\x00", add_special_tokens=False)[0]
    table = {
        b: BYTES.encode(bytes([b]).decode("latin-1"), add_special_tokens=False) for b in range(128)
    }
    ids = [table[b & 127][0] if b < 128 else first for b in data]
    assert "".join(stream(BYTES, ids)) == BYTES.decode(ids)


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(RequestError, match="Unicode"):
        BYTES.encode("a\ud800", add_special_tokens=False)


def test_a_long_text_is_known_to_be_too_long_before_it_is_read_whole() -> None:
    text = "x" * 10_000_000
    assert 1000 < BYTES.count_at_least(text, 1000) < 1_000_000


def test_a_text_is_encoded_the_same_way_each_time(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1, "ab": 2, "abab": 3}
    model = models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "ab")], dropout=0.5)
    Backend(model).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    found = {tuple(tokenizer.encode("abab", add_special_tokens=False)) for _ in range(50)}
    assert found == {(3,)}
    assert '"dropout":null' in tokenizer.to_json()


def test_the_template_file_beats_the_config(make_checkpoint) -> None:  # type: ignore[no-untyped-def]
    folder = make_checkpoint()
    messages = [{"role": "user", "content": "hi"}]
    assert (
        Tokenizer.from_folder(folder)
        .render_chat(Conversation(messages))
        .startswith("<|im_start|>user\nhi")
    )
    (folder / "chat_template.jinja").write_text("[{{ messages[0].content }}{{ eos_token }}]")
    assert Tokenizer.from_folder(folder).render_chat(Conversation(messages)) == "[hi<|endoftext|>]"


def test_a_named_list_of_templates_gives_the_one_for_tools(make_checkpoint, edit_json) -> None:  # type: ignore[no-untyped-def]
    folder = make_checkpoint()
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools[0].name }}"},
    ]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.render_chat(Conversation([])) == "plain"
    assert tokenizer.render_chat(Conversation([], tools=[{"name": "clock"}])) == "with clock"


def test_without_a_template_there_is_an_error_that_names_raw() -> None:
    with pytest.raises(TemplateError) as caught:
        BYTES.render_chat(Conversation([]))
    assert "--raw" in caught.value.hint


def test_a_broken_tokenizer_file_is_named(make_checkpoint) -> None:  # type: ignore[no-untyped-def]
    folder = make_checkpoint()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "Nonsense"}}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(folder)


@pytest.mark.skipif(not DATA.exists(), reason="the real tokenizers lie outside the repository")
@pytest.mark.parametrize("name", ["qwen2", "gpt-2", "phi-3"])
def test_real_tokenizers_encode_their_cases_and_stream_them_back(name: str) -> None:
    folder = DATA / name
    tokenizer = Tokenizer.from_folder(folder)
    texts = (folder / "cases.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = (folder / "cases.out").read_text().splitlines()
    assert len(texts) == len(lines) + 1, "the file ends with a separator"
    for text, line in zip(texts, lines, strict=False):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == [int(token_id) for token_id in line.split()]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_the_older_map_of_special_tokens_names_the_end_too(make_checkpoint, edit_json) -> None:  # type: ignore[no-untyped-def]
    folder = make_checkpoint()
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    assert Tokenizer.from_folder(folder).eos_token_id is None
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert Tokenizer.from_folder(folder).eos_token_id == 2


@pytest.mark.skipif(not DATA.exists(), reason="the real tokenizers lie outside the repository")
@pytest.mark.parametrize("name", ["qwen2", "gpt-2", "phi-3"])
@settings(deadline=None)  # the first case reads the vocabulary
@given(text=st.text(max_size=40), num_context=st.integers(0, 8))
def test_text_is_streamed_back_exactly_after_any_split(
    name: str, text: str, num_context: int
) -> None:
    tokenizer = real_tokenizer(name)
    if any(0xD800 <= ord(char) < 0xE000 for char in text):
        return
    ids = tokenizer.encode("Some words. " + text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    assert whole == "Some words. " + text
    for cut in range(4, len(ids)):
        context = ids[max(0, cut - num_context - 4) : cut]
        if tokenizer.decode(context).endswith("\ufffd"):
            continue  # a cut within a character, which no prompt that is a text has
        decoder = StreamDecoder(tokenizer, context=context)
        pieces = [*(decoder.push(token_id) for token_id in ids[cut:]), decoder.flush()]
        assert "".join(pieces) == whole[len(tokenizer.decode(ids[:cut])) :]


@pytest.mark.skipif(not DATA.exists(), reason="the real tokenizers lie outside the repository")
@pytest.mark.parametrize("name", ["qwen2", "gpt-2", "phi-3"])
def test_tokens_are_spelled_in_bytes_that_join_to_the_text(name: str) -> None:
    tokenizer = real_tokenizer(name)
    text = "A cat's é, 😀 and 猫\n\tin two  lines"
    ids = tokenizer.encode(text, add_special_tokens=False)
    spelled = [tokenizer.spell(token_id) for token_id in ids]
    assert b"".join(spelled).removeprefix(b" ") == text.encode()
    assert any(each[0] >= 0x80 for each in spelled if len(each) == 1)  # a part of a character
    end = {"qwen2": "<|im_end|>", "gpt-2": "<|endoftext|>", "phi-3": "<|end|>"}[name]
    assert tokenizer.spell(tokenizer.vocabulary()[end]) == end.encode()


@cache
def real_tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_folder(DATA / name)


class _Dawdling:
    """A backend that lets other threads run before it encodes."""

    def __init__(self) -> None:
        object.__setattr__(self, "_own", byte_tokenizer())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own, name, value)

    def encode(self, *arguments: Any, **named: Any) -> Any:
        time.sleep(1e-4)
        return self._own.encode(*arguments, **named)


def test_threads_that_encode_do_not_disturb_each_other() -> None:
    text = "<|im_start|>user\nhi<|im_end|>"
    expected = {
        special: BYTES.encode(text, add_special_tokens=False, parse_special=special)
        for special in (False, True)
    }
    assert expected[False] != expected[True]
    tokenizer = Tokenizer(_Dawdling, {}, {})  # type: ignore[arg-type]

    def encode(number: int) -> bool:
        special = number % 2 == 0
        found = tokenizer.encode(text, add_special_tokens=False, parse_special=special)
        return found == expected[special]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(encode, range(200)))


def test_a_conversation_says_where_its_messages_end(make_checkpoint) -> None:  # type: ignore[no-untyped-def]
    tokenizer = Tokenizer.from_folder(make_checkpoint())
    said = ["Be brief.", "Hello!", "Good day.", "Who are you?"]
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    prompt = tokenizer.encode_chat(Conversation(messages))
    before = [tokenizer.decode(prompt.token_ids[:border]) for border in prompt.borders]
    for text in said:
        assert any(each.endswith(text) for each in before)
    # Where the last message is another one, all before it is the same.
    other = tokenizer.encode_chat(
        Conversation([*messages[:3], {"role": "user", "content": "Why?"}])
    )
    [same] = [
        border
        for border, text in zip(prompt.borders, before, strict=True)
        if text.endswith("Good day.")
    ]
    assert prompt.token_ids[:same] == other.token_ids[:same]
