"""The memory plan is arithmetic: checked against values worked out by hand."""

import pytest
from checkpoints import tiny_config

from localllm.config import EngineConfig, ModelConfig
from localllm.engine.memory import MemoryPlan, plan_memory
from localllm.errors import ExitCode, GpuMemoryError

MODEL = ModelConfig.from_hf(tiny_config("LlamaForCausalLM"))
# Two layers, two kv heads of 16, keys and values, float32: 512 bytes a token.
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
GIB = 1 << 30


def plan(config: EngineConfig, weights_bytes: int, free_bytes: int) -> MemoryPlan:
    return plan_memory(
        MODEL,
        config,
        max_num_batched_tokens=16,
        weights_bytes=weights_bytes,
        item_bytes=4,
        kv_row_bytes=64,
        free_bytes=free_bytes,
    )


def test_the_cache_holds_the_context_of_every_request_where_there_is_room() -> None:
    config = EngineConfig(max_num_seqs=3, block_size=16)
    found = plan(config, 4000, GIB)
    assert found.max_model_len == 512
    assert found.num_blocks == 3 * 512 // 16 + 1
    assert found.kv_block_bytes == 16 * TOKEN_BYTES
    assert found.weights_bytes == 4000


def test_without_an_explicit_context_what_fits_is_taken() -> None:
    config = EngineConfig(max_num_seqs=1, gpu_memory_utilization=1.0)
    roomy = plan(config, 0, GIB)
    # Room for ten blocks, one of them the null block.
    free_bytes = roomy.activations_bytes + 10 * 16 * TOKEN_BYTES
    found = plan(config, 0, free_bytes)
    assert found.max_model_len == 9 * 16
    assert found.num_blocks == 10


def test_an_explicit_context_that_does_not_fit_is_an_error_with_the_parts() -> None:
    config = EngineConfig(max_model_len=512)
    with pytest.raises(GpuMemoryError, match=r"weights 0\.00 GiB.*512 tokens of context") as caught:
        plan(config, 4000, 1 << 20)
    assert caught.value.exit_code == ExitCode.MEMORY


def test_an_explicit_cache_may_be_smaller_than_a_context() -> None:
    config = EngineConfig(kv_cache_tokens=100, block_size=16)
    found = plan(config, 4000, GIB)
    assert found.num_blocks == 6 + 1
