"""Tokens that only a checkpoint's small files name have the ids that transformers gives them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import byte_tokenizer
from tokenizers import AddedToken

from localllm.errors import CheckpointError
from localllm.text.prompt import Conversation
from localllm.text.tokenizer import Tokenizer

TEXTS = (
    "hello <|a|> <|b|>x",
    "<|im_start|>user\n hi  <|im_end|>\n",
    "abc b cat concat CaT cat",
    "<s></s><u> <p> <m> <img><boi><x> <y>  <z> <e1><e2><k> word sword <n>  !",
    "a <|0|> <|1|><|39|>  .",
)


def token(content: str, **flags: bool) -> dict[str, Any]:
    flat = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **flat, "special": True, **flags}


def typed(content: str, **flags: bool) -> dict[str, Any]:
    """As older versions write a token into tokenizer_config.json."""
    return {"__type": "AddedToken", "content": content, "normalized": True, **flags}


def listed(**tokens: dict[str, Any]) -> dict[str, Any]:
    return {"added_tokens_decoder": {number.removeprefix("_"): t for number, t in tokens.items()}}


# tokenizer_config.json; special_tokens_map.json; added_tokens.json.
FILES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}, {}),
    "listed": (listed(_259=token("<|a|>"), _260=token("<|b|>", special=False)), {}, {}),
    "listed with gaps": (listed(_300=token("<|b|>"), _270=token("<|a|>")), {}, {}),
    "other flags": (listed(_1=token("<|im_start|>", rstrip=True, lstrip=True)), {}, {}),
    "no longer special": (listed(_1=token("<|im_start|>", special=False)), {}, {}),
    "a word of the vocabulary": (listed(_70=token("b", special=False)), {}, {}),
    "a single word": (listed(_259=token("cat", single_word=True, special=False)), {}, {}),
    "normalized": (listed(_259=token("CaT", normalized=True, special=False)), {}, {}),
    "a name alone": ({"bos_token": "<s>"}, {}, {}),
    "a name as an object": ({"bos_token": typed("<s>", lstrip=True)}, {}, {}),
    "every name": (
        {
            **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<u>", "pad_token": "<p>"},
            **{"mask_token": "<m>", "image_token": "<img>"},
            "additional_special_tokens": ["<x>", "<y>"],
        },
        {},
        {},
    ),
    "named extras": ({"extra_special_tokens": {"image_token": "<img>", "b": "<boi>"}}, {}, {}),
    "both lists": (
        {"extra_special_tokens": ["<z>"], "additional_special_tokens": ["<x>"]},
        {},
        {},
    ),
    "an empty list": (
        {"extra_special_tokens": [], "additional_special_tokens": ["<x>"]},
        {},
        {},
    ),
    "extras as objects": (
        {"additional_special_tokens": [typed("<x>", rstrip=True), "<y>"]},
        {},
        {},
    ),
    "the map wins": (
        {"eos_token": "<e1>"},
        {"eos_token": "<e2>", "bos_token": {"content": "<s>", "lstrip": True}},
        {},
    ),
    "the map is void": ({"eos_token": "<e1>", **listed()}, {"eos_token": "<e2>"}, {}),
    "extras of the map": ({}, {"additional_special_tokens": ["<x>", "<y>"]}, {}),
    "extras of both": (
        {"extra_special_tokens": ["<z>"]},
        {"extra_special_tokens": ["<x>", {"content": "<y>", "rstrip": True}]},
        {},
    ),
    "extras of the config": (
        {"additional_special_tokens": ["<z>"]},
        {"additional_special_tokens": ["<x>"]},
        {},
    ),
    "added_tokens.json": ({"eos_token": "<e1>"}, {}, {"<k>": 261, "<e1>": 260, "word": 262}),
    "added_tokens.json is void": (listed(_260=token("<|a|>")), {}, {"<k>": 260}),
    "an id that is taken": ({}, {}, {"<k>": 1}),
    "a token becomes special": ({"eos_token": "<n>"}, {}, {}),
    "it stays as it is": ({"eos_token": "<n>", **listed()}, {}, {}),
    "ignored where there is a tokenizer.json": (
        {"add_bos_token": True, "bos_token": "<|im_start|>", "add_eos_token": True},
        {},
        {},
    ),
    "nulls": (
        dict.fromkeys(("bos_token", "additional_special_tokens", "extra_special_tokens")),
        {},
        {},
    ),
    "a name in the vocabulary": ({"eos_token": "b"}, {}, {}),
    "many": (
        {
            "bos_token": "<s>",
            **listed(**{f"_{259 + i}": token(f"<|{i}|>", special=i % 2 == 0) for i in range(40)}),
        },
        {},
        {},
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    backend = byte_tokenizer()
    backend.add_tokens([AddedToken("<n>", rstrip=True, special=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, config: Any, older: Any = None, added: Any = None) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, told in (("special_tokens_map.json", older), ("added_tokens.json", added)):
        if told:
            (folder / name).write_text(json.dumps(told))
    return folder


@pytest.mark.parametrize("name", FILES)
def test_ids_and_text_are_those_of_transformers(name: str, folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    write(folder, *FILES[name])
    reference = transformers.AutoTokenizer.from_pretrained(str(folder))
    tokenizer = Tokenizer.from_folder(folder)
    for text in TEXTS:
        for adds in (False, True):
            expected = reference(text, add_special_tokens=adds)["input_ids"]
            ids = tokenizer.encode(text, add_special_tokens=adds, parse_special=True)
            assert ids == expected
            assert tokenizer.decode(ids) == reference.decode(expected, skip_special_tokens=True)


def test_a_turn_s_markers_that_only_the_config_has_are_one_token_each(folder: Path) -> None:
    template = "<|turn|>{{ messages[0].content }}{{ image_token }}"
    known = {"image_token": "<img>", "chat_template": template, "eos_token": "<|turn|>"}
    tokenizer = Tokenizer.from_folder(write(folder, {**listed(_260=token("<|turn|>")), **known}))
    typed_by_a_user = [{"role": "user", "content": "a<|turn|>"}]
    ids = tokenizer.encode_chat(Conversation(typed_by_a_user)).token_ids
    assert (ids[0], ids[-1], ids.count(260)) == (260, 261, 1)
    assert tokenizer.eos_token_id == 260
    assert tokenizer.decode(ids) == "a<|turn|>"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"added_tokens_decoder": {"x": token("a")}}, "a token's id must be a whole number"),
        ({"added_tokens_decoder": {"300": "a b"}}, None),
        ({"added_tokens_decoder": {"300": 7}}, "added_tokens_decoder must be a token, found 7"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder must be an object"),
        ({"added_tokens_decoder": {"300": token("a", lstrip=3)}}, "flags"),  # type: ignore[arg-type]
        ({"eos_token": 5}, "eos_token must be a token, found 5"),
        ({"extra_special_tokens": "<x>"}, "extra_special_tokens must be a list of tokens"),
        ({"bos_token": "x" * 5000}, "bos_token must be of at most 4,096 characters"),
        ({"bos_token": "\ud800"}, "bos_token"),
    ],
)
def test_what_is_no_token_is_named(config: Any, words: str | None, folder: Path) -> None:
    write(folder, config)
    if words is None:  # a token as a text, which transformers does not take
        Tokenizer.from_folder(folder)
        return
    with pytest.raises(CheckpointError, match=words):
        Tokenizer.from_folder(folder)


def test_one_folder_s_tokens_do_not_stay_for_the_next(
    folder: Path, make_checkpoint: Callable[..., Path]
) -> None:
    write(folder, {"bos_token": "<s>"})
    assert Tokenizer.from_folder(folder).num_token_ids == 261
    assert Tokenizer.from_folder(make_checkpoint()).num_token_ids == 259
