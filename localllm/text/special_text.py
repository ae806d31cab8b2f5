"""Lets special-token text that a person typed reach the model as plain text.

A chat template writes `<|im_end|>` to end a turn; a user who writes the same ends nothing. Before
rendering, such text in the messages is replaced by placeholders. The special tokens in the rendered
prompt are then the template's own: they get private names, which a copy of the tokenizer knows
instead of the public ones, and the placeholders become the user's text again. So everything is
encoded in one piece, and only the template's tokens are special.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend

from localllm.errors import RequestError

# Code points that Unicode reserves for internal use by programs.
_PLACEHOLDER, _PRIVATE_NAME = "\ufdd0", "\ufdd1"


class SpecialText:
    """The special tokens of a vocabulary, as texts that may occur in messages."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        special = [t for t in backend.get_added_tokens_decoder().values() if t.special]
        self._texts = sorted((token.content for token in special), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        # Nobody can write a name that cannot be guessed.
        self._nonce = str(secrets.randbits(64))

    def occurs_in(self, value: Any) -> bool:
        """Whether a text anywhere in `value` (messages, tools) holds a special token's text."""
        if isinstance(value, str):
            return self._pattern.search(value) is not None
        if isinstance(value, Mapping):
            return any(self.occurs_in(part) for pair in value.items() for part in pair)
        return isinstance(value, Sequence) and any(self.occurs_in(part) for part in value)

    def protect(self, value: Any) -> Any:
        """A copy of `value` with placeholders for special-token text."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._placeholder(match.group()), value)
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(part) for key, part in value.items()}
        if isinstance(value, Sequence):
            return [self.protect(part) for part in value]
        return value

    def encode(self, rendered: str) -> list[int]:
        """Token ids of a prompt that was rendered from protected messages."""
        named = self._pattern.sub(lambda match: self._private_name(match.group()), rendered)
        restored = re.sub(
            f"{_PLACEHOLDER}{self._nonce}:([0-9]+){_PLACEHOLDER}",
            lambda match: self._texts[int(match.group(1))],
            named,
        )
        try:
            encoding = self._renamed_backend.encode(restored, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:  # lone surrogates
            raise RequestError("the prompt is not valid Unicode", param="prompt") from error
        return list(encoding.ids)

    def _placeholder(self, text: str) -> str:
        return f"{_PLACEHOLDER}{self._nonce}:{self._texts.index(text)}{_PLACEHOLDER}"

    def _private_name(self, text: str) -> str:
        return f"{_PRIVATE_NAME}{self._nonce}:{self._texts.index(text)}{_PRIVATE_NAME}"

    @cached_property
    def _renamed_backend(self) -> Backend:
        """The same vocabulary with private names for the special tokens."""
        state = json.loads(self._backend.to_str())
        rename_tokens(state, {text: self._private_name(text) for text in self._texts})
        try:
            return Backend.from_str(json.dumps(state))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # bare Exception, and panics of its Rust side
            raise RequestError(
                "text that looks like a special token cannot be kept as plain text with this "
                "tokenizer",
                where=f"{error!s:.200}",
                hint="leaving it out, or --parse-special",
            ) from error


def rename_tokens(state: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens in a `tokenizer.json`, in place: after that, only text with their new names
    becomes these tokens. `names` maps old names to new ones.
    """
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = state["model"]
    vocab = model["vocab"]
    is_unigram = isinstance(vocab, list)  # pieces with their scores, in the order of their ids
    if names.keys().isdisjoint((piece for piece, _ in vocab) if is_unigram else vocab):
        return
    if is_unigram:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    else:
        model["vocab"] = {names.get(piece, piece): i for piece, i in vocab.items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    # Merges that would build or use a renamed token are dropped.
    if "merges" in model:
        parts = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [
            list(pair)
            for pair in parts
            if "".join(pair) not in names and names.keys().isdisjoint(pair)
        ]
