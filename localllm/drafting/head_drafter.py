"""Drafts from a head on the model's own hidden states.

The head's entry for token p, made of that token and the hidden state before it, stands at slot p of
a cache of its own, see own_entries.py.

Hidden states exist only while a step computes them. They are kept until the head has made entries
of them; that of each block's last token is kept with the block, so that a request that begins
behind a cached prefix can go on. Where some are missing (the engine drafted nothing for a while, or
a prefix was never seen), the head goes on behind the gap, from the next block on: it does not see
what is before, which makes its drafts worse and changes nothing else.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from localllm.drafting.follower import Followed, Follower
from localllm.drafting.hidden_rows import HiddenRows
from localllm.drafting.own_entries import NOTHING, OwnEntries
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.schedule.request import Request
from localllm.schedule.runner import HeadRunner
from localllm.schedule.scheduler import ScheduledBatch

# A head that lacks more than a few entries of a request catches up before it drafts for it. One
# that is only tried, because it has not been worth its time, sees so many of the newest tokens:
# with pocket as many of its drafts are accepted as with four times as many (0.59 at temperature 1).
_FEW, _OF_TRIAL = 16, 96
# Memory, in float32, for hidden states that wait for the head, over all requests.
_WAITING_BYTES, _FEWEST_WAITING, _MOST_WAITING = 64 << 20, 1024, 1 << 15


def max_waiting_rows(row_bytes: int) -> int:
    """How many hidden states of `row_bytes` may wait for the head; older ones are dropped."""
    return min(max(_WAITING_BYTES // row_bytes, _FEWEST_WAITING), _MOST_WAITING)


class HeadDrafter(Follower):
    """Drafts with a runner of the head; `kv_cache` has the target cache's block ids."""

    _entries: OwnEntries

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
        super().__init__(runner, max_model_len, max_tokens, _FEW, OwnEntries(kv_cache, table))
        self._taps, self._fuse = taps, fuse
        self._block_size = kv_cache.block_size
        # By block: its last token, and the hidden state, a row.
        self._last: dict[int, tuple[int, Tensor]] = {}
        # Batches with their hidden states, that no text has taken yet, and the sum of rows.
        self._waiting: deque[tuple[ScheduledBatch, Tensor]] = deque()
        self._num_waiting, self._max_waiting = 0, max_waiting_rows(4 * row_width)

    def see(self, batch: ScheduledBatch, hidden: Sequence[Tensor]) -> None:
        """See Drafter: keeps them for later, since this is called in every step."""
        rows = hidden[0] if len(hidden) == 1 else torch.cat(tuple(hidden), dim=-1)
        if self._runner.overlaps and len(hidden) == 1:
            rows = rows.clone()  # the next step overwrites them
        self._waiting.append((batch, rows))
        self._num_waiting += rows.shape[0]
        while self._num_waiting > self._max_waiting:
            self._num_waiting -= self._waiting.popleft()[1].shape[0]

    def prepare(self, request: Request, *, is_trial: bool) -> None:
        """See Drafter: for a trial, it catches up with the newest tokens only."""
        super().prepare(request, is_trial=is_trial)
        followed = self._followed[request]
        newest = len(request.token_ids) - _OF_TRIAL
        if is_trial and newest > followed.num_known:
            self._skip_to(followed, newest)
            followed.rows.drop_before(followed.num_known - 1)

    def forget(self, request: Request) -> None:
        """See Drafter: completes what a later request with the same beginning will look for."""
        if request in self._followed:  # else it was never drafted for
            self._take_waiting()
        followed = self._known(request)
        super().forget(request)
        if followed is not None:  # else its blocks may be another's by now
            self._complete_blocks(followed, request)

    def _complete_blocks(self, followed: Followed, request: Request) -> None:
        followed.read(request)
        end = self._end(followed, request)
        end -= end % self._block_size
        if 0 < end - followed.num_known <= _FEW:
            self._catch_up([(followed, end)])
        elif end == followed.num_known:
            self._keep_last_rows(followed, end)

    def _take_waiting(self) -> None:
        """Hand the hidden states that wait to the texts."""
        for batch, rows in self._waiting:
            first = 0
            for entry in batch.requests:
                end = first + entry.num_scheduled_tokens
                self._take(entry.request, entry.start, rows, first, end)
                first = end
        self._waiting.clear()
        self._num_waiting = 0

    def _take(self, request: Request, start: int, rows: Tensor, first: int, end: int) -> None:
        followed = self._known(request)
        if followed is None:
            if not request.tables:
                return
            followed = self._followed[request] = self._begin(request, start)
        own = followed.rows
        if not own.add(start, rows, first, end):
            own = self._go_on(followed, start)
            own.add(start, rows, first, end)
        if own.end - own.start > self._max_waiting:
            # Nobody has drafted for it, and memory is for those that are drafted for.
            self._skip_to(followed, own.end - self._max_waiting // 2)
            own.drop_before(followed.num_known - 1)

    def _begin(self, request: Request, start: int) -> Followed:
        """What is known of a text whose hidden states come from position `start` on, behind a
        cached prefix.
        """
        followed, size = Followed.begin(request), self._block_size
        followed.read(request)
        num_blocks, blocks = start // size, self._entries.blocks(request)
        if start and start % size == 0 and num_blocks <= len(blocks):
            differing = self._entries.differing(followed.text, 0, start)
            first = int(differing[-1]) + 1 if len(differing) else 0
            skipped = -(-max(0, first - 1) // size)
            token, row = self._last.get(blocks[num_blocks - 1], (NOTHING, None))
            if row is not None and token == request.token_ids[start - 1] and skipped < num_blocks:
                followed.num_skipped, followed.num_known = skipped, start
                followed.rows = HiddenRows(start - 1, start, [(row, 0, 1)])
                return followed
        self._go_on(followed, start)
        return followed

    def _go_on(self, followed: Followed, start: int) -> HiddenRows:
        """Begin at the first block from position `start` on, where hidden states come after a
        gap.
        """
        self._skip_to(followed, start)
        followed.rows = HiddenRows(start, start)
        return followed.rows

    def _skip_to(self, followed: Followed, position: int) -> None:
        """Begin at the first block from a position on, and see nothing before it."""
        followed.num_skipped = -(-position // self._block_size)
        followed.num_known = followed.num_skipped * self._block_size + 1

    def _follow(self, request: Request) -> Followed | None:
        self._take_waiting()
        followed = super()._follow(request)
        is_seen = followed is not None and followed.rows.end >= len(request.token_ids) - 1
        return followed if is_seen else None

    def _end(self, followed: Followed, request: Request) -> int:
        num_slots = self._entries.num_slots(followed.text)
        return min(len(request.token_ids), followed.rows.end + 1, num_slots)

    def _book(self, followed: Followed, end: int) -> None:
        super()._book(followed, end)
        self._keep_last_rows(followed, end)
        followed.rows.drop_before(end - 1)

    def _book_draft(self, followed: Followed, draft: Sequence[int]) -> None:
        # Their entries were made of the head's own states, so they are not of the text.
        self._entries.write(followed.text, followed.num_known, [NOTHING] * (len(draft) - 1))

    def _keep_last_rows(self, followed: Followed, end: int) -> None:
        """Keep the hidden states of the last tokens of the blocks that end within the used ones."""
        size, blocks = self._block_size, self._entries.blocks(followed.text)
        first = followed.rows.start + -(followed.rows.start + 1) % size
        for position in range(first, min(end, followed.rows.end), size):
            [row] = followed.rows.between(position, position + 1)
            self._last[blocks[position // size]] = followed.text.token_ids[position], row.clone()

    def _copy_blocks(self, batch: ScheduledBatch) -> None:
        for copy in self._entries.copy(batch):
            if copy.source in self._last:
                self._last[copy.target] = self._last[copy.source]
