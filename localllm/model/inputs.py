"""What a forward pass reads besides the weights: one batch, and the paged KV cache."""

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The new tokens of all scheduled requests, one request after the other.

    Rows of `input_ids` and `positions` behind `slot_mapping` are padding to a whole number of
    rows; likewise `logit_rows` behind `num_logit_rows`.
    """

    input_ids: Tensor  # int64 [padded_tokens]
    positions: Tensor  # int64 [padded_tokens]
    slot_mapping: Tensor  # int64 [num_tokens], slot of each new token's key and value
    block_tables: Tensor  # int32 [num_seqs, max_blocks], padded with 0
    cu_seqlens_q: Tensor  # int32 [num_seqs + 1], where each request's tokens start
    seq_lens: Tensor  # int64 [num_seqs], tokens of each request up to its last new one
    logit_rows: Tensor  # int64 [padded_rows], the rows whose logits are wanted
    num_logit_rows: int


@dataclass(frozen=True, slots=True)
class PagedKVCache:
    """Keys and values of all layers; block 0 is the null block, which stays zero.

    Each: [num_layers, num_blocks, num_kv_heads, block_size, head_dim].
    """

    key: Tensor
    value: Tensor

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included."""
        return self.key.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens a block holds."""
        return self.key.shape[3]

    @classmethod
    def allocate(
        cls, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> "PagedKVCache":
        """Zeroed caches of `shape`, the order of dimensions as above."""
        return cls(_zeros(shape, dtype, device), _zeros(shape, dtype, device))

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, (from, to) in order: a later copy sees earlier ones."""
        for source, target in copies:
            self.key[:, target] = self.key[:, source]
            self.value[:, target] = self.value[:, source]


def _zeros(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks for zeroed pages, which the system hands out when they are first written;
    # torch.zeros would write gigabytes that may never be used.
    return (
        torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
    )
