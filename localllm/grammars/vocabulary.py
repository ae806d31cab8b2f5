"""A model's vocabulary for llguidance: it spells any text exactly, and spells only text.

llguidance tokenizes forced text as the model's own tokenizer does, which finds special tokens in a
text: `{"const": "a<|im_end|>b"}` would end the answer after its `a`. So llguidance gets a tokenizer
in which special tokens have names that nobody can write. Only our own grammars name tokens, by id.
"""

import json
import re
import secrets
from collections.abc import Collection
from typing import Any

from llguidance import LLTokenizer

from localllm.text.special_text import rename_tokens

_PRIVATE = "\ufdd1"  # reserved by Unicode for internal use by programs
_HIDDEN = {"single_word": False, "normalized": False, "special": True}


def spelling_vocabulary(tokenizer_json: str, end_ids: Collection[int], num_ids: int) -> str:
    """A `tokenizer.json` that turns any text into ordinary tokens, without changing the text.

    It hides special tokens, tags, and the model's end tokens, whatever their texts; the id of an
    end token may be one past the last. Tokens from `num_ids` on, which the model does not have, are
    left out.
    """
    state = json.loads(tokenizer_json)
    added = {each["id"]: each for each in state["added_tokens"]}
    hidden = {i for i, each in added.items() if each["special"] or _is_no_text(each["content"])}
    hidden |= set(end_ids) | {i for i in added if i >= num_ids}
    vocab = state["model"]["vocab"]
    names = (
        enumerate(piece for piece, _ in vocab)
        if isinstance(vocab, list)
        else ((i, piece) for piece, i in vocab.items())
    )
    texts = {i: piece for i, piece in names if i in hidden or i >= num_ids}
    hidden |= texts.keys()
    texts |= {i: added[i]["content"] for i in hidden & added.keys()}
    nonce = secrets.randbits(64)
    private = {i: f"{_PRIVATE}{nonce}:{i}{_PRIVATE}" for i in sorted(hidden)}
    rename_tokens(state, {text: private[i] for i, text in texts.items()})
    added = {each["id"]: each for each in state["added_tokens"]}
    for i, name in private.items():
        added[i] = {"id": i, "content": name, **_HIDDEN}
    # No token takes the spaces around it.
    taking = {"lstrip": False, "rstrip": False}
    state["added_tokens"] = [{**added[i], **taking} for i in sorted(added) if i < num_ids]
    state["model"]["vocab"] = _within(num_ids, state["model"]["vocab"])
    state["normalizer"] = _without_changes(state["normalizer"])
    state["pre_tokenizer"] = _without_prefix(state["pre_tokenizer"])
    return json.dumps(state)


def single_token(tokens: LLTokenizer, char: str) -> int | None:
    """The token of a single character; None if the character takes several."""
    ids = tokens.tokenize_bytes(char.encode())
    return ids[0] if len(ids) == 1 else None


def _within(num_ids: int, vocab: Any) -> Any:
    """The part of a vocabulary whose ids are below `num_ids`; none of the rest is in a merge."""
    if isinstance(vocab, list):
        return vocab[:num_ids]
    return {piece: i for piece, i in vocab.items() if i < num_ids}


def _is_no_text(content: str) -> bool:
    """Whether a token is not text to llguidance: a tag, or letters outside of ASCII, which it reads
    as bytes if the tokenizer writes bytes as letters.
    """
    return re.fullmatch("<.*>", content) is not None or not content.isascii()


def _without_changes(normalizer: Any) -> Any:
    """The part of a normalizer that is kept: how a space is written."""
    match normalizer:
        case {"type": "Sequence", "normalizers": list(parts)}:
            kept = [part for each in parts if (part := _without_changes(each)) is not None]
            return {**normalizer, "normalizers": kept} if kept else None
        case {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": " "}}:
            return normalizer
        case _:
            return None


def _without_prefix(pre_tokenizer: Any) -> Any:
    """A pre-tokenizer that puts no space in front."""
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": list(parts)}:
            return {**pre_tokenizer, "pretokenizers": [_without_prefix(each) for each in parts]}
        case {"add_prefix_space": True}:
            return {**pre_tokenizer, "add_prefix_space": False}
        case _:
            return pre_tokenizer
