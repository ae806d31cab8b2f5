"""A text as one batch over a cache of its own, as tests compute it at once."""

import torch
from torch import Tensor

from localllm.model.architecture import SlotSizes
from localllm.model.decoder import DecoderModel
from localllm.model.inputs import ForwardBatch, GroupTables
from localllm.model.paged_kv_cache import PagedKVCache
from localllm_kernels.recurrence.state_cache import StateSlots


def whole_text(
    model: DecoderModel, token_ids: list[int], hidden: Tensor | None = None
) -> tuple[ForwardBatch, PagedKVCache]:
    """All tokens of a text, without logits. `hidden`: of a head, the hidden state before each
    token; the first one then stands at position 1.
    """
    first = 0 if hidden is None else 1
    size = -(-(first + len(token_ids)) // 16) * 16
    groups = len(model.architecture.cache_groups)
    cpu = torch.device("cpu")
    slots = SlotSizes(1) if model.architecture.recurrent_groups else None
    dtype = model.embedding.dtype
    cache = PagedKVCache.allocate(model.architecture, [2] * groups, size, dtype, cpu, slots)
    count = len(token_ids)
    states = None if slots is None else StateSlots((0,), (0, count), (0,), (0,), (count,), ())
    positions = torch.arange(first, first + len(token_ids))
    table = GroupTables(positions + size, torch.ones(1, 1, dtype=torch.int32))
    padding = -len(token_ids) % model.ops.traits.row_unit
    zeros = torch.zeros(padding, dtype=torch.int64)
    if hidden is not None:
        hidden = torch.cat((hidden, hidden.new_zeros(padding, hidden.shape[1])))
    batch = ForwardBatch(
        input_ids=torch.cat((torch.tensor(token_ids), zeros)),
        positions=torch.cat((positions, zeros)),
        tables=(table,) * groups,
        cu_seqlens_q=torch.tensor([0, len(token_ids)], dtype=torch.int32),
        seq_lens=torch.tensor([first + len(token_ids)]),
        max_query_len=len(token_ids),
        logit_rows=torch.empty(0, dtype=torch.int64),
        num_logit_rows=0,
        states=states,
        hidden=hidden,
    )
    return batch, cache
