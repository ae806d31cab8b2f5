"""What a forward pass reads besides the weights: one batch, and the paged KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from localllm.model.blocks.block import KVState
from localllm_kernels.kv_cache import CODE_LIMITS, KVCache


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
    max_query_len: int  # the most new tokens of a request
    logit_rows: Tensor  # int64 [padded_rows], the rows whose logits are wanted
    num_logit_rows: int


@dataclass(frozen=True, slots=True)
class PagedKVCache:
    """The caches of all layers: `stacked` with a first dimension of layers in each tensor."""

    stacked: KVCache

    def layer(self, index: int) -> KVCache:
        """The cache of one layer."""
        return self.stacked.layer(index)

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included."""
        return self.stacked.key.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens a block holds."""
        return self.stacked.key.shape[3]

    @classmethod
    def allocate(
        cls, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> "PagedKVCache":
        """Zeroed caches; `shape`: layers, blocks, key/value heads, block size, width of a head."""
        key, value = (_zeros(shape, dtype, device) for _ in range(2))
        if dtype not in CODE_LIMITS:
            return cls(KVCache(key, value))
        scales = (_zeros(shape[:-1], torch.float32, device) for _ in range(2))
        return cls(KVCache(key, value, *scales))

    @classmethod
    def of(
        cls,
        states: Sequence[KVState],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "PagedKVCache":
        """Zeroed caches of layers with such states, which have the same sizes."""
        [(num_heads, width)] = {(state.num_heads, state.width) for state in states}
        shape = (len(states), num_blocks, num_heads, block_size, width)
        return cls.allocate(shape, dtype, device)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, (from, to) in order: a later copy sees earlier ones."""
        for source, target in copies:
            for part in self._parts():
                part[:, target] = part[:, source]

    @property
    def block_bytes(self) -> int:
        """What a block takes in all layers."""
        return sum(part[:, 0].nbytes for part in self._parts())

    def read_block(self, block_id: int) -> Tensor:
        """What a block holds in all layers, uint8 [block_bytes], on the host."""
        parts = [part[:, block_id].contiguous().view(torch.uint8) for part in self._parts()]
        return torch.cat([part.flatten() for part in parts]).cpu()

    def write_block(self, block_id: int, values: Tensor) -> None:
        """Fill a block with what `read_block` gave."""
        start = 0
        for part in self._parts():
            block = part[:, block_id]
            own = values[start : start + block.nbytes]
            # A view of another type needs a storage that begins where such a value may.
            block.copy_(own.clone().view(part.dtype).view(block.shape))
            start += block.nbytes

    def _parts(self) -> list[Tensor]:
        own = self.stacked
        parts = (own.key, own.value, own.key_scales, own.value_scales)
        return [part for part in parts if part is not None]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks for zeroed pages, which the system hands out when they are first written;
    # torch.zeros would write gigabytes that may never be used.
    return (
        torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
    )
