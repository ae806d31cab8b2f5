"""The memory plan is arithmetic: checked against values worked out by hand."""

from dataclasses import replace

import pytest
import torch
from checkpoints import tiny_config

from localllm.engine.config import EngineConfig
from localllm.engine.decoder_memory import DecoderMemory
from localllm.engine.memory import GroupMemory, MemoryPlan, describe_taken, plan_memory, reconcile
from localllm.errors import ExitCode, GpuMemoryError
from localllm.model.families.table import architecture_of
from localllm_kernels.backend import find_traits

MODEL = architecture_of(tiny_config("LlamaForCausalLM"))
# Two layers, two kv heads of 16, keys and values, float32: 512 bytes a token.
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
GIB = 1 << 30


def plan(
    config: EngineConfig, weights_bytes: int, free_bytes: int, most_contexts: int | None = None
) -> MemoryPlan:
    return plan_memory(
        MODEL,
        config,
        max_num_batched_tokens=16,
        weights_bytes=weights_bytes,
        item_bytes=4,
        row_bytes=lambda width: 4 * width,
        free_bytes=free_bytes,
        most_contexts=most_contexts,
    )


def test_the_cache_holds_the_context_of_every_request_where_there_is_room() -> None:
    config = EngineConfig(max_num_seqs=3, block_size=16)
    found = plan(config, 4000, GIB)
    assert found.max_model_len == 512
    assert found.groups[0].num_blocks == 3 * 512 // 16 + 1
    assert found.groups[0].block_bytes == 16 * TOKEN_BYTES
    assert found.weights_bytes == 4000


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_cache_in_4_bits_holds_3_6_times_the_tokens(head_dim: int) -> None:
    """With what every request has of its own keys as they are."""
    config = tiny_config("LlamaForCausalLM", head_dim=head_dim, max_position_embeddings=1 << 16)
    traits = find_traits("cpu", "torch", torch.bfloat16)
    memory = DecoderMemory(architecture_of(config), "cuda", traits, torch.bfloat16, 0, None, None)
    tokens = [
        memory.plan(EngineConfig(kv_cache_dtype=kind, max_num_seqs=64), GIB, None)
        for kind in ("bf16", "int4")
    ]
    assert [len(each.groups) for each in tokens] == [1, 2]
    assert tokens[1].cached_tokens >= 3.6 * tokens[0].cached_tokens


def test_an_explicit_number_of_tokens_is_not_kept_uncoded() -> None:
    """Of so many tokens, 8 requests keep 4 blocks each, and one of them a step's 2,048 besides."""
    config = EngineConfig(kv_cache_dtype="int4", kv_cache_tokens=1 << 16, max_num_seqs=8)
    traits = find_traits("cpu", "torch", torch.bfloat16)
    memory = DecoderMemory(MODEL, "cuda", traits, torch.bfloat16, 0, None, None)
    coded, uncoded = memory.plan(config, GIB, None).groups
    assert coded.num_blocks == (1 << 16) // 16 + 1
    assert uncoded.num_blocks == 1 + -(-(63 + 2048) // 16) + 7 * 4


def test_a_context_uses_as_many_blocks_of_windows_as_of_others_but_few_uncoded_ones() -> None:
    groups = (
        GroupMemory(None, 1000, num_blocks=33),
        GroupMemory(64, 100, num_blocks=7),
        GroupMemory(64, 10, num_blocks=7, is_aligned=True),
    )
    found = replace(plan(EngineConfig(block_size=16), 0, GIB), groups=groups)
    assert found.one_context_bytes == 32 * (1000 + 100) + 6 * 10


def test_what_nobody_asked_for_is_not_taken_from_other_programs() -> None:
    config = EngineConfig(max_num_seqs=3, block_size=16)
    found = plan(config, 4000, GIB, most_contexts=2)
    assert found.groups[0].num_blocks == 2 * 512 // 16 + 1
    asked = plan(replace(config, max_model_len=512), 4000, GIB, most_contexts=2)
    assert asked.groups[0].num_blocks == 3 * 512 // 16 + 1


@pytest.mark.parametrize(("device", "num_contexts"), [("cpu", 4), ("cuda", 64)])
def test_on_a_cpu_the_cache_leaves_memory_to_other_programs(device: str, num_contexts: int) -> None:
    traits = find_traits("cpu", "torch", torch.float32)
    memory = DecoderMemory(MODEL, device, traits, torch.float32, 0, None, None)
    assert memory.plan(EngineConfig(), 64 * GIB, None).cached_tokens == num_contexts * 512


def test_without_an_explicit_context_what_fits_is_taken() -> None:
    config = EngineConfig(max_num_seqs=1, gpu_memory_utilization=1.0)
    small = plan(replace(config, max_model_len=9 * 16), 0, GIB)
    # Room for ten blocks, one of them the null block, with what attention takes for nine.
    free_bytes = small.activations_bytes + 10 * 16 * TOKEN_BYTES
    found = plan(config, 0, free_bytes)
    assert found.max_model_len == 9 * 16
    assert found.groups[0].num_blocks == 10
    assert plan(config, 0, free_bytes - 1).max_model_len == 8 * 16


def test_a_long_context_that_the_model_knows_takes_nothing_where_it_does_not_fit() -> None:
    long = replace(MODEL, max_position_embeddings=1 << 20)
    sizes = {"max_num_batched_tokens": 16, "weights_bytes": 0, "item_bytes": 2}
    sizes |= {"row_bytes": lambda width: 2 * width}
    found = plan_memory(long, EngineConfig(max_num_seqs=1), free_bytes=64 << 20, **sizes)
    assert 10_000 < found.max_model_len < 1 << 20
    together = found.activations_bytes + found.kv_bytes
    assert 0 <= found.budget_bytes - together < 100_000  # less than sixteen tokens more would take
    # Kernels that read blocks where they are leave more to the cache.
    alone = plan_memory(
        long, EngineConfig(max_num_seqs=1), free_bytes=64 << 20, gathers=False, **sizes
    )
    assert alone.max_model_len > 2 * found.max_model_len


def test_an_explicit_context_that_does_not_fit_is_an_error_with_the_parts() -> None:
    config = EngineConfig(max_model_len=512)
    with pytest.raises(GpuMemoryError, match=r"weights 0\.00 GiB.*512 tokens of context") as caught:
        plan(config, 4000, 1 << 20)
    assert caught.value.exit_code == ExitCode.MEMORY


def test_an_explicit_cache_may_be_smaller_than_a_context() -> None:
    config = EngineConfig(kv_cache_tokens=100, block_size=16)
    found = plan(config, 4000, GIB)
    assert found.groups[0].num_blocks == 6 + 1


def test_a_reserve_is_left_where_it_is_more_than_the_share() -> None:
    config = EngineConfig(gpu_memory_utilization=0.9, reserve_bytes=GIB // 2)
    assert plan(config, 0, GIB).budget_bytes == GIB // 2
    assert plan(config, 0, 10 * GIB).budget_bytes == 9 * GIB
    with pytest.raises(GpuMemoryError, match=r"of which 0\.00 GiB may be used"):
        plan(EngineConfig(max_model_len=512, reserve_bytes=2 * GIB), 0, GIB)


def test_captured_steps_have_their_place() -> None:
    found = plan_memory(
        MODEL,
        EngineConfig(max_num_seqs=1),
        max_num_batched_tokens=16,
        weights_bytes=0,
        item_bytes=2,
        row_bytes=lambda width: 2 * width,
        free_bytes=GIB,
        graph_rows=7,
    )
    assert found.graphs_bytes >= 7 * MODEL.vocab_size * 6
    assert "graphs" in found.describe()
    assert "graphs" not in plan(EngineConfig(max_num_seqs=1), 0, GIB).describe()


def test_weights_that_take_more_than_planned_are_taken_from_the_cache() -> None:
    config = EngineConfig(max_num_seqs=3, gpu_memory_utilization=1.0)
    # Just enough for what is wanted, the weights not counted.
    wanted = plan(config, 0, GIB)
    planned = plan(config, 4000, wanted.activations_bytes + wanted.kv_bytes + 4000)
    assert reconcile(planned, config, planned.free_bytes - 4000) == planned
    lost = 5 * planned.groups[0].block_bytes
    found = reconcile(planned, config, planned.free_bytes - 4000 - lost)
    assert found.groups[0].num_blocks == planned.groups[0].num_blocks - 5
    assert found.weights_bytes == 4000 + lost
    assert found.max_model_len == planned.max_model_len
    line = describe_taken(found, planned, GIB)
    assert "1.00 GiB still free" in line
    assert "planned" in line


def test_a_context_that_no_longer_fits_is_shortened_or_an_error() -> None:
    config = EngineConfig(max_num_seqs=1, gpu_memory_utilization=1.0)
    wanted = plan(config, 0, GIB)
    free_bytes = wanted.activations_bytes + wanted.kv_bytes
    asked = EngineConfig(max_num_seqs=1, gpu_memory_utilization=1.0, max_model_len=512)
    taken = 4 * wanted.groups[0].block_bytes
    found = reconcile(plan(config, 0, free_bytes), config, free_bytes - taken)
    assert found.max_model_len == 512 - 4 * 16
    with pytest.raises(GpuMemoryError, match="now that the weights are loaded"):
        reconcile(plan(asked, 0, free_bytes), asked, free_bytes - taken)
    with pytest.raises(GpuMemoryError, match="now that the weights are loaded"):
        reconcile(plan(config, 0, free_bytes), config, 0)


def test_a_process_holds_its_program_its_weights_and_one_context() -> None:
    traits = find_traits("cpu", "torch", torch.float32)

    def resident(config: EngineConfig, device: str = "cpu", unread_bytes: int = 0) -> int:
        parts = (MODEL, device, traits, torch.float32, GIB, None, None, unread_bytes)
        return DecoderMemory(*parts).plan(config, 64 * GIB, None).resident_bytes

    config = EngineConfig(max_num_seqs=16, max_model_len=512)
    whole = resident(config)
    assert 250_000_000 < whole - GIB < 350_000_000  # Python and torch
    assert resident(replace(config, max_num_seqs=64)) == whole  # of others' contexts none
    assert whole - resident(replace(config, max_model_len=256)) == 256 * TOKEN_BYTES
    assert whole - resident(replace(config, kv_cache_tokens=256)) == 256 * TOKEN_BYTES
    assert whole - resident(config, unread_bytes=1000) == 1000
    assert resident(config, "cuda") == 0
