"""Drafts from an assistant, which reads the target's own keys and values; see model/assistant.py.

It keeps nothing of a text but the hidden states of the newest tokens, so it has nothing to catch up
with, and drafts for every request that decodes. A block that the step has still to copy is read as
it is, which may cost a draft.

It samples with the same noise as the target model, as a draft model does.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localllm.drafting.draft_steps import Drafting, draft_on
from localllm.drafting.drafter import NOT_KNOWN, Drafter, Proposal
from localllm.schedule.request import Request
from localllm.schedule.runner import HeadRunner
from localllm.schedule.scheduler import ScheduledBatch


@dataclass(slots=True)
class _Newest:
    """The hidden states of a request's newest tokens, those from position `start` on."""

    admission: int
    start: int
    rows: Tensor


class AssistantDrafter(Drafter):
    """Drafts with a runner of the assistant, whose cache is the target's."""

    _runner: HeadRunner

    def __init__(self, runner: HeadRunner, taps: Sequence[int], max_model_len: int) -> None:
        """`runner`: its tap is what stands for a hidden state for the next token; `taps`: the
        target's hidden state that it takes.
        """
        self._runner, self._taps, self._max_model_len = runner, taps, max_model_len
        self._newest: dict[Request, _Newest] = {}
        # Its copies of requests, of which their texts are only ever continued.
        self._texts: dict[Request, Request] = {}

    @property
    def taps(self) -> Sequence[int]:
        """See Drafter."""
        return self._taps

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
                own = rows[first : first + count]
                start = entry.end - count
                self._newest[entry.request] = _Newest(entry.request.admission, start, own)
                first += count

    def propose(self, request: Request, count: int) -> Proposal | None:
        """See Drafter: up to `count` tokens whose ids are not known yet."""
        newest, num_tokens = self._newest.get(request), len(request.token_ids)
        room = min(count, self._max_model_len - num_tokens)
        if newest is None or newest.admission != request.admission or room <= 0:
            return None
        # That before the newest token, which has no hidden state yet.
        if not newest.start <= num_tokens - 2 < newest.start + len(newest.rows):
            return None
        return Proposal([NOT_KNOWN] * room, 0)

    def complete(self, batch: ScheduledBatch, own: Collection[Request]) -> None:
        """See Drafter: runs one step of the assistant for each token of the longest draft."""
        drafting = [
            Drafting(i, self._text(entry.request), len(entry.draft), end, num_seen=end - 1)
            for i, entry in enumerate(batch.requests)
            if entry.draft and entry.request in own and (end := entry.known_end)
        ]
        if not drafting:
            return
        # Longest first, so that those still drafting at some depth are the first ones.
        drafting.sort(key=lambda each: -each.num_drafts)
        rows = list[Tensor]()
        for each in drafting:
            newest = self._newest[batch.requests[each.index].request]
            place = each.end - 2 - newest.start
            rows.append(newest.rows[place : place + 1])
        drafts = draft_on(self._runner, drafting, torch.cat(rows))
        for each, draft in zip(drafting, drafts, strict=True):
            batch.requests[each.index] = batch.requests[each.index]._replace(draft=draft)

    def forget(self, request: Request) -> None:
        """See Drafter."""
        self._newest.pop(request, None)
        self._texts.pop(request, None)

    def _text(self, request: Request) -> Request:
        """The assistant's copy of a request, as it is now."""
        text = self._texts.get(request)
        if text is None:
            params = replace(request.params, logprobs=None)
            text = self._texts[request] = replace(request, token_ids=[], params=params, scores=None)
        text.token_ids += request.token_ids[len(text.token_ids) :]
        text.tables, text.slot, text.admission = request.tables, request.slot, request.admission
        # Drafts follow the request's grammar, since others would be rejected.
        text.matcher = None if request.matcher is None else request.matcher.copy()
        return text
