"""Both attention kernels under Triton's interpreter against the reference."""

import pytest
import torch
from guards import GuardedMemory, needs_interpreter
from paged_batch import MIXED, Batch

from localllm_kernels.kv_cache import KVCache
from localllm_kernels.launch import Workspace
from localllm_kernels.paged_attention_decode import paged_attention_decode
from localllm_kernels.paged_attention_prefill import paged_attention_prefill

pytestmark = needs_interpreter

KV_DTYPES = [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn]
CPU = torch.device("cpu")
# New tokens of one, or of a draft window; a request without any is one that has just ended.
WINDOWS = [(1, 1), (130, 1), (300, 4), (16, 0), (16, 1), (257, 2), (64, 1), (1025, 3)]


def guard_cache(memory: GuardedMemory, cache: KVCache) -> KVCache:
    parts = (cache.key, cache.value, cache.key_scales, cache.value_scales)
    return KVCache(*(None if part is None else memory.guarded(part) for part in parts))


def check_decode(
    batch: Batch, window: int | None, num_splits: int, workspace: Workspace | None = None
) -> None:
    expected = batch.attend(window)
    workspace = workspace or Workspace(CPU)
    counts = batch.cu_seqlens_q.diff()
    with GuardedMemory() as memory:
        found = paged_attention_decode(
            memory.guarded(batch.query),
            guard_cache(memory, batch.cache),
            workspace,
            block_tables=memory.guarded(batch.block_tables),
            cu_seqlens_q=memory.guarded(batch.cu_seqlens_q),
            seq_lens=memory.guarded(batch.seq_lens),
            max_query_len=int(counts.max()),
            scale=0.3,
            window=window,
            num_splits=num_splits,
        )
    memory.check()
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert not workspace.counters(1).any()


@pytest.mark.parametrize("num_splits", [1, 3, 7])
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_decode(heads: int, kv_heads: int, window: int | None, num_splits: int) -> None:
    check_decode(Batch(WINDOWS, heads, kv_heads), window, num_splits)


def test_only_as_many_programs_as_a_request_s_own_length_needs_have_a_part() -> None:
    """The others would write and count for nothing; a context of 100 tokens has one part."""

    class CountedWorkspace(Workspace):
        def __init__(self) -> None:
            super().__init__(CPU)
            self.given = torch.empty(0)

        def parts(self, count: int) -> torch.Tensor:
            self.given = torch.full((count,), torch.nan)
            return self.given

    num_splits = 8
    for length, num_parts in ((100, 0), (256, 0), (257, 2), (600, 3), (3000, 8)):
        workspace = CountedWorkspace()
        check_decode(Batch([(length, 1)], 4, 4), None, num_splits, workspace)
        written = ~workspace.given.view(4, num_splits, -1).isnan().all(dim=2)
        assert written.sum(dim=1).tolist() == [num_parts] * 4
    # Where a window hides the beginning, of what is left.
    workspace = CountedWorkspace()
    check_decode(Batch([(3000, 1)], 4, 4), 40, num_splits, workspace)
    assert workspace.given.isnan().all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [16, 24, 64])
def test_decode_over_values_in_fewer_bits(head_dim: int, kv_dtype: torch.dtype) -> None:
    check_decode(Batch(WINDOWS[:4], 6, 2, head_dim, kv_dtype), None, 2)


def check_prefill(batch: Batch, window: int | None) -> None:
    expected = batch.attend(window)
    with GuardedMemory() as memory:
        found = paged_attention_prefill(
            memory.guarded(batch.query),
            guard_cache(memory, batch.cache),
            Workspace(CPU),
            block_tables=memory.guarded(batch.block_tables),
            cu_seqlens_q=memory.guarded(batch.cu_seqlens_q),
            seq_lens=memory.guarded(batch.seq_lens),
            max_query_len=int(batch.cu_seqlens_q.diff().max()),
            scale=0.3,
            window=window,
        )
    memory.check()
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("window", [None, 1, 40, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_prefill(heads: int, kv_heads: int, window: int | None) -> None:
    check_prefill(Batch([*MIXED[:3], (20, 0), *MIXED[3:]], heads, kv_heads), window)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [16, 24, 64])
def test_prefill_over_values_in_fewer_bits(head_dim: int, kv_dtype: torch.dtype) -> None:
    check_prefill(Batch([(70, 70), (65, 1), (7, 3)], 6, 2, head_dim, kv_dtype), None)
