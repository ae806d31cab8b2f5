"""Drafts from an assistant, which reads the target's own keys and values; see model/assistant.py.

It has no entries, and reads the hidden states of the newest tokens alone, so it has nothing to
catch up with, and drafts for every request that decodes. A block that the step has still to copy is
read as it is, which may cost a draft.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from localllm.drafting.follower import CHUNK, Followed, Follower
from localllm.drafting.hidden_rows import HiddenRows
from localllm.schedule.request import Request
from localllm.schedule.runner import HeadRunner
from localllm.schedule.scheduler import ScheduledBatch


class AssistantDrafter(Follower):
    """Drafts with a runner of the assistant, whose cache is the target's."""

    def __init__(self, runner: HeadRunner, taps: Sequence[int], max_model_len: int) -> None:
        """`runner`: its tap is what stands for a hidden state for the next token; `taps`: the
        target's hidden state that it takes.
        """
        super().__init__(runner, max_model_len, CHUNK, 1)
        self._taps = taps

    def see(self, batch: ScheduledBatch, hidden: Sequence[Tensor]) -> None:
        """See Drafter: keeps the rows after which a token is sampled."""
        [rows] = hidden
        # Where they begin and end, neighbours together: one copy for all, and no index to upload.
        spans, end = list[tuple[int, int]](), 0
        for entry in batch.requests:
            end += entry.num_scheduled_tokens
            start = end - entry.num_samples
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            if start < end:
                spans.append((start, end))
        if not spans:
            return
        if spans != [(0, end)] or self._runner.overlaps:  # the next step overwrites them
            rows = torch.cat([rows[start:end] for start, end in spans])
        first = 0
        for entry in batch.requests:
            count = entry.num_samples
            if count:
                if self._known(entry.request) is None:
                    self._followed[entry.request] = Followed.begin(entry.request)
                start, part = entry.end - count, (rows, first, first + count)
                self._followed[entry.request].rows = HiddenRows(start, entry.end, [part])
                first += count

    def _follow(self, request: Request) -> Followed | None:
        followed = super()._follow(request)
        # The newest token has no hidden state yet.
        newest = len(request.token_ids) - 1
        if followed is None or not followed.rows.start < newest <= followed.rows.end:
            return None
        followed.num_known = followed.num_seen = newest
        return followed
