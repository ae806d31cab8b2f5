"""Checks that the cost of decoding an untrusted vocabulary is small, and linear in the tokens.

Tokens are decoded one by one in the process that computes, where no deadline guards the work.
Encoding may cost anything: a separate process does that.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from localllm.errors import CheckpointError, brief
from localllm.text.added_tokens import MAX_TOKEN_CHARS

# How many times as long the decoder's steps together may make a text; replacing a mark with a space
# does not lengthen it.
MAX_GROWTH = 8
MAX_DECODERS = 32
_HARMLESS = ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "WordPiece", "BPEDecoder")
_HINT = "report it to the model's publisher"


def check_decoding(state: Mapping[str, Any], path: Path) -> None:
    """Check `state`, the contents of `tokenizer.json` at `path`. Raises: CheckpointError."""
    growth, num_decoders = 1.0, 0
    for decoder in _flat(state.get("decoder"), depth=0):
        num_decoders += 1
        kind = decoder.get("type")
        if kind == "Replace":
            growth *= _growth(decoder, path)
        elif kind == "Strip":
            _check_strip(decoder, path)
        elif kind not in (*_HARMLESS, "CTC"):
            raise _refused(f"its decoder {kind!r:.60} is unknown", path)
    if growth > MAX_GROWTH or num_decoders > MAX_DECODERS:
        raise _refused(f"its decoder makes a text over {MAX_GROWTH} times as long", path)
    longest = max(map(len, _tokens(state)), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise _refused(f"a token has {longest:,} characters, over {MAX_TOKEN_CHARS:,}", path)


def _growth(replace: Mapping[str, Any], path: Path) -> float:
    """How many times as long a replacement can make a text, at most."""
    pattern, content = replace.get("pattern"), replace.get("content")
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    if not isinstance(text, str) or not isinstance(content, str) or not text:
        raise _refused("its decoder replaces something that is not plain text", path)
    return max(1.0, len(content) / len(text))


def _check_strip(strip: Mapping[str, Any], path: Path) -> None:
    for name in ("start", "stop"):
        count = strip.get(name, 0)
        if type(count) is not int or not 0 <= count <= MAX_TOKEN_CHARS:
            raise _refused(f"its decoder strips {brief(count)} characters", path)


def _flat(decoder: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """The decoders of a sequence, including those of nested sequences."""
    if not isinstance(decoder, Mapping) or depth > MAX_DECODERS:
        return
    parts = decoder.get("decoders")
    if decoder.get("type") == "Sequence" and isinstance(parts, list):
        for part in parts:
            yield from _flat(part, depth + 1)
    else:
        yield decoder


def _tokens(state: Mapping[str, Any]) -> Iterator[str]:
    model = state.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    for entry in vocab if isinstance(vocab, (dict, list)) else ():
        text = entry[0] if isinstance(entry, list) and entry else entry
        if isinstance(text, str):
            yield text
    added = state.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, Mapping) and isinstance(token.get("content"), str):
            yield token["content"]


def _refused(what: str, path: Path) -> CheckpointError:
    return CheckpointError(f"tokenizer.json cannot be used: {what}", where=str(path), hint=_HINT)
