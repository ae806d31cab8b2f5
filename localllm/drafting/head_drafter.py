"""Drafts from a head on the model's own hidden states.

The head's entry for token p, made of that token and the hidden state before it, stands at slot p of
a cache of its own, with the same block ids as a full cache group of the target; so prefixes, shared
blocks and preemption work as without it. As in draft_model.py, the token of each computed slot is
remembered, and with it whether a block still holds what it held.

Hidden states exist only while a step computes them. They are kept until the head has made entries
of them; that of each block's last token is kept with the block, so that a request that begins
behind a cached prefix can go on. Where some are missing (the engine drafted nothing for a while, or
a prefix was never seen), the head goes on behind the gap, from the next block on: it does not see
what is before, which makes its drafts worse and changes nothing else.

It samples with the same noise as the target model, as a draft model does.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.drafting.draft_steps import Drafting, UnderWay, draft_on
from localllm.drafting.drafter import NOT_KNOWN, Drafter, Proposal
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.schedule.request import Request
from localllm.schedule.rows import slots_of
from localllm.schedule.runner import HeadDraft, HeadRunner
from localllm.schedule.scheduler import ScheduledBatch, ScheduledRequest

# A head that lacks more than a few entries of a request catches up before it drafts for it, with
# about as many tokens in each step as the step has, and a chunk more. A head that is only tried,
# because it has not been worth its time, sees so many of the newest tokens: with pocket as many of
# its drafts are accepted as with four times as many (0.59 at temperature 1).
_FEW, _CHUNK, _OF_TRIAL = 16, 256, 32
# Memory, in float32, for hidden states that wait for the head, over all requests.
_WAITING_BYTES, _FEWEST_WAITING, _MOST_WAITING = 64 << 20, 1024, 1 << 15
_NOTHING = -1


@dataclass(slots=True)
class _Follower:
    """The head's copy of a request, which includes drafted tokens.

    It sees the entries behind the first one of block `skipped`, up to slot `num_known`. `rows`: the
    hidden states from position `rows_start` on that are not used up yet, each part with the places
    in a tensor where it begins and ends; most are never looked at.
    """

    request: Request
    admission: int
    skipped: int = 0
    num_known: int = 1
    rows: list[tuple[Tensor, int, int]] = field(default_factory=list)
    rows_start: int = 0
    rows_end: int = 0

    def add(self, start: int, rows: Tensor, first: int, end: int) -> bool:
        """Take hidden states from position `start` on, those from `first` to `end` of `rows`, in
        place of older ones there; False if some before them are missing.
        """
        if start > self.rows_end:
            return False
        if start < self.rows_end:
            self.rows = self._parts(self.rows_start, start)
            self.rows_start = min(self.rows_start, start)
        self.rows.append((rows, first, end))
        self.rows_end = start + end - first
        return True

    def drop_before(self, start: int) -> None:
        """Drop those before position `start`."""
        self.rows = self._parts(start, self.rows_end)
        self.rows_start = min(max(start, self.rows_start), self.rows_end)

    def between(self, start: int, end: int) -> list[Tensor]:
        """Those from `start` up to `end`."""
        return [
            rows if last - first == rows.shape[0] else rows[first:last]  # faster than `len`
            for rows, first, last in self._parts(start, end)
        ]

    def _parts(self, start: int, end: int) -> list[tuple[Tensor, int, int]]:
        found, position = [], self.rows_start
        for rows, first, last in self.rows:
            low = max(first, first + start - position)
            high = min(last, first + end - position)
            if low < high:
                found.append((rows, low, high))
            position += last - first
        return found

    def follow(self, token_ids: Sequence[int]) -> None:
        """Take the text as it is now; what entries were made of has not changed."""
        own = self.request.token_ids
        first = min(self.num_known - 1, len(own))
        own[first:] = token_ids[first:]

    def skip_to(self, position: int, block_size: int) -> None:
        """Begin at the first block from a position on, and see nothing before it."""
        self.skipped = -(-position // block_size)
        self.num_known = self.skipped * block_size + 1

    @property
    def computable(self) -> int:
        """One past the last slot whose token and hidden state are known."""
        return min(len(self.request.token_ids), self.rows_end + 1)


def max_waiting_rows(row_bytes: int) -> int:
    """How many hidden states of `row_bytes` may wait for the head; older ones are dropped."""
    return min(max(_WAITING_BYTES // row_bytes, _FEWEST_WAITING), _MOST_WAITING)


class HeadDrafter(Drafter):
    """Drafts with a runner of the head; `kv_cache` has the target cache's block ids."""

    _runner: HeadRunner

    def __init__(
        self,
        runner: HeadRunner,
        kv_cache: PagedKVCache,
        taps: Sequence[int],
        row_width: int,
        max_model_len: int,
        max_tokens: int,
        table: int = 0,
        fuse: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`runner`: its tap is what the head takes in place of a hidden state for the next token;
        `taps`: the target's hidden states that it takes, of `row_width` values in all, and `fuse`:
        makes one of them where they are several; `max_tokens`: the most tokens in one of its steps;
        `table`: the index of the request's table that it uses.
        """
        self._runner, self._kv_cache, self._table = runner, kv_cache, table
        self._taps, self._fuse = taps, fuse
        self._max_model_len, self._max_tokens = max_model_len, max_tokens
        self._chunk = min(_CHUNK, max_tokens)
        self._block_size = kv_cache.block_size
        # By slot: the token whose entry is there.
        self._computed = np.full(kv_cache.num_blocks(0) * self._block_size, _NOTHING, np.int32)
        # By block: its last token, and the hidden state, a row.
        self._last: dict[int, tuple[int, Tensor]] = {}
        self._followers: dict[Request, _Follower] = {}
        # Batches with their hidden states, that no follower has taken yet, and the sum of rows.
        self._waiting: deque[tuple[ScheduledBatch, Tensor]] = deque()
        self._num_waiting, self._max_waiting = 0, max_waiting_rows(4 * row_width)
        # The requests to catch up with; and `took_more`.
        self._behind = set[Request]()
        self._took_more = False

    @property
    def took_more(self) -> bool:
        """See Drafter: whether it made entries besides those of the newest tokens."""
        return self._took_more

    @property
    def taps(self) -> Sequence[int]:
        """See Drafter."""
        return self._taps

    def see(self, batch: ScheduledBatch, hidden: Sequence[Tensor]) -> None:
        """See Drafter: keeps them for later, since this is called in every step."""
        rows = hidden[0] if len(hidden) == 1 else torch.cat(tuple(hidden), dim=-1)
        if self._runner.overlaps and len(hidden) == 1:
            rows = rows.clone()  # the next step overwrites them
        self._waiting.append((batch, rows))
        self._num_waiting += rows.shape[0]
        while self._num_waiting > self._max_waiting:
            self._num_waiting -= self._waiting.popleft()[1].shape[0]

    @property
    def has_work(self) -> bool:
        """See Drafter."""
        return bool(self._behind)

    def work(self, batch: ScheduledBatch) -> None:
        """See Drafter: makes entries of texts that it is to draft for."""
        self._take_waiting()
        left = self._chunk + sum(entry.num_scheduled_tokens for entry in batch.requests)
        left = min(left, self._max_tokens)
        step = []
        for request in [entry.request for entry in batch.requests if entry.request in self._behind]:
            follower = self._follow(request)
            end = 0 if follower is None else min(follower.computable, self._num_slots(follower))
            if follower is None or end - follower.num_known <= min(_FEW, self._chunk):
                self._behind.discard(request)
            elif left:
                count = min(left, end - follower.num_known)
                step.append((follower, follower.num_known + count))
                left -= count
        self._catch_up(step)

    def propose(self, request: Request, count: int) -> Proposal | None:
        """See Drafter: up to `count` tokens whose ids are not known yet."""
        self._take_waiting()
        follower = self._follow(request)
        num_tokens = len(request.token_ids)
        room = self._max_model_len - num_tokens
        if follower is None or follower.computable < num_tokens or room <= 0:
            return None
        lacking = num_tokens - follower.num_known
        if lacking <= 0:  # behind a gap, within the block
            return None
        is_ready = lacking <= min(_FEW, self._chunk)
        return Proposal([NOT_KNOWN] * min(count, room), 0, is_ready=is_ready)

    def prepare(self, request: Request, *, is_trial: bool) -> None:
        """See Drafter: it catches up with the request in the next call of `work`, for a trial with
        its newest tokens only.
        """
        self._behind.add(request)
        follower = self._followers[request]
        newest = len(request.token_ids) - _OF_TRIAL
        if is_trial and newest > follower.num_known:
            follower.skip_to(newest, self._block_size)
            follower.drop_before(follower.num_known - 1)

    def complete(self, batch: ScheduledBatch, own: Collection[Request]) -> None:
        """See Drafter: runs one step of the head for each token of the longest draft."""
        self._copy_blocks(batch)
        self._took_more = False
        drafting = []
        for i, entry in enumerate(batch.requests):
            if entry.draft and entry.request in own:
                follower = self._followers[entry.request]
                # Drafts follow the request's grammar, since others would be rejected.
                matcher = entry.request.matcher
                follower.request.matcher = None if matcher is None else matcher.copy()
                drafting.append(
                    _Drafting(
                        i,
                        follower.request,
                        len(entry.draft),
                        entry.known_end,
                        follower.skipped,
                        follower=follower,
                    )
                )
        if not drafting:
            return
        # Longest first, so that those still drafting at some depth are the first ones.
        drafting.sort(key=lambda each: -each.num_drafts)
        drafts = self._drafts_at_once(drafting)
        if drafts is None:
            rows, first = self._first_drafts(drafting)
            drafts = draft_on(self._runner, drafting, rows, first)
        for each, draft in zip(drafting, drafts, strict=True):
            entry = batch.requests[each.index]
            batch.requests[each.index] = entry._replace(draft=draft)
            self._forget_slots(each.follower, each.end, each.end + len(draft) - 1)
            self._book(each.follower, each.end)

    def _drafts_at_once(self, drafting: "list[_Drafting]") -> list[list[int]] | None:
        """The drafts, where the runner makes all of them in one call."""
        starts = [each.follower.num_known for each in drafting]
        if sum(each.end for each in drafting) - sum(starts) > self._max_tokens:
            return None
        asked = [
            HeadDraft(each.entry(start, each.end), each.num_drafts)
            for each, start in zip(drafting, starts, strict=True)
        ]
        return self._runner.draft(asked, self._hidden(_rows_of(drafting)))

    def forget(self, request: Request) -> None:
        """See Drafter: completes what a later request with the same beginning will look for."""
        self._behind.discard(request)
        if request not in self._followers:
            return  # it was never drafted for
        self._take_waiting()
        follower = self._followers.pop(request, None)
        if follower is None or follower.admission != request.admission:
            return  # its blocks may be another's by now
        follower.follow(request.token_ids)
        end = min(follower.computable, self._num_slots(follower))
        end -= end % self._block_size
        if 0 < end - follower.num_known <= _FEW:
            self._catch_up([(follower, end)])
        elif end == follower.num_known:
            self._keep_last_rows(follower, end)

    def _take_waiting(self) -> None:
        """Hand the hidden states that wait to the requests' followers."""
        for batch, rows in self._waiting:
            first = 0
            for entry in batch.requests:
                end = first + entry.num_scheduled_tokens
                self._note(entry.request, entry.start, rows, first, end)
                first = end
        self._waiting.clear()
        self._num_waiting = 0

    def _note(self, request: Request, start: int, rows: Tensor, first: int, end: int) -> None:
        follower = self._followers.get(request)
        if follower is None or follower.admission != request.admission:
            if not request.tables:
                return
            follower = self._followers[request] = self._begin(request, start)
        if not follower.add(start, rows, first, end):
            self._go_on(follower, start)
            follower.add(start, rows, first, end)
        if follower.rows_end - follower.rows_start > self._max_waiting:
            # Nobody has drafted for it, and memory is for those that are drafted for.
            follower.skip_to(follower.rows_end - self._max_waiting // 2, self._block_size)
            follower.drop_before(follower.num_known - 1)

    def _begin(self, request: Request, start: int) -> _Follower:
        """A follower that gets hidden states from position `start` on, behind a cached prefix."""
        own = replace(
            request,
            token_ids=request.token_ids[:start],
            params=replace(request.params, logprobs=None),
            matcher=None,
        )
        follower = _Follower(own, request.admission)
        size = self._block_size
        table = np.array(request.tables[self._table], np.int32)
        num_blocks = start // size
        if start and start % size == 0 and num_blocks <= len(table):
            last = int(table[num_blocks - 1])
            slots = slots_of(np.arange(start), table, size)
            differs = np.flatnonzero(self._computed[slots] != own.token_ids)
            first = int(differs[-1]) + 1 if len(differs) else 0
            skipped = -(-max(0, first - 1) // size)
            token, row = self._last.get(last, (_NOTHING, None))
            if row is not None and token == own.token_ids[-1] and skipped < num_blocks:
                follower.skipped, follower.num_known = skipped, start
                follower.rows = [(row, 0, 1)]
                follower.rows_start, follower.rows_end = start - 1, start
                return follower
        self._go_on(follower, start)
        return follower

    def _go_on(self, follower: _Follower, start: int) -> None:
        """Let a follower begin at the first block from position `start` on, where hidden states
        come after a gap.
        """
        follower.skip_to(start, self._block_size)
        follower.rows, follower.rows_start, follower.rows_end = [], start, start

    def _follow(self, request: Request) -> _Follower | None:
        """The follower of a request, updated to its tokens and blocks; None if nothing of it has
        been seen.
        """
        follower = self._followers.get(request)
        if follower is None or follower.admission != request.admission:
            return None
        follower.follow(request.token_ids)
        own = follower.request
        own.tables, own.slot = request.tables, request.slot
        return follower

    def _catch_up(self, step: list[tuple[_Follower, int]]) -> None:
        """Make the entries of followers up to some slot."""
        if not step:
            return
        self._took_more = True
        entries, rows = [], []
        for follower, end in step:
            start = follower.num_known
            entries.append(
                ScheduledRequest(
                    follower.request,
                    start,
                    end - start,
                    catches_up=False,
                    num_skipped=follower.skipped,
                )
            )
            rows += follower.between(start - 1, end - 1)
        hidden = self._hidden(rows)
        if self._runner.draft([HeadDraft(entry, 0) for entry in entries], hidden) is None:
            self._runner.launch(ScheduledBatch(entries), hidden).wait()
        for follower, end in step:
            self._book(follower, end)

    def _first_drafts(self, drafting: "list[_Drafting]") -> tuple[Tensor, list[UnderWay]]:
        """Make the entries that are lacking, and sample each follower's first drafted token.

        Returns what takes the place of its hidden state, and the steps that do so.
        """
        steps, num_tokens = list[list[_Drafting]](), self._max_tokens
        for each in drafting:
            num_tokens += each.end - each.follower.num_known
            if num_tokens > self._max_tokens:
                steps.append([])
                num_tokens = each.end - each.follower.num_known
            steps[-1].append(each)
        found, under_way = [], list[UnderWay]()
        for step in steps:
            entries = [each.entry(each.follower.num_known, each.end) for each in step]
            rows = _rows_of(step)
            launched = self._runner.launch(ScheduledBatch(entries), self._hidden(rows))
            under_way.append(UnderWay(launched, [each.text for each in step]))
            [own] = launched.hidden
            if len(own) > len(step):
                last = np.cumsum([entry.num_scheduled_tokens for entry in entries]) - 1
                own = own[torch.from_numpy(last).to(own.device)]
            found.append(own.clone() if len(steps) > 1 else own)
        return _joined(found), under_way

    def _hidden(self, rows: Sequence[Tensor]) -> Tensor:
        """What the head takes in place of the target's hidden states."""
        joined = _joined(rows)
        return joined if self._fuse is None else self._fuse(joined)

    def _book(self, follower: _Follower, end: int) -> None:
        """Record that the follower's entries before slot `end` are computed."""
        start, own = follower.num_known, follower.request
        table, size = own.tables[self._table], self._block_size
        if end - start < _FEW:
            for position in range(start, end):
                slot = table[position // size] * size + position % size
                self._computed[slot] = own.token_ids[position]
        else:
            self._computed[self._slots(own, start, end)] = own.token_ids[start:end]
        self._keep_last_rows(follower, end)
        follower.num_known = end
        follower.drop_before(end - 1)

    def _keep_last_rows(self, follower: _Follower, end: int) -> None:
        """Keep the hidden states of the last tokens of the blocks that end within the used ones."""
        size = self._block_size
        first = follower.rows_start + -(follower.rows_start + 1) % size
        for position in range(first, min(end, follower.rows_end), size):
            block = follower.request.tables[self._table][position // size]
            [row] = follower.between(position, position + 1)
            self._last[block] = follower.request.token_ids[position], row.clone()

    def _num_slots(self, follower: _Follower) -> int:
        return len(follower.request.tables[self._table]) * self._block_size

    def _forget_slots(self, follower: _Follower, start: int, end: int) -> None:
        """Record that slots hold entries that are not of the text."""
        table, size = follower.request.tables[self._table], self._block_size
        for position in range(start, end):
            self._computed[table[position // size] * size + position % size] = _NOTHING

    def _slots(self, request: Request, start: int, end: int) -> npt.NDArray[np.int64]:
        table = np.array(request.tables[self._table], np.int32)
        return slots_of(np.arange(start, end), table, self._block_size)

    def _copy_blocks(self, batch: ScheduledBatch) -> None:
        copies = [copy for copy in batch.block_copies if copy.group == self._table]
        if not copies:
            return
        self._kv_cache.copy_blocks([self._table] * len(self._kv_cache.stacks), copies)
        by_block = self._computed.reshape(-1, self._block_size)
        for copy in copies:
            by_block[copy.target] = by_block[copy.source]
            if copy.source in self._last:
                self._last[copy.target] = self._last[copy.source]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drafting(Drafting):
    """A draft whose text is that of a follower."""

    follower: _Follower


def _rows_of(drafting: Sequence[_Drafting]) -> list[Tensor]:
    """The hidden states before the tokens whose entries are lacking."""
    return [
        rows
        for each in drafting
        for rows in each.follower.between(each.follower.num_known - 1, each.end - 1)
    ]


def _joined(rows: Sequence[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(tuple(rows))
