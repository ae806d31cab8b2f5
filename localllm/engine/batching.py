"""Turns a scheduled batch, which is plain Python, into the tensors of one forward pass."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.engine.scheduler import ScheduledBatch, ScheduledRequest
from localllm.model.inputs import ForwardBatch, GroupTables
from localllm_kernels.state_cache import StateSave, StateSlots


def build_forward_batch(
    batch: ScheduledBatch,
    tables: Sequence[int],
    block_size: int,
    row_multiple: int,
    device: torch.device,
) -> ForwardBatch:
    """Tensors of `batch` on `device`, token rows and logit rows padded to `row_multiple`.

    `tables`: for each group of the model's cache, the index of the request's table that it uses.
    Padding rows are computed as token 0 at position 0, and their results are never read.
    """
    scheduled = batch.requests
    counts = [entry.num_scheduled_tokens for entry in scheduled]
    skipped = [entry.num_skipped * block_size for entry in scheduled]
    starts = [entry.start - count for entry, count in zip(scheduled, skipped, strict=True)]
    ends = [entry.end - count for entry, count in zip(scheduled, skipped, strict=True)]
    num_tokens = sum(counts)
    padded = num_tokens + -num_tokens % row_multiple
    input_ids = np.zeros(padded, dtype=np.int64)
    positions = np.zeros(padded, dtype=np.int64)
    which = dict.fromkeys(tables)
    slot_mappings = {table: np.empty(num_tokens, dtype=np.int64) for table in which}
    block_tables = {table: _empty_tables(scheduled, table) for table in which}
    row = 0
    for i, entry in enumerate(scheduled):
        rows = slice(row, row + counts[i])
        input_ids[rows] = entry.token_ids
        positions[rows] = own = np.arange(starts[i], ends[i])
        for number in which:
            table = np.array(entry.request.tables[number][entry.num_skipped :], dtype=np.int32)
            block_tables[number][i, : len(table)] = table
            slot_mappings[number][rows] = slots_of(own, table, block_size)
        row += counts[i]
    cu_seqlens_q = np.array([0, *accumulate(counts)], dtype=np.int32)
    sampled = sampled_rows(scheduled, cu_seqlens_q[1:])
    logit_rows = np.zeros(len(sampled) + -len(sampled) % row_multiple, dtype=np.int64)
    logit_rows[: len(sampled)] = sampled

    def to_device(values: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values).to(device)

    found = {
        number: GroupTables(to_device(slot_mappings[number]), to_device(block_tables[number]))
        for number in which
    }
    return ForwardBatch(
        input_ids=to_device(input_ids),
        positions=to_device(positions),
        tables=tuple(found[number] for number in tables),
        cu_seqlens_q=to_device(cu_seqlens_q),
        seq_lens=to_device(np.array(ends, dtype=np.int64)),
        max_query_len=max(counts),
        logit_rows=to_device(logit_rows),
        num_logit_rows=len(sampled),
        states=state_slots(batch),
    )


def state_slots(batch: ScheduledBatch) -> StateSlots:
    """Where the batch's requests keep recurrent state, and the snapshots to take of it."""
    scheduled = batch.requests
    saves = (
        StateSave(each.index, each.position - scheduled[each.index].start, each.slot)
        for each in batch.state_saves
    )
    return StateSlots(
        tuple(entry.request.slot for entry in scheduled),
        (0, *accumulate(entry.num_scheduled_tokens for entry in scheduled)),
        tuple(entry.start for entry in scheduled),
        tuple(entry.stands for entry in scheduled),
        tuple(each.stands if each.keeps_state else each.known_end for each in scheduled),
        tuple(sorted(saves, key=lambda each: (each.request, each.num_rows))),
    )


def _empty_tables(scheduled: Sequence[ScheduledRequest], number: int) -> npt.NDArray[np.int32]:
    longest = max(len(entry.request.tables[number]) for entry in scheduled)
    return np.zeros((len(scheduled), longest), dtype=np.int32)


def sampled_rows(
    scheduled: Sequence[ScheduledRequest], ends: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """The rows of a batch whose next tokens are sampled, in order.

    `ends`: for each request, one past its last row.
    """
    counts = np.array([entry.num_samples for entry in scheduled], dtype=np.int64)
    firsts: npt.NDArray[np.int64] = ends.astype(np.int64) - counts
    rows: npt.NDArray[np.int64] = np.repeat(firsts, counts) + within(counts)
    return rows


def within(counts: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """The index of each item within its group, for groups of `counts` items: 0, 1, 2, 0, 1, …"""
    firsts = np.cumsum(counts) - counts
    places: npt.NDArray[np.int64] = np.arange(counts.sum()) - np.repeat(firsts, counts)
    return places


def slots_of(
    positions: npt.NDArray[np.int64], table: npt.NDArray[np.int32], block_size: int
) -> npt.NDArray[np.int64]:
    """The cache slots of a request's `positions`, looked up in its block table."""
    return table[positions // block_size].astype(np.int64) * block_size + positions % block_size
