"""The tokens of a GGUF file by id, with their kinds and roles, and the keys that tell them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from localllm.errors import CheckpointError, UnsupportedModelError, brief
from localllm.files.gguf import GgufValue

# Values of `tokenizer.ggml.token_type`.
UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)
SPACE = "\u2581"  # as which SentencePiece writes a space
_TAG = re.compile(r"<.+>|\[.+\]", re.DOTALL)
# Special tokens of Gemma 4 that its files call ordinary ones, so that llama.cpp prints them.
_PRINTED = frozenset(
    {
        *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"),
        *("<tool_response|>", '<|"|>'),
    }
)


class GgufKeys:
    """The keys below `tokenizer.ggml`, each checked for what it must be."""

    def __init__(self, keys: Mapping[str, GgufValue], where: str) -> None:
        self.all, self._where = keys, where

    def text(self, name: str, default: str | None = None) -> str:
        """A text. Raises: CheckpointError, as do all below."""
        value = self.all.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, str):
            raise self.error(f"tokenizer.ggml.{name} must be a text, and is {brief(value)}")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of texts."""
        value = self.all.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list):
            raise self.error(f"tokenizer.ggml.{name} must be a list of texts")
        return value

    def numbers(self, name: str, count: int) -> np.ndarray[Any, Any]:
        """One number for each of `count` tokens."""
        value = self.all.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, memoryview) or value.format == "?":
            raise self.error(f"tokenizer.ggml.{name} must be a list of numbers")
        if len(value) != count:
            raise self.error(f"tokenizer.ggml.{name} has {len(value):,} values, {count:,} tokens")
        return np.asarray(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """A flag, `default` if there is no key."""
        value = self.all.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise self.error(f"tokenizer.ggml.{name} must be true or false, not {brief(value)}")
        return value

    def token_id(self, name: str, count: int) -> int | None:
        """The id that a key says, below `count`; None if there is no key."""
        value = self.all.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value < count):
            raise self.error(
                f"tokenizer.ggml.{name}_token_id is {brief(value)}, of {count:,} tokens"
            )
        return value

    def error(self, problem: str) -> CheckpointError:
        """The error to raise for keys that are missing or contradict each other."""
        return CheckpointError(
            f"broken tokenizer of a GGUF file: {problem}",
            where=self._where,
            hint="download the file again",
        )

    def unsupported(self, problem: str) -> UnsupportedModelError:
        """The error to raise for what is sound, but not known here."""
        return UnsupportedModelError(
            problem,
            where=self._where,
            hint="the model's own checkpoint in place of the GGUF file",
        )


# The keys of ids by the names of tokens, and the ids of SentencePiece that need no key.
_ID_KEYS = {
    **{"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"},
    **{"eot": "eot", "eom": "eom"},
}
_SENTENCE_PIECE_IDS = {"bos": 1, "eos": 2, "unk": 0}


class GgufVocabulary:
    """The tokens by id with their types, which of them are special, and the ids by text and by role
    ("bos", "eos", "unk", "pad", "eot", "eom").

    Raises: CheckpointError for keys that are missing or contradict each other.
    """

    def __init__(self, told: GgufKeys, kind: str) -> None:
        texts = told.texts("tokens")
        count = len(texts)
        self.tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
        self.types = [NORMAL] * count
        if "tokenizer.ggml.token_type" in told.all:
            self.types = told.numbers("token_type", count).tolist()
        if not set(self.types) <= set(range(UNDEFINED, BYTE + 1)):
            raise told.error("tokenizer.ggml.token_type has a value that is no type")
        if kind in ("llama", "gemma4"):
            self._write_spaces()
        self.ids = {text: i for i, text in enumerate(self.tokens)}
        if len(self.ids) < count:
            twice = next(text for i, text in enumerate(self.tokens) if self.ids[text] != i)
            raise told.error(f"token {twice!r:.80} is there twice")
        defaults = _SENTENCE_PIECE_IDS if kind == "llama" else {}
        named = {name: told.token_id(key, count) for name, key in _ID_KEYS.items()}
        for name, token_id in defaults.items():
            if named[name] is None and token_id < count:
                named[name] = token_id
        self.named = {name: i for name, i in named.items() if i is not None}
        self.special = frozenset(self._special(kind))

    def _write_spaces(self) -> None:
        """Runs of spaces as the model wrote them; converters spell out those that were added."""
        known = set(self.tokens)
        for i, text in enumerate(self.tokens):
            if self.types[i] == USER_DEFINED and text.strip(" ") == "":
                written = SPACE * len(text)
                if written not in known:
                    self.tokens[i] = written

    def _special(self, kind: str) -> Iterator[int]:
        roles = set(self.named.values())
        for i, (text, type_) in enumerate(zip(self.tokens, self.types, strict=True)):
            # A role does not make a plain word special: wrong files give one to "!".
            in_role = i in roles and (type_ != NORMAL or _TAG.fullmatch(text))
            if type_ in (CONTROL, UNKNOWN) or in_role or (kind == "gemma4" and text in _PRINTED):
                yield i

    @property
    def added(self) -> list[dict[str, Any]]:
        """The tokens that are found in a text before it is split."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": i, "content": self.tokens[i], **flags, "special": i in self.special}
            for i, type_ in enumerate(self.types)
            if type_ == USER_DEFINED or i in self.special
        ]
