"""Queries over a cache, for which the kernels of attention are compiled ahead of time."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localllm_kernels.attention.cache_arguments import CODES
from localllm_kernels.attention.four_bits import FOUR_BITS, KeyCoding
from localllm_kernels.attention.kv_cache import CODE_LIMITS, KVCache, row_bytes
from localllm_kernels.compiling.aot import Work
from localllm_kernels.compiling.launch import Workspace

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Example:
    """One request with heads as in an 8B model; as in DeepSeek V2 Lite, where values are the first
    `value_dim` numbers of the keys.
    """

    kind: str = "plain"
    dtype: str = "bf16"
    head_dim: int = 128
    value_dim: int | None = None
    has_window: bool = False
    has_cap: bool = False
    has_sinks: bool = False

    @property
    def words(self) -> str:
        """What is done to scores, for the name of a kernel."""
        found = {"window": self.has_window, "cap": self.has_cap, "sinks": self.has_sinks}
        return "".join(f", {name}" for name, is_there in found.items() if is_there)

    @property
    def work(self) -> Work:
        """Keys and values of 64 tokens for one head, or the rows that are both."""
        row = row_bytes(self.head_dim, CODES.get(self.kind, _DTYPES[self.dtype]))
        num_bytes = 64 * row * (2 if self.value_dim is None else 1)
        return Work("64 keys", 1 / 64, num_bytes, is_shared=True, times=("BLOCK_N",))

    def attend(self, call: Callable[..., Tensor], workspace: Workspace, num_rows: int) -> None:
        """Call a launcher; `num_rows`: queries times the heads that share keys."""
        heads, kv_heads = (32, 8) if self.value_dim is None else (16, 1)
        dtype, count = _DTYPES[self.dtype], num_rows * kv_heads // heads
        cache = example_cache(
            (65, kv_heads, 16, self.head_dim),
            CODES.get(self.kind, dtype),
            values_are_keys=self.value_dim is not None,
        )
        tables, uncoded_tables = torch.zeros(1, 64, dtype=torch.int32), None
        if cache.coding is not None:
            shape, same = (65, kv_heads, 16, self.head_dim), self.value_dim is not None
            uncoded = example_cache(shape, dtype, values_are_keys=same)
            cache, uncoded_tables = replace(cache, uncoded=uncoded), tables
        call(
            torch.empty(count, heads, self.head_dim, dtype=dtype),
            cache,
            workspace,
            block_tables=tables,
            uncoded_tables=uncoded_tables,
            cu_seqlens_q=torch.zeros(2, dtype=torch.int32),
            seq_lens=torch.zeros(1, dtype=torch.int64),
            max_query_len=count,
            scale=1.0,
            window=1024 if self.has_window else None,
            cap=50.0 if self.has_cap else None,
            sinks=torch.empty(heads) if self.has_sinks else None,
            value_dim=self.value_dim,
        )


def example_cache(
    shape: tuple[int, int, int, int], dtype: torch.dtype, *, values_are_keys: bool = False
) -> KVCache:
    """One that was never written; `shape`: blocks, key/value heads, block size, head width."""
    *outer, width = shape
    is_4_bit, scales, coding = dtype == FOUR_BITS, None, None
    key = torch.empty(*outer, width // 2 if is_4_bit else width, dtype=dtype)
    if is_4_bit or dtype in CODE_LIMITS:
        scales = torch.empty(outer, dtype=torch.bfloat16 if is_4_bit else torch.float32)
    if is_4_bit:
        coding = KeyCoding.plain((1, shape[1], width), key.device).layer(0)
    value = key if values_are_keys else torch.empty_like(key)
    return KVCache(key, value, scales, scales, coding=coding)
