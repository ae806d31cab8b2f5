"""Tokens as log-probabilities show them."""

from localllm.answer.completion import TokenInfo
from localllm.hub.checkpoint import open_checkpoint
from localllm.schedule.logprobs import TokenLogprobs
from localllm.server.token_texts import TextOffsets, TokenTexts


def test_the_end_token_and_parts_of_characters_are_shown() -> None:
    tokenizer = open_checkpoint().tokenizer
    end = tokenizer.eos_token_id
    assert end is not None
    name = tokenizer.spell(end).decode()
    assert name.startswith("<|")
    part, *_ = tokenizer.encode("😀", add_special_tokens=False)
    found = TokenLogprobs(-0.5, ((end, -0.5), (part, float("-inf"))))
    tokens = [TokenInfo(end, found, False), TokenInfo(part, None, False)]
    texts = TokenTexts(tokenizer)
    first, second = texts.of_chat(tokens)["content"]
    assert (first["token"], bytes(first["bytes"]).decode()) == (name, name)
    assert [each["token"] for each in first["top_logprobs"]] == [name, r"\xf0"]
    assert first["top_logprobs"][1] == {"token": r"\xf0", "logprob": -9999.0, "bytes": [0xF0]}
    assert (second["token"], second["logprob"]) == (r"\xf0", -9999.0)
    old = texts.of_text(TextOffsets(tokenizer, (), 5).place(tokens))
    assert old == {
        "tokens": [name, r"bytes:\xf0"],
        "token_logprobs": [-0.5, None],
        "top_logprobs": [{name: -0.5, r"bytes:\xf0": -9999.0}, None],
        "text_offset": [5, 5],
    }
