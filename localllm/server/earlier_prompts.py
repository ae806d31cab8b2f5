"""Remembers the prompts of the newest conversations, to tell why the next one of a conversation was
not cached: where it first differs from the one before it.

Clients send whole conversations, and say rarely which one a prompt continues. It is the one that
shares most messages with it.
"""

import hashlib
import json
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from localllm.chat.cache_report import FirstDifference, find_difference
from localllm.text.message_places import Decode
from localllm.text.prompt import ChatMessage

# Bytes of token ids that are remembered, over all conversations.
_MOST_BYTES = 64 << 20
# Prompts that are looked through for the nearest.
_MOST_PROMPTS = 256
Part = Literal["system", "tools", "messages"]


@dataclass(frozen=True, slots=True)
class Digest:
    """A conversation by hashes: its tools, its system messages, and its other messages."""

    tools: bytes
    system: bytes
    messages: tuple[bytes, ...]

    @classmethod
    def of(cls, messages: Sequence[ChatMessage], tools: object) -> "Digest":
        """The digest of a conversation and the tools that it has."""
        system = [each for each in messages if each["role"] == "system"]
        others = [each for each in messages if each["role"] != "system"]
        return cls(_hash(tools), _hash(system), tuple(_hash(each) for each in others))

    def changed_since(self, earlier: "Digest") -> Part | None:
        """The first part that is not as it was; None if there are only new messages."""
        if self.tools != earlier.tools:
            return "tools"
        if self.system != earlier.system:
            return "system"
        is_longer = self.messages[: len(earlier.messages)] == earlier.messages
        return None if is_longer else "messages"


def _hash(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).digest()


@dataclass(frozen=True, slots=True)
class Compared:
    """A prompt beside the one before it in its conversation, which had `num_earlier` tokens and
    shares the first `num_shared`; `part`: what changed first.
    """

    num_prompt: int
    num_earlier: int
    num_shared: int
    part: Part | None
    difference: FirstDifference | None

    def num_lost(self, num_cached: int) -> int:
        """Tokens that were computed again, as `CacheReport.num_lost`."""
        if self.difference is None:
            return 0
        shorter = min(self.num_prompt, self.num_earlier)
        return max(0, shorter - max(self.num_shared, num_cached))

    def as_json(self, num_cached: int) -> dict[str, Any]:
        """For clients; empty if nothing differs."""
        found = self.difference
        if found is None:
            return {}
        return {
            "first_difference": {
                "token": found.token,
                "message": found.message,
                "role": found.role,
                "before": found.before,
                "now": found.now,
            },
            "tokens_computed_again": self.num_lost(num_cached),
        }


@dataclass(frozen=True, slots=True)
class _Earlier:
    digest: Digest
    token_ids: "array[int]"


class EarlierPrompts:
    """The prompts by the names of their answers, the newest last; each belongs to the key that it
    came with, its `owner`. Not safe for several threads.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._num_bytes: Counter[bytes] = Counter()
        self._found: OrderedDict[tuple[bytes, str], _Earlier] = OrderedDict()

    def remember(self, owner: bytes, name: str, digest: Digest, token_ids: Sequence[int]) -> None:
        """Remember a prompt with its answer."""
        earlier = _Earlier(digest, array("i", token_ids))
        self._found[owner, name] = earlier
        self._num_bytes[owner] += _size(earlier)
        while self._num_bytes.total() > self._most_bytes:
            self._forget_one(self._num_bytes)
        while len(self._found) > _MOST_PROMPTS:
            self._forget_one(Counter(whose for whose, _ in self._found))

    def _forget_one(self, shares: "Counter[bytes]") -> None:
        """Forget the oldest prompt of whoever has most, which leaves those of others alone."""
        [(largest, _)] = shares.most_common(1)
        oldest = next(place for place in self._found if place[0] == largest)
        self._num_bytes[largest] -= _size(self._found.pop(oldest))

    def find(self, owner: bytes, name: str) -> _Earlier | None:
        """The prompt of an answer."""
        return self._found.get((owner, name))

    def nearest(self, owner: bytes, digest: Digest) -> _Earlier | None:
        """The newest prompt that shares most messages with this one, of those one with the same
        system prompt and tools; None if none shares any.
        """
        best, most = None, (0, False)
        known = set(digest.messages)
        for (whose, _), each in reversed(self._found.items()):
            count = len(known.intersection(each.digest.messages)) if whose == owner else 0
            is_alike = (each.digest.system, each.digest.tools) == (digest.system, digest.tools)
            if count and (count, is_alike) > most:
                best, most = each, (count, is_alike)
        return best


def _size(earlier: _Earlier) -> int:
    return 4 * len(earlier.token_ids) + 32 * (2 + len(earlier.digest.messages))


def compare(
    earlier: _Earlier,
    digest: Digest,
    decode: Decode,
    prompt: Sequence[int],
    messages: Sequence[ChatMessage],
) -> Compared:
    """Compare a prompt, written from `messages`, with an earlier one."""
    ids = earlier.token_ids
    shared, difference = find_difference(decode, ids, prompt, messages)
    part = digest.changed_since(earlier.digest)
    return Compared(len(prompt), len(ids), shared, part, difference)
