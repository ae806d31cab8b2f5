"""A GGUF file's tokenizer gives the ids of the tokenizer.json that it was converted from."""

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from localllm.errors import CheckpointError, UnsupportedModelError
from localllm.files.gguf import read_gguf
from localllm.text.gguf_splits import WORD_SPLITS
from localllm.text.gguf_tokenizer import end_token_ids, tokenizer_files
from localllm.text.tokenizer import Tokenizer as Ours

SHARED = Path(__file__).parents[3] / "shared" / "data"
ORIGINALS = SHARED / "tokenizers"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TEXTS = [
    "",
    " ",
    "Hello, world! It's they'LL we've I'm you'd don't DON'T.",
    "def f(x):\n\treturn  x ** 2   # what?\n\n\n\nclass A:\n    pass\r\n",
    "1 22 333 4444 55555 123456789 3.14159 1,000,000 ½ ² Ⅻ ٣٤٥",
    "a" + " " * 3 + "b" + " " * 17 + "c" + " " * 40 + "\n" * 5 + "  \n  \t\t x \n",
    "漢字とかなカナ、混じり文。中文字符！한국어 문장",
    "مرحبا بالعالم كيف حالك؟ שלום हिन्दी ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u00e9 ﬁ ℃ \u200b\u00a0\u3000|",
    "<|endoftext|>a <|im_start|>user\nhi<|im_end|> <s>b</s> <|user|> <unk> [PAD151935] <tool_call>",
    "HelloWorld camelCase XMLHttpRequest __init__ --flag=/usr/bin ===> $x^2+y~`|` \\\\n",
    "▁ ▁▁ Ġ Ċ <0x0A> \x00\x01",
]


@cache
def texts() -> list[str]:
    found = list(TEXTS)
    for book in sorted((SHARED / "books").glob("*.txt"))[:4]:
        whole = book.read_text(encoding="utf-8")
        found += [whole[start : start + 3000] for start in range(5000, 65000, 15000)]
    return found


@cache
def original(name: str) -> dict[str, Any]:
    path = ORIGINALS / name / "tokenizer.json"
    if not path.is_file():
        pytest.skip(f"{path} is missing")
    return dict(json.loads(path.read_bytes()))


def tokens_of(state: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Tokens by id and their types, as llama.cpp's converter writes them."""
    vocab = dict(state["model"]["vocab"])
    added = {token["id"]: token for token in state["added_tokens"]}
    vocab |= {token["content"]: i for i, token in added.items()}
    tokens, types = [""] * len(vocab), [NORMAL] * len(vocab)
    for text, i in vocab.items():
        tokens[i] = text
        if len(text) == 6 and text.startswith("<0x"):
            types[i] = BYTE
    for i, token in added.items():
        types[i] = CONTROL if token["special"] else USER_DEFINED
        if token["content"].startswith("[PAD"):
            types[i] = UNUSED
    return tokens, types


def scores_of(state: dict[str, Any], tokens: list[str], worst: float) -> list[float]:
    """Scores that stand for the order of merges: falling from the first to `worst` for runs."""
    scores: dict[str, float] = {}
    for left, right in state["model"]["merges"]:
        scores.setdefault(left + right, -float(len(scores)))
    return [worst if set(text) == {"▁"} else scores.get(text, worst) for text in tokens]


def converted(path: Path, model: str, keys: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The files of a GGUF with these keys, once written and read."""
    return tokenizer_files(read_gguf(written(path, model, keys)).keys, str(path))


def written(path: Path, model: str, keys: dict[str, Any]) -> Path:
    file = path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in {"tokenizer.ggml.model": model, **keys}.items():
        key = name if name.startswith("tokenizer.") else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def same_ids(made: dict[str, Any], expected: Tokenizer) -> None:
    ours = Tokenizer.from_str(json.dumps(made))
    for text in texts():
        for special in (False, True):
            assert (
                ours.encode(text, add_special_tokens=special).ids
                == expected.encode(text, add_special_tokens=special).ids
            ), text[:200]
    for ids in (expected.encode(text).ids for text in texts()):
        assert ours.decode(ids, skip_special_tokens=False) == expected.decode(
            ids, skip_special_tokens=False
        )


@pytest.mark.parametrize(("name", "pre"), [("gpt-2", "gpt-2"), ("qwen2", "qwen2")])
def test_ids_of_byte_level_vocabularies_are_those_of_the_original(
    tmp_path: Path, name: str, pre: str
) -> None:
    state = original(name)
    tokens, types = tokens_of(state)
    merges = [" ".join(merge) for merge in state["model"]["merges"]]
    made = converted(
        tmp_path, "gpt2", {"pre": pre, "tokens": tokens, "token_type": types, "merges": merges}
    )
    # In the copy of qwen2, the padding is made of added tokens, and the normalizer is lost.
    added = [each for each in state["added_tokens"] if not each["content"].startswith("[PAD")]
    expected = Tokenizer.from_str(json.dumps({**state, "added_tokens": added}))
    if pre == "qwen2":
        expected.normalizer = normalizers.NFC()
    same_ids(made["tokenizer.json"], expected)


def test_ids_of_sentence_piece_with_scores_are_those_of_the_original(tmp_path: Path) -> None:
    state = original("phi-3")
    tokens, types = tokens_of(state)
    types[0] = UNKNOWN
    keys = {
        "tokens": tokens,
        "token_type": types,
        "scores": np.array(scores_of(state, tokens, -1e9), np.float32).tolist(),
        "pre": "default",
        "bos_token_id": 1,
        "eos_token_id": 32000,
    }
    made = converted(tmp_path, "llama", keys)
    assert [list(merge) for merge in made["tokenizer.json"]["model"]["merges"]] == [
        list(merge) for merge in state["model"]["merges"]
    ]
    same_ids(made["tokenizer.json"], Tokenizer.from_str(json.dumps(state)))
    assert made["tokenizer_config.json"] == {
        "bos_token": "<s>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<unk>",
        "add_bos_token": True,
    }


# The expressions of the models, spelled out once more, by one name of each family.
LETTERS, LARGE = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
APOSTROPHES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CL100K = (
    APOSTROPHES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = CL100K.replace("{1,3}", "")
QWEN_35 = (
    APOSTROPHES + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + END
)
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{LARGE}*{LETTERS}+{APOSTROPHES}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{LARGE}+{LETTERS}*{APOSTROPHES}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + END
)
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{LARGE}*{LETTERS}+|[^\r\n\p{{L}}\p{{N}}]?{LARGE}+{LETTERS}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + END
)
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + END
)
CHINESE = "[一-龥\u3040-\u309f\u30a0-\u30ff]+"
REGEXES = {
    "llama-bpe": [CL100K],
    "glm4": [CL100K],
    "qwen2": [QWEN],
    "stablelm2": [QWEN],
    "qwen35": [QWEN_35],
    "gpt-4o": [O200K],
    "tekken": [TEKKEN],
    "deepseek-v3": [r"\p{N}{1,3}", CHINESE, DEEPSEEK],
    "deepseek-coder": [
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[一-龥\u0800-一가-\ud7ff]+",
        r"\p{N}",
    ],
    "seed-coder": [
        APOSTROPHES
        + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
    "smollm": [r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"],
    "phi-2": [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"],
    "laguna": [r"[^\n]+|[\n]+", QWEN],
    "tiny_aya": [r"\d{1,3}(?=(?:\d{3})*\b)", O200K],
}


@pytest.mark.parametrize("name", REGEXES)
def test_words_are_split_by_the_expressions_of_the_named_model(tmp_path: Path, name: str) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Every pair of letters that a word may hold makes a token, so that each cut shows in the ids.
    pairs = [(a, b) for a in "abcdeĠĊ1234Ll'." for b in "abcdeĠĊ1234Ll'."]
    tokens = alphabet + [a + b for a, b in pairs]
    keys = {"pre": name, "tokens": tokens, "merges": [f"{a} {b}" for a, b in pairs]}
    made = converted(tmp_path, "gpt2", {**keys, "add_bos_token": False})
    expected = Tokenizer(models.BPE({text: i for i, text in enumerate(tokens)}, pairs))
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in REGEXES[name]]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    expected.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    ours = Tokenizer.from_str(json.dumps(made["tokenizer.json"]))
    if WORD_SPLITS[name].composes:
        expected.normalizer = normalizers.NFC()
    assert expected.pre_tokenizer
    assert ours.pre_tokenizer
    for text in texts():
        assert ours.pre_tokenizer.pre_tokenize_str(text) == expected.pre_tokenizer.pre_tokenize_str(
            text
        )
        assert ours.encode(text).ids == expected.encode(text).ids


@pytest.mark.parametrize("name", WORD_SPLITS)
def test_every_named_split_keeps_all_letters(name: str) -> None:
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    steps = {"type": "Sequence", "pretokenizers": list(WORD_SPLITS[name].steps)}
    made = Tokenizer.from_str(json.dumps({"pre_tokenizer": steps, "model": empty}))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert made.pre_tokenizer
    for text in texts():
        words = "".join(word for word, _ in made.pre_tokenizer.pre_tokenize_str(text))
        assert words == "".join(word for word, _ in plain.pre_tokenize_str(text))


def small(**more: Any) -> dict[str, Any]:
    """A byte-level vocabulary with one merge and three added tokens."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<bos>", "<|im_end|>", "<tool>"]
    types = [NORMAL] * 257 + [CONTROL, CONTROL, USER_DEFINED]
    keys = {"pre": "llama-bpe", "tokens": tokens, "token_type": types, "merges": ["a b"]}
    return {**keys, "bos_token_id": 257, "eos_token_id": 258, **more}


def test_a_beginning_and_an_end_are_added_as_the_file_or_else_the_split_says(
    tmp_path: Path,
) -> None:
    cases = [({}, [257, 256]), ({"pre": "qwen2"}, [256]), ({"add_bos_token": False}, [256])]
    cases += [({"add_eos_token": True}, [257, 256, 258]), ({"pre": "tekken"}, [257, 256])]
    for more, expected in cases:
        made = converted(tmp_path, "gpt2", small(**more))
        ours = Tokenizer.from_str(json.dumps(made["tokenizer.json"]))
        assert ours.encode("ab").ids == expected
        assert ours.encode("ab", add_special_tokens=False).ids == [256]
        assert made["tokenizer_config.json"]["add_bos_token"] == (257 in expected)


def test_only_control_tokens_are_special(tmp_path: Path) -> None:
    made = converted(tmp_path, "gpt2", small())["tokenizer.json"]
    assert [(token["content"], token["special"]) for token in made["added_tokens"]] == [
        ("<bos>", True),
        ("<|im_end|>", True),
        ("<tool>", False),
    ]


def test_a_plain_word_with_a_role_stays_text(tmp_path: Path) -> None:
    made = converted(tmp_path, "gpt2", small(padding_token_id=0))
    assert "pad_token" not in made["tokenizer_config.json"]
    assert made["tokenizer.json"]["added_tokens"][0]["content"] == "<bos>"


def test_the_folder_of_these_files_is_a_tokenizer(tmp_path: Path) -> None:
    templates = {
        "tokenizer.chat_template": "{{ bos_token }}plain",
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_templates": ["tool_use"],
    }
    for name, state in converted(tmp_path, "gpt2", small(**templates)).items():
        (tmp_path / name).write_text(json.dumps(state))
    ours = Ours.from_folder(tmp_path)
    assert ours.encode("ab", add_special_tokens=True) == [257, 256]
    assert ours.encode("<|im_end|>", add_special_tokens=False, parse_special=True) == [258]
    assert len(ours.encode("<|im_end|>", add_special_tokens=False)) > 1
    assert (ours.chat_template, ours.tool_template) == ("{{ bos_token }}plain", "tools")
    assert ours.eos_token_id == 258


def test_one_chat_template_is_a_text(tmp_path: Path) -> None:
    made = converted(tmp_path, "gpt2", small(**{"tokenizer.chat_template": "x"}))
    assert made["tokenizer_config.json"]["chat_template"] == "x"


def pieces(texts: list[str], **more: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: its control tokens, all bytes, then `texts` from the best on."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *texts]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(texts)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(texts))]
    return {"tokens": tokens, "token_type": types, "scores": scores, **more}


def test_scores_decide_which_tokens_are_merged_first(tmp_path: Path) -> None:
    made = converted(tmp_path, "llama", pieces(["bc", "ab", "▁", "a", "b", "c"]))
    ours = Tokenizer.from_str(json.dumps(made["tokenizer.json"]))
    assert ours.encode("abc").tokens == ["<s>", "▁", "a", "bc"]
    assert ours.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert ours.decode(ours.encode(" é b").ids) == " é b"


def test_a_space_is_put_behind_special_tokens_except_by_mistral(tmp_path: Path) -> None:
    for names, expected in [
        (["<x>", "</x>"], ["▁a", "<x>", "▁", "▁a", "</x>", "▁a"]),
        (["[INST]", "[/INST]"], ["▁a", "[INST]", "▁a", "[/INST]", "a"]),
    ]:
        keys = pieces(["▁a", "▁", "a"], add_bos_token=False)
        keys["tokens"] += names
        keys["token_type"] += [CONTROL] * 2
        keys["scores"] += [0.0] * 2
        made = converted(tmp_path, "llama", keys)["tokenizer.json"]
        ours = Tokenizer.from_str(json.dumps(made))
        assert ours.encode(f"a{names[0]} a{names[1]}a").tokens == expected
        assert ours.decode(ours.encode("a a").ids) == "a a"


def test_no_space_is_put_before_a_text_where_the_file_says_so(tmp_path: Path) -> None:
    keys = pieces(["▁a", "▁", "a"], add_space_prefix=False, add_bos_token=False)
    ours = Tokenizer.from_str(json.dumps(converted(tmp_path, "llama", keys)["tokenizer.json"]))
    assert ours.encode("a a").tokens == ["a", "▁a"]
    assert ours.decode(ours.encode(" a").ids) == " a"


def test_runs_of_spaces_come_before_words_though_their_scores_are_the_least(
    tmp_path: Path,
) -> None:
    keys = pieces(["▁a", "▁", "a"], add_space_prefix=False, add_bos_token=False)
    keys["tokens"] += ["  ", "   "]
    keys["token_type"] += [USER_DEFINED] * 2
    keys["scores"] += [-1000.0] * 2
    ours = Tokenizer.from_str(json.dumps(converted(tmp_path, "llama", keys)["tokenizer.json"]))
    assert ours.encode("   a").tokens == ["▁▁▁", "a"]
    assert ours.encode("▁▁").tokens == ["▁▁"]


@pytest.mark.parametrize(
    ("kind", "split"), [("gemma4", "default"), ("gpt2", "granite-embed-multi-311m")]
)
def test_gemma_4_merges_letters_and_always_begins(tmp_path: Path, kind: str, split: str) -> None:
    merges = ["▁ a", "ä ö", "\n \n"]
    keys = pieces(["▁", "a", "ä", "ö", "▁a", "äö", "\n", "\n\n", "<|tool_call>"])
    keys["token_type"][-1] = USER_DEFINED
    keys |= {"merges": merges, "add_bos_token": False, "bos_token_id": 1, "unknown_token_id": 0}
    made = converted(tmp_path, kind, keys | {"pre": split})
    ours = Tokenizer.from_str(json.dumps(made["tokenizer.json"]))
    assert ours.encode(" aäö\n\na z").tokens == ["<s>", "▁a", "äö", "\n\n", "a", "▁", "<0x7A>"]
    assert made["tokenizer.json"]["added_tokens"][-1]["special"]


def test_a_whole_tokenizer_is_taken_as_it_is(tmp_path: Path) -> None:
    state = {"version": "1.0", "model": {"type": "WordPiece"}}
    keys = {"tokenizer.huggingface.json": json.dumps(state), **pieces(["a"])}
    assert converted(tmp_path, "bert", keys)["tokenizer.json"] == state
    keys["tokenizer.huggingface.json"] = "[" * 100_000
    with pytest.raises(CheckpointError, match="no JSON object"):
        converted(tmp_path, "bert", keys)


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", "none", "x"])
def test_other_kinds_are_refused_by_name(model: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{model}'") as caught:
        tokenizer_files({"tokenizer.ggml.model": model}, "a.gguf")
    assert caught.value.where == "a.gguf"
    assert caught.value.hint


def test_an_unknown_split_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'never-heard'"):
        converted(tmp_path, "gpt2", small(pre="never-heard"))


@pytest.mark.parametrize(
    ("model", "keys", "problem"),
    [
        ("gpt2", {}, "tokens must be a list"),
        ("gpt2", small(merges=["a z1"]), "is of no tokens"),
        ("gpt2", small(merges=["ab"]), "is of no tokens"),
        ("gpt2", small(merges="a b"), "merges must be a list"),
        ("gpt2", small(token_type=[1, 3]), "has 2 values, 260 tokens"),
        ("gpt2", small(token_type=[9] * 260), "no type"),
        ("gpt2", small(eos_token_id=260), "eos_token_id is 260"),
        ("gpt2", small(add_bos_token="yes"), "must be true or false"),
        ("gpt2", small(tokens=["a"] * 260), "twice"),
        ("gpt2", small(**{"tokenizer.chat_templates": ["rag"]}), "'rag', which is missing"),
        ("gpt2", small(**{"tokenizer.chat_template": 3}), "no text"),
        ("llama", {**pieces(["a"]), "scores": [float("nan")] * 260}, "not finite"),
        ("llama", pieces(["x" * 40_000]), "too long"),
        ("gpt2", {"tokens": ["a"], "merges": [" "], "add_bos_token": True}, "names none"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(
    tmp_path: Path, model: str, keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem) as caught:
        converted(tmp_path, model, keys)
    assert caught.value.hint


def test_no_tokenizer_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="model must be a text"):
        tokenizer_files({}, "a.gguf")


def ends(tmp_path: Path, texts: list[str], type_: int = CONTROL, **more: Any) -> list[str]:
    keys = {"tokens": ["a", *texts], "token_type": [NORMAL, *[type_] * len(texts)], **more}
    read = read_gguf(written(tmp_path, "gpt2", keys)).keys
    return [keys["tokens"][i] for i in end_token_ids(read)]


def test_ends_are_those_that_are_named_and_those_that_mean_it(tmp_path: Path) -> None:
    texts = ["<|x|>", "<|im_end|>", "<|eot_id|>", "<|y|>"]
    assert ends(tmp_path, texts, eos_token_id=1, eom_token_id=4) == texts
    assert ends(tmp_path, texts, USER_DEFINED) == []


def test_the_end_of_a_message_is_no_end_in_harmony(tmp_path: Path) -> None:
    assert ends(tmp_path, ["<|end|>"]) == ["<|end|>"]
    assert ends(tmp_path, ["<|return|>", "<|end|>", "<|call|>"]) == ["<|return|>", "<|call|>"]


def test_a_large_vocabulary_is_made_in_a_moment() -> None:
    words = [f"{i:b}".replace("0", "a").replace("1", "b")[::-1] for i in range(2, 262_000)]
    words += ["a", "b"]
    keys = pieces(list(dict.fromkeys(words)))
    keys = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    for name in ("token_type", "scores"):
        keys[f"tokenizer.ggml.{name}"] = memoryview(np.array(keys[f"tokenizer.ggml.{name}"]))
    begin = time.process_time()
    made = tokenizer_files({"tokenizer.ggml.model": "llama", **keys}, "a.gguf")
    assert time.process_time() - begin < 8  # some two seconds, on a machine that is not loaded
    assert len(made["tokenizer.json"]["model"]["merges"]) > 262_000
