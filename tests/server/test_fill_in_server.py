"""`suffix` of `/v1/completions`, with a vocabulary that has tokens for it."""

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from checkpoints import tiny_config, write_checkpoint
from server.conftest import Server, end, start_server

from localllm.hub.checkpoint import open_checkpoint
from localllm.text.tokenizer import Tokenizer

FIRST = 6144  # of the ids behind pocket's
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
PREFIX, SUFFIX = "def add(a, b):\n    ", "\n\nprint(add(1, 2))"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "coder"
    write_checkpoint(folder, tiny_config("Qwen3ForCausalLM", vocab_size=FIRST + 16))
    pocket = open_checkpoint().folder
    told = json.loads((pocket / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    told["added_tokens"] += [
        {"id": FIRST + i, "content": mark, "special": True, **flags} for i, mark in enumerate(MARKS)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(told))
    (folder / "tokenizer_config.json").write_text((pocket / "tokenizer_config.json").read_text())
    return folder


@pytest.fixture(scope="module")
def coder(server_home: Path, folder: Path) -> Iterator[Server]:
    server = start_server(server_home, "--served-model-name", "coder", model=str(folder))
    yield server
    end(server)


def test_what_stands_between_is_what_the_written_prompt_continues_with(
    coder: Server, folder: Path
) -> None:
    encode = Tokenizer.from_folder(folder).encode
    before, behind = (encode(each, add_special_tokens=False) for each in (PREFIX, SUFFIX))
    written = [FIRST, *before, FIRST + 1, *behind, FIRST + 2]
    client = coder.client()
    asked = {"model": "coder", "max_tokens": 8, "temperature": 0}
    filled = client.completions.create(prompt=PREFIX, suffix=SUFFIX, **asked)
    plain = client.completions.create(prompt=written, **asked)
    assert filled.choices[0].text == plain.choices[0].text
    assert filled.usage.prompt_tokens == plain.usage.prompt_tokens == len(written)
    other = client.completions.create(prompt=PREFIX, suffix="}", **asked)
    assert other.usage.prompt_tokens < filled.usage.prompt_tokens


def test_a_prompt_may_hold_the_tokens_for_filling_in_itself(coder: Server) -> None:
    """As editors write it; unless it is not to be trusted."""
    client = coder.client()
    asked = {"model": "coder", "max_tokens": 8, "temperature": 0}
    filled = client.completions.create(prompt=PREFIX, suffix=SUFFIX, **asked)
    written = f"{MARKS[0]}{PREFIX}{MARKS[1]}{SUFFIX}{MARKS[2]}"
    raw = client.completions.create(prompt=written, **asked)
    assert raw.choices[0].text == filled.choices[0].text
    assert raw.usage.prompt_tokens == filled.usage.prompt_tokens
    plain = client.completions.create(prompt=written, extra_body={"parse_special": False}, **asked)
    assert plain.usage.prompt_tokens > raw.usage.prompt_tokens + 9
    echoed = client.completions.create(
        prompt=written, echo=True, logprobs=0, model="coder", max_tokens=0
    )
    assert echoed.choices[0].text == written
    assert "".join(echoed.choices[0].logprobs.tokens) == written


def test_streams_fill_in_too(coder: Server) -> None:
    client = coder.client()
    asked = {"model": "coder", "prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 8}
    whole = client.completions.create(**asked, temperature=0)
    pieces = client.completions.create(**asked, temperature=0, stream=True)
    assert "".join(each.choices[0].text for each in pieces if each.choices) == whole.choices[0].text


def test_other_models_say_that_they_cannot(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot fill in"):
        server.client().completions.create(model="pocket", prompt="a", suffix="b")
