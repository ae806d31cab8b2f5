"""Drafts from text that has been seen: what followed the newest tokens the last time they stood.

Prompt lookup (Saxena 2023) over a request's own tokens, and over those of requests that ended not
long ago: earlier turns, and phrases that come again. It costs no arithmetic, so it is worth trying
wherever text repeats itself: edits, quotations, code.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.engine.request import Request
from localllm.engine.scheduler import ScheduledBatch
from localllm.engine.suffix_index import END_OF_TEXT, SuffixIndex

if TYPE_CHECKING:
    from torch import Tensor

# Tokens of ended requests that are remembered, at least; at most twice as many.
PHRASE_TOKENS = 1 << 16
# Prompts whose indices are kept, for the next turn and for others that begin like them.
_KEPT_PROMPTS = 4
# Tokens that are indexed beside each step, besides as many as it computes.
_WORK_TOKENS = 256
# New tokens that a look at a request may take into its index.
_LONGEST_LAG = 64


NOT_KNOWN = -1


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may come next; the more of the text before them has matched, the likelier.

    `match_length`: so many tokens in front of the first one. Tokens that are still to be found have
    the id NOT_KNOWN (see Drafter.complete).
    """

    token_ids: list[int]
    match_length: int


class NgramDrafter:
    """The suffix index of each running request, and one of what ended requests have said."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min, self._max = min_match, max_match
        # None until it is begun; and the requests whose text is not indexed up to its end.
        self._indices: dict[Request, SuffixIndex | None] = {}
        self._behind: dict[Request, None] = {}
        # What is remembered of ended requests, for each salt.
        self._prompts: defaultdict[bytes, deque[SuffixIndex]] = defaultdict(
            lambda: deque(maxlen=_KEPT_PROMPTS)
        )
        self._phrases: defaultdict[bytes, _Phrases] = defaultdict(
            lambda: _Phrases(min_match, max_match)
        )

    @property
    def is_warm(self) -> bool:
        """See Drafter."""
        return True

    def work_ahead(self) -> bool:
        """See Drafter."""
        return False

    def renewed(self) -> "NgramDrafter":
        """See Drafter."""
        return NgramDrafter(self._min, self._max)

    def add(self, request: Request) -> None:
        """See Drafter."""
        self._indices[request] = self._behind[request] = None

    @property
    def has_work(self) -> bool:
        """See Drafter."""
        return bool(self._behind) or any(each.num_missing for each in self._phrases.values())

    def work(self, batch: ScheduledBatch) -> None:
        """See Drafter: takes tokens of the requests, and of what was said, into the indices."""
        num_tokens = _WORK_TOKENS + sum(entry.num_scheduled_tokens for entry in batch.requests)
        for request in list(self._behind):
            if num_tokens <= 0:
                return
            num_tokens -= self._index(request, num_tokens)
        for phrases in self._phrases.values():
            num_tokens -= phrases.work(num_tokens)

    def propose(self, request: Request, count: int) -> Proposal | None:
        """Up to `count` tokens behind those of `request`, whose ids must all be here; None where
        nothing matches, or is not indexed yet.
        """
        index = self._indices.get(request)
        if index is None or request in self._behind:
            return None
        missing = request.token_ids[len(index) :]
        if len(missing) > _LONGEST_LAG:
            self._behind[request] = None  # nobody has asked for long
            return None
        index.extend(missing)
        own = index.match
        phrases = self._phrases.get(request.salt)
        if own.length < self._max and phrases is not None and len(phrases):
            said = phrases.propose(request.token_ids[-self._max :], count)
            if said is not None and said.match_length > own.length:
                return said
        if own.length == 0:
            return None
        return Proposal(index.repetition(count), own.length)

    def complete(self, batch: ScheduledBatch) -> None:
        """See Drafter: proposals come with their tokens."""

    @property
    def taps(self) -> Sequence[int]:
        """See Drafter: it sees ids only."""
        return ()

    def see(self, batch: ScheduledBatch, hidden: "Sequence[Tensor]") -> None:
        """See Drafter."""

    def forget(self, request: Request) -> None:
        """See Drafter."""
        self._behind.pop(request, None)
        if self._indices.pop(request, None) is not None:
            # What the cache held was said by a request before this one.
            self._phrases[request.salt].add(request.token_ids[request.num_cached_tokens :])

    def _begin(self, request: Request) -> SuffixIndex:
        """The index of the longest text that is kept and that the request's tokens begin with."""
        prompts = self._prompts[request.salt]
        kept = [index for index in prompts if index.begins(request.token_ids)]
        if kept:
            return max(kept, key=len).copy()
        return SuffixIndex(self._min, self._max)

    def _index(self, request: Request, num_tokens: int) -> int:
        """Take up to `num_tokens` into a request's index; how many it were."""
        index = self._indices[request]
        if index is None:
            index = self._indices[request] = self._begin(request)
        begin, prompt = len(index), request.num_prompt_tokens
        end = min(len(request.token_ids), begin + num_tokens)
        if begin < prompt <= end:
            index.extend(request.token_ids[begin:prompt])
            self._prompts[request.salt].append(index.copy())
        index.extend(request.token_ids[len(index) : end])
        if end == len(request.token_ids):
            del self._behind[request]
        return end - begin


class _Phrases:
    """Texts in two indices; when the younger is full, the older is dropped."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self._limits = (min_match, max_match)
        self._older, self._younger = SuffixIndex(*self._limits), SuffixIndex(*self._limits)
        self._missing: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._older) + len(self._younger)

    @property
    def num_missing(self) -> int:
        """Tokens that are not indexed yet."""
        return len(self._missing)

    def add(self, token_ids: Sequence[int]) -> None:
        self._missing.extend(token_ids[-PHRASE_TOKENS:])
        self._missing.append(END_OF_TEXT)

    def work(self, num_tokens: int) -> int:
        """Index up to so many; how many it were."""
        num_new = min(len(self._missing), num_tokens)
        self._younger.extend([self._missing.popleft() for _ in range(num_new)])
        if len(self._younger) >= PHRASE_TOKENS:
            self._older, self._younger = self._younger, SuffixIndex(*self._limits)
        return num_new

    def propose(self, newest: Sequence[int], count: int) -> Proposal | None:
        found = None
        for index in (self._younger, self._older):
            match = index.find(newest)
            if match.length > (found.match_length if found else 0):
                found = Proposal(index.continuation(match.end, count), match.length)
        return found if found and found.token_ids else None
