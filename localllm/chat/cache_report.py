"""Why a prompt was or was not found in the cache: `/why`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from localllm.text.message_places import Decode, message_at
from localllm.text.prompt import ChatMessage

# Characters shown around the first difference.
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where a prompt first differs from what was computed before it.

    `message` counts from 1, None if the template itself differs; `before` and `now`: the old and
    the new text at that place.
    """

    token: int
    message: int | None
    role: str
    before: str
    now: str


@dataclass(frozen=True, slots=True)
class CacheKind:
    """What a model's cache holds. `keeps_states`: prompts go on from kept states, not from any
    token; `elsewhere`: see Answerer.cached_elsewhere.
    """

    keeps_states: bool = False
    elsewhere: str = ""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """How many tokens of a prompt were cached, and why not more.

    Its first `num_shared` tokens are those of the request before it, which had `num_earlier`, 0
    without one; `difference` is None if one of the two continues the other.
    """

    num_prompt: int
    num_cached: int
    num_shared: int
    num_earlier: int
    difference: FirstDifference | None
    kind: CacheKind = CacheKind()

    @property
    def num_lost(self) -> int:
        """Tokens that had to be computed again because something before them differed."""
        if self.difference is None:
            return 0
        return max(
            0, min(self.num_prompt, self.num_earlier) - max(self.num_shared, self.num_cached)
        )


def report_cache(
    decode: Decode,
    earlier: Sequence[int],
    prompt: Sequence[int],
    messages: Sequence[ChatMessage],
    num_cached: int,
    kind: CacheKind,
) -> CacheReport:
    """Compare a prompt, written from `messages`, with the tokens of the request before it."""
    shared, difference = find_difference(decode, earlier, prompt, messages)
    return CacheReport(len(prompt), num_cached, shared, len(earlier), difference, kind)


def find_difference(
    decode: Decode, earlier: Sequence[int], prompt: Sequence[int], messages: Sequence[ChatMessage]
) -> tuple[int, FirstDifference | None]:
    """How many tokens a prompt shares with an earlier one, and where it differs, if it does."""
    shared = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(earlier, prompt, strict=False))
    )
    if shared in (len(earlier), len(prompt)):  # it continues the earlier one, or is its beginning
        return shared, None
    index = message_at(decode, prompt, messages, shared)
    return shared, FirstDifference(
        token=shared,
        message=None if index is None else index + 1,
        role="" if index is None else str(messages[index]["role"]),
        before=_excerpt(decode, earlier, shared),
        now=_excerpt(decode, prompt, shared),
    )


def _excerpt(decode: Decode, token_ids: Sequence[int], token: int) -> str:
    text = decode(token_ids[token : token + _SHOWN])
    return " ".join(text.split())[:_SHOWN]
