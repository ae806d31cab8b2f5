"""How the memory is divided: a pure function from sizes to a plan, before a weight is read."""

from dataclasses import dataclass

from localllm.config import EngineConfig, ModelConfig
from localllm.errors import GpuMemoryError, RequestError

# What the reference attention holds at once, see localllm_kernels/paged_attention.py: a tile of
# queries against the context (scores, weights, mask), and gathered keys and values in float32.
_QUERY_TILE = 64
_MAX_GATHERED_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes for each part, tokens in a step, and the context and number of blocks they allow."""

    weights_bytes: int
    activations_bytes: int
    kv_block_bytes: int
    num_blocks: int  # the null block included
    max_model_len: int
    max_num_batched_tokens: int


def plan_memory(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    max_num_batched_tokens: int,
    weights_bytes: int,
    item_bytes: int,
    kv_row_bytes: int,
    free_bytes: int,
) -> MemoryPlan:
    """Divide `free_bytes` among weights, activations of steps of `max_num_batched_tokens`, and KV
    cache, whose keys (or values) of a head and token take `kv_row_bytes`.

    Without an explicit context, the context is the model's, or what fits. The cache holds
    `max_num_seqs` whole contexts if there is room, and at least one.

    Raises: GpuMemoryError with a table of the parts where not even that fits.
    """
    longest = engine.max_model_len or model.max_position_embeddings
    scores_bytes = 3 * 4 * _QUERY_TILE * model.num_heads * longest
    gathered_bytes = (
        2 * 4 * max(_MAX_GATHERED_VALUES, longest * model.num_kv_heads * model.head_dim)
    )
    width = 4 * model.hidden_size + 3 * model.intermediate_size
    width += 3 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    activations_bytes = (
        max_num_batched_tokens * width * max(item_bytes, 4)
        + 2 * engine.max_num_seqs * model.vocab_size * 4
        + scores_bytes
        + gathered_bytes
    )
    token_bytes = 2 * model.num_layers * model.num_kv_heads * kv_row_bytes
    block_bytes = token_bytes * engine.block_size
    usable = int(free_bytes * engine.gpu_memory_utilization) - weights_bytes - activations_bytes
    max_blocks = max(0, usable // block_bytes - 1)

    max_model_len = longest
    if engine.max_model_len is None:
        max_model_len = min(longest, max_blocks * engine.block_size)
    elif longest > model.max_position_embeddings:
        raise RequestError(
            f"the model knows {model.max_position_embeddings:,} positions, "
            f"a context of {longest:,} was asked for",
            param="max_model_len",
            hint=f"--ctx {model.max_position_embeddings}, or auto",
        )
    blocks_per_context = -(-max_model_len // engine.block_size)
    if engine.kv_cache_tokens is not None:
        num_blocks = engine.kv_cache_tokens // engine.block_size
    else:
        num_blocks = min(max_blocks, engine.max_num_seqs * blocks_per_context)
    plan = MemoryPlan(
        weights_bytes,
        activations_bytes,
        block_bytes,
        num_blocks + 1,
        max_model_len,
        max_num_batched_tokens,
    )
    # An explicit cache size may hold less than a context; requests are then held to the cache.
    fits = num_blocks >= (1 if engine.kv_cache_tokens else blocks_per_context)
    if num_blocks < 1 or not fits or num_blocks > max_blocks:
        raise GpuMemoryError(
            "the model does not fit into the free memory",
            where=f"weights {_gib(weights_bytes)}, activations {_gib(activations_bytes)}, "
            f"KV cache {_gib(block_bytes * max(num_blocks, blocks_per_context))} for "
            f"{max_model_len or longest:,} tokens of context; "
            f"free {_gib(free_bytes)}, of which {engine.gpu_memory_utilization:.0%} may be used",
            hint="a smaller --ctx, a smaller model, or --gpu-memory-utilization nearer to 1",
        )
    return plan


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
