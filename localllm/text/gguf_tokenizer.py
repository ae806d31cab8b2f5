"""The tokenizer of a GGUF file, as the files that a checkpoint has for it.

A GGUF file lists the tokens with their kinds, and either the merges or scores that stand for them.
Its `tokenizer.json` gives the ids that the model's own one gave before it was converted. Source:
`docs/gguf.md` of ggml for the keys, llama.cpp's `src/llama-vocab.cpp` for their defaults.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from localllm.files.gguf import GgufValue
from localllm.text.gguf_splits import WORD_SPLITS, WordSplit
from localllm.text.gguf_vocabulary import (
    NORMAL,
    SPACE,
    UNDEFINED,
    USER_DEFINED,
    GgufKeys,
    GgufVocabulary,
)

logger = logging.getLogger(__name__)

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
KINDS = ("gpt2", "llama", "gemma4")
# Converters write these splits of words for a Gemma without tokenizer.model, beside the kind gpt2.
_SPLITS_OF_GEMMA = ("gemma4", "granite-embed-multi-311m")
# A list of tokens of which this many pairs of letters could be cut is no vocabulary.
MAX_CUT_CHARS = 1 << 30
# Tokens that end an answer wherever they are control tokens.
_ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|endoftext|> <|eom_id|> <end_of_turn> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> "
    "<|tool_response> <|flush|> <|calls|> </s> <｜end▁of▁sentence｜> [e~["
)


def tokenizer_files(keys: Mapping[str, GgufValue], where: str) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json (by file name) of a GGUF file's keys; `where` names
    the file in errors.

    Raises: CheckpointError for keys that are missing or contradict each other;
    UnsupportedModelError for a kind of tokenizer, or a way to split words, that is not known.
    """
    told = GgufKeys(keys, where)
    whole = keys.get("tokenizer.huggingface.json")
    kind = _kind(told)
    if whole is None and kind not in KINDS:
        raise told.unsupported(f"tokenizers of the kind {kind!r:.80} are not supported")
    vocabulary = GgufVocabulary(told, kind)
    adds = {
        name: told.flag(f"add_{name}_token", default=_adds(told, kind, name))
        for name in ("bos", "eos")
    }
    if kind == "gemma4":  # its files deny it, and the model is lost without
        adds["bos"] = True
    for name in adds:
        if name not in vocabulary.named:
            if keys.get(f"tokenizer.ggml.add_{name}_token"):
                raise told.error(f"it adds a token {name} to texts, but names none")
            adds[name] = False
    if whole is not None:
        tokenizer = _parsed(whole, told)
    else:
        build = _byte_level if kind == "gpt2" else _sentence_piece
        ends = {name: vocabulary.named[name] for name in adds if adds[name]}
        tokenizer = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": vocabulary.added,
            **build(told, vocabulary, kind),
            "post_processor": _post_processor(vocabulary, ends),
        }
    config = {
        f"{name}_token": vocabulary.tokens[token_id]
        for name, token_id in vocabulary.named.items()
        if name in ("bos", "eos", "unk", "pad") and token_id in vocabulary.special
    }
    return {
        TOKENIZER: tokenizer,
        CONFIG: {**config, "add_bos_token": adds["bos"], **_chat_templates(told)},
    }


def end_token_ids(keys: Mapping[str, GgufValue]) -> list[int]:
    """The tokens that end an answer, in order: those that a GGUF file names, and all control tokens
    with a text that means it. Raises: CheckpointError.
    """
    told = GgufKeys(keys, "the keys of the GGUF file")
    vocabulary = GgufVocabulary(told, _kind(told))
    found = {vocabulary.named[name] for name in ("eos", "eot", "eom") if name in vocabulary.named}
    ends = _ENDS.split()
    found |= {i for i in vocabulary.special if vocabulary.tokens[i] in ends}
    texts = {vocabulary.tokens[i]: i for i in found}
    # In harmony, the format of gpt-oss, and in Solar's, this one only ends a message.
    calls = texts.keys() & {"<|call|>", "<|calls|>"}
    if "<|end|>" in texts and calls and texts.keys() & {"<|return|>", "<|flush|>"}:
        found.discard(texts["<|end|>"])
    return sorted(found)


def _kind(told: GgufKeys) -> str:
    kind = told.text("model")
    by_split = kind == "gpt2" and told.text("pre", "") in _SPLITS_OF_GEMMA
    return "gemma4" if by_split else kind


def _adds(told: GgufKeys, kind: str, name: str) -> bool:
    """Whether a text gets the token `name` where the file does not say."""
    if name == "eos" or kind == "gemma4":
        return False
    split = WORD_SPLITS.get(told.text("pre", "default"))
    return kind == "llama" or (split is not None and split.adds_bos)


def _byte_level(told: GgufKeys, vocabulary: GgufVocabulary, kind: str) -> dict[str, Any]:
    split = _word_split(told)
    return {
        "normalizer": {"type": "NFC"} if split.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(split.steps)},
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "ignore_merges": split.ignores_merges,
            "vocab": vocabulary.ids,
            "merges": list(_listed_merges(told, vocabulary)),
        },
    }


def _word_split(told: GgufKeys) -> WordSplit:
    name = told.text("pre", "")
    if not name:
        logger.warning("the GGUF file does not say how its tokenizer splits words: ids may differ")
    split = WORD_SPLITS.get(name or "default")
    if split is None:
        raise told.unsupported(f"the tokenizer splits words in an unknown way, {name!r:.80}")
    return split


def _sentence_piece(told: GgufKeys, vocabulary: GgufVocabulary, kind: str) -> dict[str, Any]:
    find_merges = _listed_merges if kind == "gemma4" else _scored_merges
    unknown = vocabulary.named.get("unk")
    return {
        **(_spaces_of_gemma_4() if kind == "gemma4" else _spaces(told, vocabulary)),
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else vocabulary.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary.ids,
            "merges": list(find_merges(told, vocabulary)),
        },
    }


def _written(normalizer: Any, pre_tokenizer: Any, *last_steps: Mapping[str, Any]) -> dict[str, Any]:
    """What writes spaces as `SPACE`, and the decoder that reads them and ends with `last_steps`."""
    read = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    steps = [read, {"type": "ByteFallback"}, {"type": "Fuse"}, *last_steps]
    decoder = {"type": "Sequence", "decoders": steps}
    return {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder}


_WRITE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def _spaces_of_gemma_4() -> dict[str, Any]:
    pattern = {"Regex": r"[^\n]+|\n+"}  # no token has newlines and other letters
    lines = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return _written(_WRITE, lines)


def _spaces(told: GgufKeys, vocabulary: GgufVocabulary) -> dict[str, Any]:
    if not told.flag("add_space_prefix", default=True):
        return _written(_WRITE, None)
    no_first_space = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if all(vocabulary.ids.get(text) in vocabulary.special for text in ("[INST]", "[/INST]")):
        # Mistral, from its third tokenizer on: none is put behind special tokens.
        first = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first"}
        return _written(None, {**first, "split": False}, no_first_space)
    steps = [{"type": "Prepend", "prepend": SPACE}, _WRITE]
    return _written({"type": "Sequence", "normalizers": steps}, None, no_first_space)


def _listed_merges(told: GgufKeys, vocabulary: GgufVocabulary) -> Iterator[tuple[str, str]]:
    """The merges that a file lists. Raises: CheckpointError for one of no tokens."""
    ids = vocabulary.ids
    for merge in told.texts("merges"):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or left not in ids or right not in ids or left + right not in ids:
            raise told.error(f"merge {merge!r:.80} is of no tokens")
        yield left, right


def _scored_merges(told: GgufKeys, vocabulary: GgufVocabulary) -> Iterator[tuple[str, str]]:
    """All cuts of a token in two, the best tokens first, as transformers makes merges of scores.

    Added tokens have no merges, since they are found before, except for runs of spaces: a text has
    those only once it is normalized.
    """
    scores = told.numbers("scores", len(vocabulary.tokens))
    if not np.isfinite(scores).all():
        raise told.error("a score is not finite")
    tokens, types = vocabulary.tokens, vocabulary.types
    if sum(len(text) ** 2 for text in tokens) > MAX_CUT_CHARS:
        raise told.error("its tokens are too long")
    runs = [i for i, text in enumerate(tokens) if _is_run(text, types[i])]
    plain = [i for i, type_ in enumerate(types) if type_ in (NORMAL, UNDEFINED)]
    known = {tokens[i] for i in (*runs, *plain)}
    order = np.argsort(-scores[plain].astype(np.float64), kind="stable").tolist()
    ranked = groupby(order, key=lambda place: scores[plain[place]])
    yield from (cut for i in runs for cut in _cuts([tokens[i]], known))
    for _, places in ranked:
        yield from _cuts([tokens[plain[place]] for place in places], known)


def _is_run(text: str, type_: int) -> bool:
    return type_ == USER_DEFINED and text.strip(SPACE) == ""


def _cuts(texts: Sequence[str], known: set[str]) -> list[tuple[str, str]]:
    """The cuts of tokens of one score in known ones, those with the longest left part first."""
    found = [
        (text[:cut], text[cut:])
        for text in texts
        for cut in range(len(text) - 1, 0, -1)
        if text[:cut] in known and text[cut:] in known
    ]
    if len(texts) > 1:
        found.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
    return found


def _post_processor(vocabulary: GgufVocabulary, ends: Mapping[str, int]) -> dict[str, Any] | None:
    """What adds the tokens `ends` ("bos", "eos") to a text."""
    if not ends:
        return None

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        for name, token_id in ends.items():
            token = {"SpecialToken": {"id": vocabulary.tokens[token_id], "type_id": type_id}}
            parts.insert(0 if name == "bos" else len(parts), token)
        return parts

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            text: {"id": text, "ids": [token_id], "tokens": [text]}
            for token_id in ends.values()
            for text in [vocabulary.tokens[token_id]]
        },
    }


def _chat_templates(told: GgufKeys) -> dict[str, Any]:
    """The field `chat_template`, if there are any: a text, or a list where some have names."""
    key = "tokenizer.chat_template"
    found = {"default": told.all[key]} if key in told.all else {}
    found |= {
        name.removeprefix(f"{key}."): value
        for name, value in told.all.items()
        if name.startswith(f"{key}.")
    }
    listed = told.all.get(f"{key}s", [])
    for name in listed if isinstance(listed, list) else ():
        if name not in found:
            raise told.error(f"it lists chat template {name!r:.80}, which is missing")
    for name, template in found.items():
        if not isinstance(template, str):
            raise told.error(f"chat template {name!r:.80} is no text")
    if found.keys() <= {"default"}:
        return {"chat_template": found["default"]} if found else {}
    return {"chat_template": [{"name": name, "template": text} for name, text in found.items()]}


def _parsed(whole: GgufValue, told: GgufKeys) -> dict[str, Any]:
    """The tokenizer.json that a file holds as a text."""
    try:
        value = json.loads(whole) if isinstance(whole, str) else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise told.error("tokenizer.huggingface.json is no JSON object")
    return value
