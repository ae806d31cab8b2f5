"""Turns a scheduled batch, which is plain Python, into the tensors of one forward pass."""

from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from localllm.model.inputs import ForwardBatch, GroupTables
from localllm.schedule.scheduler import ScheduledBatch, ScheduledRequest
from localllm_kernels.recurrence.state_cache import StateSave, StateSlots


def build_forward_batch(
    batch: ScheduledBatch,
    tables: Sequence[int],
    block_size: int,
    row_multiple: int,
    device: torch.device,
    *,
    has_states: bool,
) -> ForwardBatch:
    """Tensors of `batch` on `device`, token rows and logit rows padded to `row_multiple`.

    `tables`: for each group of the model's cache, the index of the request's table that it uses;
    `has_states`: whether the model has recurrences. Padding rows are computed as token 0 at
    position 0, and their results are never read.
    """
    # Of small batches, lists are made faster than arrays, and one tensor faster than many.
    which = dict.fromkeys(tables)
    input_ids, positions, logit_rows = list[int](), list[int](), list[int]()
    ends, row_ends = list[int](), [0]
    slots = {number: list[int]() for number in which}
    for entry in batch.requests:
        skipped = entry.num_skipped * block_size
        start, end = entry.start - skipped, entry.end - skipped
        input_ids += entry.token_ids
        row_ends.append(len(input_ids))
        seen = entry.num_seen
        positions += range(start, end) if seen is None else [seen] * (end - start)
        ends.append(end if seen is None else seen)
        for number in which:
            own = entry.request.tables[number]
            slots[number] += _slots(own, entry.start, entry.end, block_size)
        logit_rows += range(len(input_ids) - entry.num_samples, len(input_ids))
    num_logit_rows = len(logit_rows)
    for padded in (input_ids, positions, logit_rows):
        padded += [0] * (-len(padded) % row_multiple)
    found = _tensors([input_ids, positions, ends, logit_rows, *slots.values()], device)
    of_tables = {
        number: GroupTables(own, _block_tables(batch.requests, number, device))
        for number, own in zip(which, found[4:], strict=True)
    }
    return ForwardBatch(
        input_ids=found[0],
        positions=found[1],
        tables=tuple(of_tables[number] for number in tables),
        cu_seqlens_q=_on_device(array("i", row_ends), torch.int32, device),
        seq_lens=found[2],
        max_query_len=max(entry.num_scheduled_tokens for entry in batch.requests),
        logit_rows=found[3],
        num_logit_rows=num_logit_rows,
        states=state_slots(batch) if has_states else None,
    )


def _slots(table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """The cache slots of a request's positions from `start` to `end`."""
    found = list[int]()
    for index in range(start // block_size, -(-end // block_size)):
        shift = (table[index] - index) * block_size
        last = min(end, (index + 1) * block_size)
        found += range(shift + max(start, index * block_size), shift + last)
    return found


def _block_tables(
    scheduled: Sequence[ScheduledRequest], number: int, device: torch.device
) -> Tensor:
    """The requests' tables of that number, int32 [num_seqs, max_blocks], padded with 0."""
    rows = [entry.request.tables[number][entry.num_skipped :] for entry in scheduled]
    longest, joined = max(map(len, rows)), array("i")
    for row in rows:
        joined.extend(row)
        joined.extend([0] * (longest - len(row)))
    return _on_device(joined, torch.int32, device).view(len(rows), longest)


def _tensors(parts: Sequence[list[int]], device: torch.device) -> Sequence[Tensor]:
    """Each part as a tensor, int64."""
    joined = array("q")
    for part in parts:
        joined.extend(part)
    return torch.split(_on_device(joined, torch.int64, device), [len(part) for part in parts])


def _on_device(values: "array[int]", dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.frombuffer(values, dtype=dtype).to(device)


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
