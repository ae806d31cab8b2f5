"""Drafts from a model that follows the text of each request with steps of its own.

A follower computes an entry of each token of a text, beside the target's steps where many are
lacking. Behind the newest token it samples several more, one of all requests in each of its steps.
It samples with the same noise as the target model (see sampler.py), so both choose the same token
wherever their distributions allow it (Leviathan et al. 2022, "Fast Inference from Transformers via
Speculative Decoding", accept at random instead).
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from localllm.drafting.drafter import NOT_KNOWN, Drafter, Proposal
from localllm.drafting.hidden_rows import HiddenRows
from localllm.drafting.own_entries import OwnEntries
from localllm.schedule.request import Request
from localllm.schedule.runner import HeadDraft, HeadRunner, Launched
from localllm.schedule.scheduler import ScheduledBatch, ScheduledRequest

# Beside each step, as many tokens are computed as the step has, and this many more.
CHUNK = 256


@dataclass(slots=True)
class Followed:
    """What a follower knows of a request, for one of its admissions.

    `text`: its copy of the request, to which drafts are appended while they are made; the entries
    of its tokens before `num_known` are computed. `num_skipped`, `num_seen`: see ScheduledRequest.
    `rows`: the hidden states that it has still to read. Of a model with recurrences, `stands`:
    where their states stand, behind tokens that were not drafted; `reached`: how far it computed.
    """

    text: Request
    admission: int
    num_known: int = 0
    num_skipped: int = 0
    num_seen: int | None = None
    stands: int = 0
    reached: int = 0
    rows: HiddenRows = field(default_factory=HiddenRows)

    @classmethod
    def begin(cls, request: Request) -> "Followed":
        """Of a request of which nothing is known yet."""
        params = replace(request.params, logprobs=None)
        text = replace(request, token_ids=[], params=params, matcher=None, scores=None)
        return cls(text, request.admission)

    def read(self, request: Request) -> None:
        """Take the request's new tokens."""
        self.text.token_ids += request.token_ids[len(self.text.token_ids) :]

    def entry(
        self, start: int, end: int, *, catches_up: bool = True, is_drafted: bool = False
    ) -> ScheduledRequest:
        """The tokens from `start` up to `end`. Those that `is_drafted` may be rejected, so the
        states of recurrences stay before them.
        """
        return ScheduledRequest(
            self.text,
            start,
            end - start,
            catches_up,
            stands=self.stands,
            keeps_state=is_drafted,
            num_skipped=self.num_skipped,
            num_seen=self.num_seen,
        )


@dataclass(frozen=True, slots=True)
class Drafting:
    """`num_drafts` tokens to draft for the batch's request `index`, behind `end` tokens."""

    index: int
    followed: Followed
    num_drafts: int
    end: int

    def entry(self, depth: int) -> ScheduledRequest:
        """Its newest token, once `depth` tokens are drafted."""
        end = self.end + depth
        return self.followed.entry(end - 1, end, is_drafted=True)

    def take(self) -> list[int]:
        """The drafted tokens, which the copy of the request then lacks."""
        token_ids = self.followed.text.token_ids
        drafted = token_ids[self.end :]
        del token_ids[self.end :]
        return drafted


class _Sampling:
    """Steps that sample tokens of some drafts, of which the newest may be in flight."""

    def __init__(self, runner: HeadRunner, drafting: Sequence[Drafting]) -> None:
        self._runner, self._under_way = runner, deque[tuple[Launched, Sequence[Drafting]]]()
        # A device that overlaps keeps the newest tokens, but a grammar has to see them.
        has_grammar = any(each.followed.text.matcher for each in drafting)
        self._most_under_way = 0 if has_grammar or not runner.overlaps else 1

    def launch(
        self, drafting: Sequence[Drafting], entries: list[ScheduledRequest], hidden: Tensor | None
    ) -> Tensor | None:
        """Start a step that samples a token for each; returns what the model has in place of the
        hidden states for the next tokens, if it reads any.
        """
        self.take(self._most_under_way)
        launched = self._runner.launch(ScheduledBatch(entries), hidden)
        self._under_way.append((launched, drafting))
        if not launched.hidden:
            return None
        rows = launched.hidden[0]
        if len(rows) == len(entries):
            return rows
        last = np.cumsum([entry.num_scheduled_tokens for entry in entries]) - 1
        return rows[torch.from_numpy(last).to(rows.device)]

    def take(self, left: int = 0) -> None:
        """Wait for the steps but the newest `left` ones, and append their tokens to the texts; a
        row that is not finite gives token 0.
        """
        while len(self._under_way) > left:
            launched, drafting = self._under_way.popleft()
            for each, [token] in zip(drafting, launched.wait(), strict=True):
                each.followed.text.append(token.token_id or 0)


# What is followed, and one past the last token whose entry is to be made.
_Span = tuple[Followed, int]


class Follower(Drafter):
    """Drafts with a runner of its model."""

    _runner: HeadRunner
    # The hidden states that the model reads, and what makes one of them where they are several.
    _taps: Sequence[int] = ()
    _fuse: Callable[[Tensor], Tensor] | None = None

    def __init__(
        self,
        runner: HeadRunner,
        max_model_len: int,
        max_tokens: int,
        longest_lag: int,
        entries: OwnEntries | None = None,
    ) -> None:
        """`max_tokens`: the most in one of its steps; `longest_lag`: with so few tokens to catch up
        with, it can draft; `entries`: None if it has none of its own.
        """
        self._runner, self._entries = runner, entries
        self._max_model_len, self._max_tokens = max_model_len, max_tokens
        self._chunk = min(CHUNK, max_tokens)
        self._longest_lag = min(longest_lag, self._chunk)
        self._followed: dict[Request, Followed] = {}
        # The requests to catch up with; and `took_more`.
        self._behind = set[Request]()
        self._took_more = False

    @property
    def taps(self) -> Sequence[int]:
        return self._taps

    @property
    def took_more(self) -> bool:
        """See Drafter: whether it made entries besides those of the newest tokens."""
        return self._took_more

    @property
    def has_work(self) -> bool:
        return bool(self._behind)

    def work(self, batch: ScheduledBatch) -> None:
        """See Drafter: makes entries of texts that it is behind with."""
        left = self._chunk + sum(entry.num_scheduled_tokens for entry in batch.requests)
        left = min(left, self._max_tokens)
        step = []
        for request in [each.request for each in batch.requests if self._is_behind(each.request)]:
            followed = self._follow(request)
            end = 0 if followed is None else self._end(followed, request)
            if followed is None or end - followed.num_known <= self._longest_lag:
                self._behind.discard(request)
            elif left:
                count = min(left, end - followed.num_known)
                step.append((followed, followed.num_known + count))
                left -= count
        if step:
            self._catch_up(step)

    def propose(self, request: Request, count: int) -> Proposal | None:
        """See Drafter: up to `count` tokens whose ids are not known yet."""
        followed, num_tokens = self._follow(request), len(request.token_ids)
        room = min(count, self._max_model_len - num_tokens)
        if followed is None or room <= 0 or followed.num_known >= num_tokens:
            return None
        is_ready = num_tokens - followed.num_known <= self._longest_lag
        return Proposal([NOT_KNOWN] * room, 0, is_ready=is_ready)

    def prepare(self, request: Request, *, is_trial: bool) -> None:
        """See Drafter: it catches up with the request in the next call of `work`."""
        self._behind.add(request)

    def complete(self, batch: ScheduledBatch, own: Collection[Request]) -> None:
        """See Drafter: runs one step of its model for each token of the longest draft."""
        self._copy_blocks(batch)
        self._took_more = False
        drafting = [
            Drafting(i, self._followed[entry.request], len(entry.draft), entry.known_end)
            for i, entry in enumerate(batch.requests)
            if entry.draft and entry.request in own
        ]
        if not drafting:
            return
        for each in drafting:
            # Drafts follow the request's grammar, since others would be rejected.
            matcher = batch.requests[each.index].request.matcher
            each.followed.text.matcher = None if matcher is None else matcher.copy()
        # Longest first, so that those still drafting at some depth are the first ones.
        drafting.sort(key=lambda each: -each.num_drafts)
        for each, draft in zip(drafting, self._drafts(drafting), strict=True):
            batch.requests[each.index] = batch.requests[each.index]._replace(draft=draft)
            self._book(each.followed, each.end)
            self._book_draft(each.followed, draft)

    def forget(self, request: Request) -> None:
        self._behind.discard(request)
        self._followed.pop(request, None)

    def _is_behind(self, request: Request) -> bool:
        """Whether it is to catch up with a request."""
        return request in self._behind

    def _known(self, request: Request) -> Followed | None:
        """What is known of a request in this admission."""
        followed = self._followed.get(request)
        return None if followed is None or followed.admission != request.admission else followed

    def _follow(self, request: Request) -> Followed | None:
        """The same, with the request's newest tokens and blocks; None if it cannot draft for it."""
        followed = self._known(request)
        if followed is not None:
            followed.read(request)
            followed.text.tables, followed.text.slot = request.tables, request.slot
        return followed

    def _end(self, followed: Followed, request: Request) -> int:
        """One past the last token whose entry can be made beside a step."""
        return min(len(request.token_ids), request.num_computed_tokens)

    def _book(self, followed: Followed, end: int) -> None:
        """Record that the entries before slot `end` are computed."""
        if self._entries is not None:
            start = followed.num_known
            self._entries.write(followed.text, start, followed.text.token_ids[start:end])
        followed.num_known = end

    def _book_draft(self, followed: Followed, draft: Sequence[int]) -> None:
        """Record what stands behind them once a draft has been made."""

    def _copy_blocks(self, batch: ScheduledBatch) -> None:
        if self._entries is not None and batch.block_copies:
            self._entries.copy(batch)

    def _lacking(
        self, spans: Sequence[_Span], *, catches_up: bool
    ) -> tuple[list[ScheduledRequest], Tensor | None]:
        """The tokens whose entries are lacking, and what the model reads beside them."""
        entries, rows = [], list[Tensor]()
        for followed, end in spans:
            start = followed.num_known
            entries.append(followed.entry(start, end, catches_up=catches_up))
            rows += followed.rows.between(start - 1, end - 1)
            followed.stands = followed.reached = end
        if not rows:
            return entries, None
        hidden = rows[0] if len(rows) == 1 else torch.cat(rows)
        return entries, self._fuse(hidden) if self._fuse else hidden

    def _catch_up(self, spans: Sequence[_Span]) -> None:
        """Make the entries that are lacking."""
        self._took_more = True
        entries, hidden = self._lacking(spans, catches_up=False)
        if self._at_once(entries, hidden, repeat(0)) is None:
            self._runner.launch(ScheduledBatch(entries), hidden).wait()
        for followed, end in spans:
            self._book(followed, end)

    def _drafts(self, drafting: Sequence[Drafting]) -> list[list[int]]:
        """The drafts, of which the longest are first, behind the entries that are lacking."""
        spans = [(each.followed, each.end) for each in drafting]
        if sum(end - followed.num_known for followed, end in spans) > self._max_tokens:
            for followed, end in spans:
                if followed.num_known < end - 1:
                    self._catch_up([(followed, end - 1)])
        entries, hidden = self._lacking(spans, catches_up=True)
        found = self._at_once(entries, hidden, [each.num_drafts for each in drafting])
        return self._one_by_one(drafting, entries, hidden) if found is None else found

    def _at_once(
        self, entries: list[ScheduledRequest], hidden: Tensor | None, counts: Iterable[int]
    ) -> list[list[int]] | None:
        """Drafts of so many tokens, where the runner can make them in one call."""
        if hidden is None or self._entries is None:
            return None
        return self._runner.draft(list(map(HeadDraft, entries, counts)), hidden)

    def _one_by_one(
        self, drafting: Sequence[Drafting], entries: list[ScheduledRequest], hidden: Tensor | None
    ) -> list[list[int]]:
        """One token of all drafts after the other; `entries`: the tokens before the first ones."""
        sampling = _Sampling(self._runner, drafting)
        try:
            hidden = sampling.launch(drafting, entries, hidden)
            for depth in range(1, drafting[0].num_drafts):
                going_on = [each for each in drafting if each.num_drafts > depth]
                entries = [each.entry(depth) for each in going_on]
                hidden = None if hidden is None else hidden[: len(going_on)]
                hidden = sampling.launch(going_on, entries, hidden)
            sampling.take()
        finally:
            # After a failure, too, so that the next draft goes on from the request's own tokens.
            drafts = [each.take() for each in drafting]
        return drafts
