"""Tokens as log-probabilities show them, in OpenAI's two forms.

Source: OpenAI's API reference, "The chat completion object" and "The completion object"; its
cookbook, "Using logprobs", for tokens that are part of a character.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.answer.completion import TokenInfo
from localllm.schedule.logprobs import TokenLogprobs
from localllm.text.tokenizer import StreamDecoder, Tokenizer

# JSON has no infinities; OpenAI's own servers send this number instead.
_LEAST = -9999.0


@dataclass(frozen=True, slots=True)
class Shown:
    """A token, where its text begins, and its log-probability if there is one."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


class TokenTexts:
    """Writes the log-probabilities of one model's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._spelled: dict[int, bytes] = {}

    def of_chat(self, tokens: Iterable[TokenInfo]) -> dict[str, Any]:
        """As chats have them."""
        return {"content": [self._described(each) for each in tokens]}

    def of_text(self, tokens: Sequence[Shown]) -> dict[str, Any]:
        """As completions have them: the first token of a prompt has none."""
        return {
            "tokens": [self._named(each.token_id) for each in tokens],
            "token_logprobs": [_logprob(each.logprobs) for each in tokens],
            "top_logprobs": [self._top(each) for each in tokens],
            "text_offset": [each.offset for each in tokens],
        }

    def of_prompt(
        self, token_ids: Sequence[int], text: str, scores: Sequence[TokenLogprobs | None]
    ) -> list[Shown]:
        """The tokens of a prompt, whose text is `text`."""
        tokenizer = self._tokenizer
        decoder, place, found = StreamDecoder(tokenizer, tokenizer.special_text), 0, list[Shown]()
        for token_id, logprobs in zip(token_ids, scores, strict=True):
            found.append(Shown(token_id, place, logprobs))
            piece = decoder.push(token_id)
            # The start token that a text gets is not in it.
            if not tokenizer.is_special(token_id) or text.startswith(piece, place):
                place += len(piece)
        return found

    def _spell(self, token_id: int) -> bytes:
        if token_id not in self._spelled:
            self._spelled[token_id] = self._tokenizer.spell(token_id)
        return self._spelled[token_id]

    def _named(self, token_id: int) -> str:
        """A token in completions, where a text has no bytes beside it."""
        spelled = self._spell(token_id)
        text = _as_text(spelled)
        return f"bytes:{_escaped(spelled)}" if text is None else text

    def _top(self, token: Shown) -> dict[str, float] | None:
        if token.logprobs is None:
            return None
        found: dict[str, float] = {}
        own = (token.token_id, token.logprobs.logprob)
        for token_id, logprob in (*token.logprobs.top, own):
            # Of two with the same text, the likelier.
            found.setdefault(self._named(token_id), max(_LEAST, logprob))
        return found

    def _described(self, token: TokenInfo) -> dict[str, Any]:
        top = token.logprobs.top if token.logprobs is not None else ()
        likeliest = [self._one(token_id, max(_LEAST, logprob)) for token_id, logprob in top]
        own = _logprob(token.logprobs)
        return {
            **self._one(token.token_id, _LEAST if own is None else own),
            "top_logprobs": likeliest,
        }

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = self._spell(token_id)
        text = _as_text(spelled)
        shown = _escaped(spelled) if text is None else text
        return {"token": shown, "logprob": logprob, "bytes": list(spelled)}


class TextOffsets:
    """Where the texts of an answer's tokens begin."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], start: int) -> None:
        """`context`: the last tokens of the prompt; `start`: the characters before the answer."""
        self._decoder, self._place = StreamDecoder(tokenizer, context=context), start

    def place(self, tokens: Iterable[TokenInfo]) -> list[Shown]:
        """The next tokens of the answer."""
        found = list[Shown]()
        for token in tokens:
            found.append(Shown(token.token_id, self._place, token.logprobs))
            self._place += len(self._decoder.push(token.token_id))
        return found


def _logprob(logprobs: TokenLogprobs | None) -> float | None:
    return None if logprobs is None else max(_LEAST, logprobs.logprob)


def _as_text(spelled: bytes) -> str | None:
    """None for part of a character."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return None


def _escaped(spelled: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in spelled)
