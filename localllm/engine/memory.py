"""How the memory is divided: a pure function from sizes to a plan, before a weight is read; and
what becomes of the plan once the weights are there.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

from localllm.engine.config import EngineConfig
from localllm.engine.speculation import MAX_DRAFTED_TOKENS
from localllm.errors import GpuMemoryError, RequestError
from localllm.model.architecture import Architecture
from localllm.model.blocks.block import RowBytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes for each part, tokens in a step, and the context and number of blocks they allow.

    `budget_bytes` may be used in all, of `free_bytes`; `graphs_bytes`: of captured steps.
    """

    free_bytes: int
    budget_bytes: int
    weights_bytes: int
    activations_bytes: int
    graphs_bytes: int
    kv_block_bytes: int
    num_blocks: int  # the null block included
    max_model_len: int
    max_num_batched_tokens: int

    @property
    def kv_bytes(self) -> int:
        """Of all blocks."""
        return self.num_blocks * self.kv_block_bytes

    def describe(self, block_size: int) -> str:
        """One line for a terminal."""
        graphs = f", graphs {_gib(self.graphs_bytes)}" if self.graphs_bytes else ""
        return (
            f"memory: weights {_gib(self.weights_bytes)}, KV cache {_gib(self.kv_bytes)} for "
            f"{(self.num_blocks - 1) * block_size:,} tokens (context {self.max_model_len:,}), "
            f"activations {_gib(self.activations_bytes)}{graphs}; "
            f"{_gib(self.budget_bytes)} of {_gib(self.free_bytes)} free may be used"
        )


def plan_memory(
    model: Architecture,
    engine: EngineConfig,
    *,
    max_num_batched_tokens: int,
    weights_bytes: int,
    item_bytes: int,
    row_bytes: RowBytes,
    free_bytes: int,
    graph_rows: int = 0,
    draft_token_bytes: int = 0,
    draft_bytes: int = 0,
    gathers: bool = True,
) -> MemoryPlan:
    """Divide `free_bytes` among weights, activations of steps of `max_num_batched_tokens`, KV
    cache, whose rows take `row_bytes`, and captured steps of `graph_rows` rows in all. A draft
    model, whose weights are there, takes `draft_token_bytes` more for each token of the cache,
    and `draft_bytes` for its steps.

    `gathers`: state is taken out of its blocks before it is read, as torch's operators do.

    Without an explicit context, the context is the model's, or what fits. The cache holds
    `max_num_seqs` whole contexts if there is room, and at least one.

    Raises: GpuMemoryError with a table of the parts where not even that fits.
    """
    width = 4 * model.hidden_size + model.workspace
    drafts = engine.speculation.drafter != "off"
    num_logit_rows = engine.max_num_seqs + MAX_DRAFTED_TOKENS * drafts
    # Of captured steps each keeps its logits, in the model's precision and in float32.
    graphs_bytes = graph_rows * (model.vocab_size * (4 + item_bytes) + width * item_bytes)
    step_bytes = max_num_batched_tokens * width * max(item_bytes, 4) + draft_bytes
    step_bytes += 3 * num_logit_rows * model.vocab_size * 4  # logits twice, and counts of tokens
    token_bytes = model.token_bytes(row_bytes) + draft_token_bytes
    block_bytes = token_bytes * engine.block_size
    budget_bytes = int(free_bytes * engine.gpu_memory_utilization)
    budget_bytes = max(0, min(budget_bytes, free_bytes - engine.reserve_bytes))
    left = budget_bytes - weights_bytes - graphs_bytes - step_bytes

    def attention_bytes(context: int) -> int:
        return model.gathered_bytes(context) if gathers else 0

    def blocks_beside(context: int) -> int:
        """Blocks that there is room for where requests have up to so many tokens."""
        return max(0, (left - attention_bytes(context)) // block_bytes - 1)

    longest = engine.max_model_len or model.max_position_embeddings
    max_model_len = longest
    if engine.max_model_len is None:
        contexts = range(engine.block_size, longest + engine.block_size, engine.block_size)
        count = bisect_left(
            contexts, True, key=lambda c: blocks_beside(c) * engine.block_size < min(c, longest)
        )
        max_model_len = min(longest, count * engine.block_size)
    elif longest > model.max_position_embeddings:
        raise RequestError(
            f"the model knows {model.max_position_embeddings:,} positions, "
            f"a context of {longest:,} was asked for",
            param="max_model_len",
            hint=f"--ctx {model.max_position_embeddings}, or auto",
        )
    max_blocks = blocks_beside(max_model_len)
    activations_bytes = step_bytes + attention_bytes(max_model_len)
    blocks_per_context = -(-max_model_len // engine.block_size)
    if engine.kv_cache_tokens is not None:
        num_blocks = engine.kv_cache_tokens // engine.block_size
    else:
        num_blocks = min(max_blocks, engine.max_num_seqs * blocks_per_context)
    plan = MemoryPlan(
        free_bytes,
        budget_bytes,
        weights_bytes,
        activations_bytes,
        graphs_bytes,
        block_bytes,
        num_blocks + 1,
        max_model_len,
        max_num_batched_tokens,
    )
    # An explicit cache size may hold less than a context; requests are then held to the cache.
    fits = num_blocks >= (1 if engine.kv_cache_tokens else blocks_per_context)
    if num_blocks < 1 or not fits or num_blocks > max_blocks:
        raise _does_not_fit(
            replace(plan, num_blocks=max(num_blocks, blocks_per_context)),
            f"{max_model_len or longest:,} tokens of context",
        )
    return plan


def reconcile(plan: MemoryPlan, engine: EngineConfig, free_bytes: int) -> MemoryPlan:
    """The plan once the weights are on the device, of which `free_bytes` are free now.

    The cache gets what is left, where that is less than was planned: weights that took more, or
    somebody else who came in the meantime.

    Raises: GpuMemoryError where not one context fits any more.
    """
    taken = max(0, plan.free_bytes - free_bytes)
    left = plan.budget_bytes - taken - plan.activations_bytes - plan.graphs_bytes
    num_blocks = min(plan.num_blocks, left // plan.kv_block_bytes)
    reconciled = replace(plan, weights_bytes=taken, num_blocks=num_blocks)
    held = (num_blocks - 1) * engine.block_size
    if held >= plan.max_model_len or (engine.kv_cache_tokens and held > 0):
        return reconciled
    if engine.max_model_len is None and held > 0:
        return replace(reconciled, max_model_len=held)
    blocks_per_context = -(-plan.max_model_len // engine.block_size)
    raise _does_not_fit(
        replace(reconciled, num_blocks=blocks_per_context),
        f"{plan.max_model_len:,} tokens of context, now that the weights are loaded",
    )


def describe_taken(plan: MemoryPlan, planned: MemoryPlan, free_bytes: int) -> str:
    """What became of a plan, one line for a terminal; `free_bytes` are free now."""
    cache = _gib(plan.kv_bytes)
    if plan.num_blocks != planned.num_blocks:
        cache += f" (planned {_gib(planned.kv_bytes)})"
    return (
        f"memory taken: weights {_gib(plan.weights_bytes)} "
        f"(planned {_gib(planned.weights_bytes)}), "
        f"KV cache {cache}; {_gib(free_bytes)} still free"
    )


def _does_not_fit(plan: MemoryPlan, context: str) -> GpuMemoryError:
    return GpuMemoryError(
        "the model does not fit into the free memory",
        where=f"weights {_gib(plan.weights_bytes)}, activations {_gib(plan.activations_bytes)}, "
        f"KV cache {_gib(plan.kv_bytes)} for {context}; "
        f"free {_gib(plan.free_bytes)}, of which {_gib(plan.budget_bytes)} may be used",
        hint="a smaller --ctx, a smaller model, less --reserve, or --gpu-memory-utilization 1",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
