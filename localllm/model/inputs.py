"""A batch of a forward pass: its tokens, and where their keys and values are stored."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localllm_kernels.recurrence.state_cache import States


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Where a batch's keys and values are stored in the cache of one group."""

    slot_mapping: Tensor  # int64 [num_tokens], slot of each new token's key and value
    block_tables: Tensor  # int32 [num_seqs, max_blocks], padded with 0
    # Where they are uncoded, in another group.
    uncoded: "GroupTables | None" = None

    @property
    def uncoded_slots(self) -> Tensor | None:
        """As `slot_mapping`."""
        return None if self.uncoded is None else self.uncoded.slot_mapping

    @property
    def uncoded_tables(self) -> Tensor | None:
        """As `block_tables`."""
        return None if self.uncoded is None else self.uncoded.block_tables


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The new tokens of all scheduled requests, one request after another.

    `input_ids` and `positions` may have padding rows after those of `slot_mapping`; so may
    `logit_rows` after the first `num_logit_rows`. `tables` has one entry per cache group.
    """

    input_ids: Tensor  # int64 [padded_tokens]
    positions: Tensor  # int64 [padded_tokens]
    tables: tuple[GroupTables, ...]
    cu_seqlens_q: Tensor  # int32 [num_seqs + 1], where each request's tokens start
    seq_lens: Tensor  # int64 [num_seqs], tokens of each request up to its last new one
    max_query_len: int  # the largest number of new tokens in a request
    logit_rows: Tensor  # int64 [padded_rows], the rows whose logits are wanted
    num_logit_rows: int
    # Where recurrences keep their state, None if the model has none.
    states: States | None = None
    # [padded_tokens, hidden], of a head: the target's hidden state before each token.
    hidden: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """New tokens, without padding."""
        return self.tables[0].slot_mapping.shape[0]

    def of_logit_rows(self) -> "ForwardBatch":
        """The batch of the rows `logit_rows`, the last ones of requests, for stateless layers."""
        rows = self.logit_rows[: self.num_logit_rows]
        return replace(
            self,
            input_ids=self.input_ids[self.logit_rows],
            positions=self.positions[self.logit_rows],
            # How many of the rows lie before each request.
            cu_seqlens_q=torch.searchsorted(rows, self.cu_seqlens_q.long()).int(),
            max_query_len=min(self.max_query_len, self.num_logit_rows),
        )
