"""Why a prompt was or was not found in the cache: `/why`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from localllm.text.prompt import ChatMessage
from localllm.text.tokenizer import Tokenizer

# Characters shown around the first difference.
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where a prompt leaves what was computed before it.

    `message` counts from 1, None where the template itself differs; `before` and `now`: what stood
    and stands there.
    """

    token: int
    message: int | None
    role: str
    before: str
    now: str


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Tokens of a prompt by what became of them.

    `num_shared` of its first tokens are those of the request before it, of `num_earlier` tokens;
    `difference` is None where it goes on from all of them.
    """

    num_prompt: int
    num_cached: int
    num_shared: int
    num_earlier: int
    difference: FirstDifference | None

    @property
    def num_lost(self) -> int:
        """Tokens that had been computed, and had to be again because something before them
        differed.
        """
        if self.difference is None:
            return 0
        return max(
            0, min(self.num_prompt, self.num_earlier) - max(self.num_shared, self.num_cached)
        )


def report_cache(
    tokenizer: Tokenizer,
    earlier: Sequence[int],
    prompt: Sequence[int],
    messages: Sequence[ChatMessage],
    num_cached: int,
) -> CacheReport:
    """Compare a prompt, made of `messages`, with the tokens of the request before it."""
    shared = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(earlier, prompt, strict=False))
    )
    difference = None
    if shared < len(earlier):
        index = _message_at(tokenizer, prompt, messages, shared)
        difference = FirstDifference(
            token=shared,
            message=None if index is None else index + 1,
            role="" if index is None else str(messages[index]["role"]),
            before=_excerpt(tokenizer, earlier, shared),
            now=_excerpt(tokenizer, prompt, shared),
        )
    return CacheReport(len(prompt), num_cached, shared, len(earlier), difference)


def _message_at(
    tokenizer: Tokenizer, prompt: Sequence[int], messages: Sequence[ChatMessage], token: int
) -> int | None:
    """The message whose text token number `token` is in, or is the first behind the token."""
    place = len(tokenizer.decode(prompt[:token]))
    text, end = tokenizer.decode(prompt), 0
    for index, message in enumerate(messages):
        content = str(message.get("content") or "").strip()
        found = text.find(content, end)
        if found < 0:
            continue
        end = found + len(content)
        if place < end:
            return index
    return None


def _excerpt(tokenizer: Tokenizer, token_ids: Sequence[int], token: int) -> str:
    text = tokenizer.decode(token_ids[token : token + _SHOWN])
    return " ".join(text.split())[:_SHOWN]
