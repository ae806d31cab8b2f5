"""Drafts from earlier text: the tokens that followed the last occurrence of the newest tokens.

This is prompt lookup (Saxena 2023) over a request's own tokens, and over the answers of recently
ended requests: recurring phrases. Their prompts are not remembered: what a model copies lies in its
own context. It needs no model, so it is worth trying wherever text repeats itself: edits,
quotations, code.
"""

from collections import defaultdict, deque
from collections.abc import Sequence

from localllm.drafting.drafter import Drafter, Proposal
from localllm.drafting.suffix_index import END_OF_TEXT, SuffixIndex
from localllm.schedule.request import Request
from localllm.schedule.scheduler import ScheduledBatch

# At least this many tokens of earlier answers are remembered, and at most twice as many.
PHRASE_TOKENS = 1 << 16
# Prompts whose indices are kept, for the next turn and for requests with the same beginning.
_KEPT_PROMPTS = 4
# Each step, as many tokens are indexed as it computes, and this many more.
_WORK_TOKENS = 256
# The most new tokens that `propose` indexes itself.
_LONGEST_LAG = 64


class NgramDrafter(Drafter):
    """Drafts from the suffix index of each running request, and one over earlier answers."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min, self._max = min_match, max_match
        # The index of each request, None until it is begun; and the requests whose text is not
        # fully indexed.
        self._indices: dict[Request, SuffixIndex | None] = {}
        self._behind: dict[Request, None] = {}
        # Indices of prompts, and of earlier answers, for each salt.
        self._prompts: defaultdict[bytes, deque[SuffixIndex]] = defaultdict(
            lambda: deque(maxlen=_KEPT_PROMPTS)
        )
        self._phrases: defaultdict[bytes, _Phrases] = defaultdict(
            lambda: _Phrases(min_match, max_match)
        )

    @property
    def is_cheap(self) -> bool:
        return True

    def renewed(self) -> "NgramDrafter":
        return NgramDrafter(self._min, self._max)

    def add(self, request: Request) -> None:
        self._indices[request] = self._behind[request] = None

    @property
    def has_work(self) -> bool:
        return bool(self._behind) or any(each.num_missing for each in self._phrases.values())

    def work(self, batch: ScheduledBatch) -> None:
        """See Drafter: indexes tokens of running requests and of earlier answers."""
        num_tokens = _WORK_TOKENS + sum(entry.num_scheduled_tokens for entry in batch.requests)
        for request in list(self._behind):
            if num_tokens <= 0:
                return
            num_tokens -= self._index(request, num_tokens)
        for phrases in self._phrases.values():
            num_tokens -= phrases.work(num_tokens)

    def propose(self, request: Request, count: int) -> Proposal | None:
        """Up to `count` tokens to follow those of `request`, whose ids must all be on the host;
        None if nothing matches, or the text is not indexed yet.
        """
        index = self._indices.get(request)
        if index is None or request in self._behind:
            return None
        missing = request.token_ids[len(index) :]
        if len(missing) > _LONGEST_LAG:
            self._behind[request] = None  # the last call was long ago
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

    def forget(self, request: Request) -> None:
        self._behind.pop(request, None)
        if self._indices.pop(request, None) is not None:
            self._phrases[request.salt].add(request.token_ids[request.num_prompt_tokens :])

    def _begin(self, request: Request) -> SuffixIndex:
        """A copy of the index of the longest kept prompt that the request begins with, or a new
        index.
        """
        prompts = self._prompts[request.salt]
        kept = [index for index in prompts if index.begins(request.token_ids)]
        if kept:
            return max(kept, key=len).copy()
        return SuffixIndex(self._min, self._max)

    def _index(self, request: Request, num_tokens: int) -> int:
        """Add up to `num_tokens` tokens to a request's index; returns how many were added."""
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
    """Earlier answers in two indices; when the younger is full, the older is dropped."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self._limits = (min_match, max_match)
        self._older, self._younger = SuffixIndex(*self._limits), SuffixIndex(*self._limits)
        self._missing = list[int]()

    def __len__(self) -> int:
        return len(self._older) + len(self._younger)

    @property
    def num_missing(self) -> int:
        """The number of tokens that are not indexed yet."""
        return len(self._missing)

    def add(self, token_ids: Sequence[int]) -> None:
        self._missing.extend(token_ids[-PHRASE_TOKENS:])
        self._missing.append(END_OF_TEXT)

    def work(self, num_tokens: int) -> int:
        """Index up to `num_tokens` tokens; returns how many were indexed."""
        new = self._missing[:num_tokens]
        del self._missing[:num_tokens]
        self._younger.extend(new)
        if len(self._younger) >= PHRASE_TOKENS:
            self._older, self._younger = self._younger, SuffixIndex(*self._limits)
        return len(new)

    def propose(self, newest: Sequence[int], count: int) -> Proposal | None:
        found = None
        for index in (self._younger, self._older):
            match = index.find(newest)
            if match.length > (found.match_length if found else 0):
                found = Proposal(index.continuation(match.end, count), match.length)
        return found if found and found.token_ids else None
