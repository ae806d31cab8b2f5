"""How memory is divided: a pure function from sizes to a plan, before any weight is read, and the
correction of the plan once the weights are loaded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from localllm.drafting.asking import MAX_DRAFTED_TOKENS
from localllm.engine.config import EngineConfig
from localllm.errors import GpuMemoryError, RequestError
from localllm.model.architecture import Architecture, SlotSizes
from localllm.model.blocks.block import BlockSpec, RowBytes
from localllm.operators.listener import MEMORY
from localllm.schedule.block_group import most_blocks
from localllm.schedule.snapshots import snapshots_per_step


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Memory of a cache group: bytes of a block over all its layers, and the number of blocks,
    null block included. `window`, `is_aligned`: see BlockGroup.
    """

    window: int | None
    block_bytes: int
    num_blocks: int = 0
    is_aligned: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all its blocks."""
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes for each part, tokens in a step, and the resulting context and blocks of each cache
    group.

    `budget_bytes`: how much of `free_bytes` may be used in all; `graphs_bytes`: for captured steps;
    `states_bytes`: for what recurrences keep.
    """

    free_bytes: int
    budget_bytes: int
    weights_bytes: int
    activations_bytes: int
    graphs_bytes: int
    states_bytes: int
    groups: tuple[GroupMemory, ...]
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    # Experts of a layer that have a slot on the device, None for all; bytes of all, if they stay
    # in host memory.
    expert_slots: int | None = None
    host_bytes: int = 0
    # On a CPU, what the process holds once one request has filled its context.
    resident_bytes: int = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of all blocks of all groups."""
        return sum(group.num_bytes for group in self.groups)

    @property
    def besides_cache_bytes(self) -> int:
        """Bytes of all parts but weights and cache."""
        return self.activations_bytes + self.graphs_bytes + self.states_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes of all parts."""
        return self.weights_bytes + self.besides_cache_bytes + self.kv_bytes

    @property
    def one_context_bytes(self) -> int:
        """Bytes of the cache that one request has used at the end of its context: where there is
        room for several, blocks that a window has left are kept for prompts that come again.
        """
        num_tokens = min(self.max_model_len, self.cached_tokens)
        num_blocks = -(-num_tokens // self.block_size)
        # Uncoded keys of runs that have ended are not read again.
        return sum(
            group.block_bytes
            * (min(num_blocks, group.num_blocks - 1) if group.is_aligned else num_blocks)
            for group in self.groups
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of each further token: in full groups, or in all groups if there are none."""
        return sum(group.block_bytes for group in _growing(self.groups)) // self.block_size

    @property
    def draft_token_bytes(self) -> int:
        """Bytes of each token in a draft model's cache; all groups use the table of a full one, and
        there is none for its own keys.
        """
        groups = [group for group in self.groups if not group.is_aligned]
        return sum(group.block_bytes for group in groups) // self.block_size

    @property
    def cached_tokens(self) -> int:
        """The number of tokens that the cache holds at once."""
        return (min(group.num_blocks for group in _growing(self.groups)) - 1) * self.block_size

    def describe(self) -> str:
        """The plan in one line for a terminal."""
        states = f", states {_gib(self.states_bytes)}" if self.states_bytes else ""
        graphs = f", graphs {_gib(self.graphs_bytes)}" if self.graphs_bytes else ""
        host = f" (all experts: {_gib(self.host_bytes)} of host memory)" if self.host_bytes else ""
        resident = f"; {_gib(self.resident_bytes)} resident with one context"
        held = resident if self.resident_bytes else ""
        return (
            f"{MEMORY}: weights {_gib(self.weights_bytes)}{host}, KV cache {_gib(self.kv_bytes)} "
            f"for {self.cached_tokens:,} tokens (context {self.max_model_len:,}){states}, "
            f"activations {_gib(self.activations_bytes)}{graphs}{held}; "
            f"{_gib(self.budget_bytes)} of {_gib(self.free_bytes)} free may be used"
        )


def _growing(groups: Sequence[GroupMemory]) -> list[GroupMemory]:
    """The full groups, which grow with every token; all groups if none is full."""
    return [group for group in groups if group.window is None] or list(groups)


def step_width(model: Architecture) -> int:
    """Values that a step holds of each of its tokens."""
    return 4 * model.hidden_size + model.workspace


def slot_sizes(model: Architecture, engine: EngineConfig) -> SlotSizes:
    """The slots of recurrences: for every request, and for a step's snapshots."""
    drafts = engine.speculation.drafter != "off"
    max_draft = engine.speculation.max_draft if drafts else 0
    num_saves = snapshots_per_step(model.slot_bytes(max_draft))
    return SlotSizes(engine.max_num_seqs + num_saves, max_draft)


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
    most_contexts: int | None = None,
) -> MemoryPlan:
    """Divide `free_bytes` among weights, activations of steps of `max_num_batched_tokens` tokens,
    KV cache, whose rows take `row_bytes`, and captured steps of `graph_rows` rows in all.

    A draft model, whose weights are already loaded, takes `draft_bytes` for its steps, and
    `draft_token_bytes` more for each token in one full group; if there is no full group, one is
    added. `gathers`: attention copies keys and values out of their blocks before it reads them, as
    torch's operators do.

    Without an explicit context, the context is the model's, or as much of it as fits. The cache
    holds `max_num_seqs` whole contexts if there is room, `most_contexts` of those of the model's
    length, and at least one.

    Raises: GpuMemoryError with the size of each part if not even that fits.
    """
    longest = _wanted_context(model, engine)
    width = step_width(model)
    slots = slot_sizes(model, engine)
    states_bytes = slots.num_slots * model.slot_bytes(slots.max_draft)
    drafts = engine.speculation.drafter != "off"
    num_logit_rows = engine.max_num_seqs + MAX_DRAFTED_TOKENS * drafts
    # Each captured step keeps its logits, in the model's precision and in float32.
    graphs_bytes = graph_rows * (model.vocab_size * (4 + item_bytes) + width * item_bytes)
    step_bytes = max_num_batched_tokens * width * max(item_bytes, 4) + draft_bytes
    step_bytes += 3 * num_logit_rows * model.vocab_size * 4  # logits twice, and counts of tokens
    budget_bytes = int(free_bytes * engine.gpu_memory_utilization)
    budget_bytes = max(0, min(budget_bytes, free_bytes - engine.reserve_bytes))
    shares = _Shares(
        tuple(_group_memory(model, engine.block_size, row_bytes, item_bytes, draft_token_bytes)),
        engine.block_size,
        engine.max_num_seqs
        if engine.max_model_len or most_contexts is None
        else min(engine.max_num_seqs, most_contexts),
        max_num_batched_tokens,
    )
    left = budget_bytes - weights_bytes - graphs_bytes - step_bytes - states_bytes
    room = _Room(left, shares, tuple(model.blocks()) if gathers else ())
    context = room.longest(longest) if engine.max_model_len is None else longest
    plan = MemoryPlan(
        free_bytes,
        budget_bytes,
        weights_bytes,
        step_bytes + room.attention_bytes(context),
        graphs_bytes,
        states_bytes,
        shares.for_tokens(engine.kv_cache_tokens)
        if engine.kv_cache_tokens is not None
        else shares.divide(room.for_cache(context), context),
        engine.block_size,
        context,
        max_num_batched_tokens,
    )
    # An explicit cache size may be below one context; the cache then limits requests.
    needed = shares.one(context)
    has_room = engine.kv_cache_tokens is not None or 0 < needed <= room.for_cache(context)
    fits = has_room and context > 0 and all(g.num_blocks > 1 for g in plan.groups)
    if not fits or plan.kv_bytes > room.for_cache(context):
        raise _does_not_fit(
            replace(plan, groups=shares.for_one(max(context, plan.cached_tokens))),
            f"{context or longest:,} tokens of context",
        )
    return plan


def _wanted_context(model: Architecture, engine: EngineConfig) -> int:
    """The context that is asked for, or the model's. Raises: RequestError."""
    longest = model.max_position_embeddings
    wanted = engine.max_model_len or longest
    if wanted > longest:
        raise RequestError(
            f"the model has {longest:,} positions, but a context of {wanted:,} was requested",
            param="max_model_len",
            hint=f"--ctx {longest}, or auto",
        )
    return wanted


def _group_memory(
    model: Architecture,
    block_size: int,
    row_bytes: RowBytes,
    item_bytes: int,
    draft_token_bytes: int,
) -> Iterator[GroupMemory]:
    """The cache groups of a model and its draft model, with no blocks yet."""
    for group in model.cache_groups:
        is_plain, window = group.coded is not None, group.state.window
        token_bytes = group.token_bytes(item_bytes.__mul__ if is_plain else row_bytes)
        if window is None:
            token_bytes += draft_token_bytes
            draft_token_bytes = 0
        is_aligned = is_plain and window == model.own_keys
        yield GroupMemory(window, token_bytes * block_size, is_aligned=is_aligned)
    if draft_token_bytes:
        yield GroupMemory(None, draft_token_bytes * block_size)


# Beside full groups, a window group gets at most this fraction (1 / 4) of the cache, unless one
# request alone needs more.
_WINDOWS_SHARE = 4


@dataclass(frozen=True, slots=True)
class _Shares:
    """Divides a number of bytes among cache groups."""

    groups: tuple[GroupMemory, ...]
    block_size: int
    num_contexts: int
    chunk: int

    def held(self, group: GroupMemory, context: int, chunk: int | None = None) -> int:
        """The most blocks that a request of `context` tokens holds in `group`, in steps of `chunk`
        tokens; None: of as many as a step may have.
        """
        chunk = self.chunk if chunk is None else chunk
        aligned = group.is_aligned
        return most_blocks(group.window, self.block_size, context, chunk, is_aligned=aligned)

    def windows(self, group: GroupMemory, context: int, num_contexts: int) -> int:
        """The most blocks that so many requests hold in a window group: one of them may have a
        whole step's tokens, or all have some of these.
        """
        return self.held(group, context) + (num_contexts - 1) * self.held(group, context, 1)

    def for_one(self, context: int) -> tuple[GroupMemory, ...]:
        """The groups with blocks for a single request of `context` tokens."""
        return tuple(
            replace(group, num_blocks=1 + self.held(group, context)) for group in self.groups
        )

    def one(self, context: int) -> int:
        """Bytes for a single request of `context` tokens."""
        return sum(group.num_bytes for group in self.for_one(context))

    def for_tokens(self, num_tokens: int) -> tuple[GroupMemory, ...]:
        """The groups with blocks for an explicit number of tokens."""
        num_blocks, growing = num_tokens // self.block_size + 1, _growing(self.groups)
        return tuple(
            replace(
                group,
                num_blocks=num_blocks
                if group in growing
                else min(num_blocks, 1 + self.windows(group, num_tokens, self.num_contexts)),
            )
            for group in self.groups
        )

    def divide(self, num_bytes: int, context: int) -> tuple[GroupMemory, ...]:
        """The groups with blocks for as many requests of `context` tokens as fit, up to
        `num_contexts`.

        Window groups beside full ones get blocks for as many requests, as far as these take no
        more than a share of the bytes: shorter requests, of which more fit, need windows just as
        large.
        """
        growing = _growing(self.groups)
        windows = {
            group: self._window_blocks(group, num_bytes, context)
            for group in self.groups
            if group not in growing
        }
        left = num_bytes - sum(group.block_bytes * count for group, count in windows.items())
        room = left // sum(group.block_bytes for group in growing)
        most = self.num_contexts * -(-context // self.block_size)
        blocks = 1 + min(max(0, room - 1), most)
        return tuple(replace(group, num_blocks=windows.get(group, blocks)) for group in self.groups)

    def _window_blocks(self, group: GroupMemory, num_bytes: int, context: int) -> int:
        one, two = (self.windows(group, context, count) for count in (1, 2))
        room = num_bytes // _WINDOWS_SHARE // max(1, group.block_bytes) - one
        more = room // max(1, two - one)
        return 1 + self.windows(group, context, 1 + max(0, min(self.num_contexts - 1, more)))

    def hold(self, groups: Sequence[GroupMemory], context: int) -> bool:
        """Whether a request of `context` tokens fits into `groups`."""
        return all(group.num_blocks > self.held(group, context) for group in groups)


@dataclass(frozen=True, slots=True)
class _Room:
    """What is left for the KV cache and for the attention of a step, which copies keys and values
    of the `gathering` blocks.
    """

    num_bytes: int
    shares: _Shares
    gathering: tuple[BlockSpec, ...]

    def attention_bytes(self, context: int) -> int:
        """Bytes of the copies in a step."""
        return max((block.gathered_bytes(context) for block in self.gathering), default=0)

    def for_cache(self, context: int) -> int:
        """Bytes for the cache beside them."""
        return max(0, self.num_bytes - self.attention_bytes(context))

    def longest(self, most: int) -> int:
        """The longest context that a single request can have, up to `most`."""
        block_size = self.shares.block_size
        contexts = range(block_size, most + block_size, block_size)
        count = bisect_left(
            contexts, True, key=lambda c: self.shares.one(min(c, most)) > self.for_cache(c)
        )
        return min(most, count * block_size)


def reconcile(plan: MemoryPlan, engine: EngineConfig, free_bytes: int) -> MemoryPlan:
    """The plan once the weights are on the device, which now has `free_bytes` free.

    If less is left for the cache than planned, it gets what is left: the weights may have taken
    more, or another process may have taken memory meanwhile.

    Raises: GpuMemoryError if not even one context fits any more.
    """
    taken = max(0, plan.free_bytes - free_bytes)
    left = plan.budget_bytes - taken - plan.activations_bytes - plan.graphs_bytes
    groups = plan.groups
    if plan.kv_bytes > left:
        # Window groups stay as they are; the growing groups take the rest.
        growing = _growing(groups)
        rest = left - sum(group.num_bytes for group in groups if group not in growing)
        num_blocks = max(0, rest) // sum(group.block_bytes for group in growing)
        groups = tuple(
            replace(group, num_blocks=num_blocks) if group in growing else group for group in groups
        )
    reconciled = replace(plan, weights_bytes=taken, groups=groups)
    shares = _Shares(plan.groups, plan.block_size, 1, plan.max_num_batched_tokens)
    held = reconciled.cached_tokens
    if shares.hold(groups, plan.max_model_len) or (engine.kv_cache_tokens and held > 0):
        return reconciled
    if engine.max_model_len is None and held > 0:
        return replace(reconciled, max_model_len=held)
    raise _does_not_fit(
        replace(reconciled, groups=shares.for_one(plan.max_model_len)),
        f"{plan.max_model_len:,} tokens of context, now that the weights are loaded",
    )


def describe_taken(plan: MemoryPlan, planned: MemoryPlan, free_bytes: int) -> str:
    """How a plan turned out, in one line for a terminal; `free_bytes` are free now."""
    cache = _gib(plan.kv_bytes)
    if plan.groups != planned.groups:
        cache += f" (planned {_gib(planned.kv_bytes)})"
    return (
        f"{MEMORY} taken: weights {_gib(plan.weights_bytes)} "
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
