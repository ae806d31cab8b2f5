"""How a decoder divides the memory of its device, with its experts and whoever drafts for it."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from localllm.drafting.head_source import HeadMemory, head_memory
from localllm.engine.chosen_device import KV_DTYPES, as_cached, step_tokens
from localllm.engine.config import EngineConfig
from localllm.engine.expert_memory import ExpertSizes, plan_experts
from localllm.engine.memory import MemoryPlan, plan_memory, step_width
from localllm.engine.step_inputs import graph_rows
from localllm.model.architecture import Architecture
from localllm.model.found_head import FoundHead
from localllm_kernels.attention.kv_cache import row_bytes
from localllm_kernels.compiling.traits import Traits

# Whole contexts that a cache holds in the memory of all programs, unless a context was asked for:
# an engine that runs long fills it all, with prompts that may come again.
_CPU_CONTEXTS = 4
# What a process with an engine holds besides its model (Python, torch and localllm), and for each
# token of a vocabulary. Measured with torch 2.13 for CPUs, 2026-11.
_PROGRAM_BYTES, _TOKEN_BYTES = 262_000_000, 370


@dataclass(frozen=True, slots=True)
class DecoderMemory:
    """What the memory of a decoder depends on, besides its configuration.

    `device`: cpu or cuda; `weights_bytes`: without the head, `unread_bytes` of which stay in their
    file; `experts`: None if there are none;
    `draft`: the plan of the model that drafts for it.
    """

    architecture: Architecture
    device: str
    traits: Traits
    dtype: torch.dtype
    weights_bytes: int
    experts: ExpertSizes | None
    draft: MemoryPlan | None
    unread_bytes: int = 0

    def plan(self, config: EngineConfig, free_bytes: int, head: FoundHead | None) -> MemoryPlan:
        """Divide `free_bytes`, with `head` beside the decoder. Raises: as `plan_experts`."""
        kv_dtype = KV_DTYPES.get(config.kv_cache_dtype, self.dtype)
        row = partial(row_bytes, dtype=kv_dtype)
        of_head = head_memory(head, self.dtype.itemsize, row, config.block_size)

        def plan(weights_bytes: int, config: EngineConfig, *, is_captured: bool) -> MemoryPlan:
            return plan_memory(
                as_cached(self.architecture, kv_dtype),
                config,
                max_num_batched_tokens=config.max_num_batched_tokens or step_tokens(self.device),
                weights_bytes=weights_bytes,
                item_bytes=self.dtype.itemsize,
                row_bytes=row,
                free_bytes=free_bytes,
                graph_rows=self._graph_rows(config, of_head) if is_captured else 0,
                draft_token_bytes=of_head.token_bytes
                + (self.draft.draft_token_bytes if self.draft else 0),
                draft_bytes=of_head.waiting_bytes
                + (self.draft.besides_cache_bytes if self.draft else 0),
                gathers=self.traits.gathers,
                most_contexts=_CPU_CONTEXTS if self.device == "cpu" else None,
            )

        divided = plan_experts(
            plan,
            self.weights_bytes + of_head.weights_bytes,
            self.experts,
            config,
            self.architecture,
            self.traits,
        )
        if self.device != "cpu":
            return divided
        model = self.architecture
        step_values = divided.max_num_batched_tokens * step_width(model) + 3 * model.vocab_size
        parts = (
            _PROGRAM_BYTES + _TOKEN_BYTES * model.vocab_size,
            divided.weights_bytes - self.unread_bytes,
            divided.one_context_bytes + divided.states_bytes,
            4 * step_values,
        )
        return replace(divided, resident_bytes=sum(parts))

    def _graph_rows(self, config: EngineConfig, of_head: HeadMemory) -> int:
        has_graphs = self.device == "cuda" and self.traits.captures
        return of_head.num_models * graph_rows(config.max_num_seqs) if has_graphs else 0
