"""Runs the model on scheduled batches and samples tokens; owns the KV tensors."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from localllm.engine.batching import build_forward_batch
from localllm.engine.sampler import MIN_TEMPERATURE, noise_key, sample_tokens
from localllm.engine.thread_count import ThreadCount
from localllm.model.decoder import DecoderModel
from localllm.model.fused.cpu_head import DraftRequest
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.schedule.request import Request
from localllm.schedule.runner import Computed, HeadDraft, HeadRunner, Launched
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import ScheduledBatch, ScheduledRequest

# After a pause of this many seconds, more threads are tried again soon.
_PAUSE_S = 0.3


def own_tables(kv_cache: PagedKVCache) -> range:
    """Table indices for a cache in which each group uses the table with its own number."""
    return range(len(kv_cache.stacks))


def wanted_taps(taps: Sequence[int], model: DecoderModel, batch: ScheduledBatch) -> Sequence[int]:
    """A runner's taps, and the last norm's where prompts are scored."""
    return (*taps, len(model.layers)) if batch.scores_prompts else taps


class ModelRunner(HeadRunner):
    """Runs a model and its cache one batch at a time: for a CPU, where nothing can overlap."""

    overlaps = False
    is_warm = True

    def __init__(
        self,
        model: DecoderModel,
        kv_cache: PagedKVCache,
        threads: ThreadCount | None = None,
        tables: Sequence[int] | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        """`threads`: decides how many threads compute a step on a CPU; None: as many as torch has.
        `tables`: see `build_forward_batch`; None: each group uses its own. `taps`: see
        `DecoderModel.forward_tapped`.
        """
        self._taps = taps
        # The newest batch's hidden states, see Launched.
        self._hidden: tuple[Tensor, ...] = ()
        self._model = model
        self._kv_cache = kv_cache
        self._tables = own_tables(kv_cache) if tables is None else tables
        self._threads = threads
        self._ended_s = 0.0
        self._device = model.embedding.device
        is_float32 = self._device.type == "cpu" and model.embedding.dtype == torch.float32
        self._row_multiple = model.ops.traits.row_unit if is_float32 else 1

    def needs_ids(self, params: SamplingParams) -> bool:
        return True

    def launch(self, batch: ScheduledBatch, hidden: Tensor | None = None) -> Launched:
        began_s = time.perf_counter()
        num_rows = sum(entry.num_scheduled_tokens for entry in batch.requests)
        has_prompt = any(each.num_scheduled_tokens > 1 + len(each.draft) for each in batch.requests)
        if self._threads:
            if began_s - self._ended_s > _PAUSE_S:
                self._threads.look_again()
            count = self._threads.count(num_rows, has_prompt=has_prompt)
            if count != torch.get_num_threads():
                torch.set_num_threads(count)
        logits = self.forward(batch, hidden)
        caught_up = [entry for entry in batch.requests if entry.catches_up]
        sampled = sample_tokens(logits, caught_up, self._model.ops) if caught_up else []
        if self._threads:
            self._ended_s = time.perf_counter()
            self._threads.book(num_rows, self._ended_s - began_s, has_prompt=has_prompt)
        return Computed(sampled, self._hidden)

    def draft(self, drafts: Sequence[HeadDraft], hidden: Tensor) -> list[list[int]] | None:
        fused = self._model.fused_drafts
        if fused is None or any(_is_bound(each.entry.request) for each in drafts):
            return None
        asked = [self._draft_request(each.entry, each.num_drafts) for each in drafts]
        return fused(asked, hidden, self._kv_cache)

    def _draft_request(self, entry: ScheduledRequest, num_drafts: int) -> DraftRequest:
        request, temperature = entry.request, entry.request.params.temperature
        if temperature < MIN_TEMPERATURE:
            keys, temperature = [0] * num_drafts, 0.0
        else:
            keys = [noise_key(request.seed, entry.end + i) for i in range(num_drafts)]
        return DraftRequest(
            request.tables[self._tables[0]][entry.num_skipped :],
            entry.token_ids,
            entry.start - entry.num_skipped * self._kv_cache.block_size,
            num_drafts,
            keys,
            temperature,
        )

    def work_ahead(self) -> bool:
        return False

    def release_memory(self) -> None:
        """It keeps none."""

    @torch.inference_mode()
    def forward(self, batch: ScheduledBatch, hidden: Tensor | None = None) -> Tensor:
        """Compute the batch's tokens; returns the logits of the sampled positions, float32 [rows,
        vocab].
        """
        self._kv_cache.copy_blocks(self._tables, batch.block_copies)
        inputs = build_forward_batch(
            batch,
            self._tables,
            self._kv_cache.block_size,
            self._row_multiple,
            self._device,
            has_states=bool(self._kv_cache.recurrent),
        )
        if self._kv_cache.recurrent and self._device.type == "cuda":
            # Once for all layers, which read them from its memory.
            assert inputs.states is not None
            inputs = replace(inputs, states=inputs.states.on(self._device))
        if hidden is not None:
            padding = len(inputs.input_ids) - len(hidden)
            if padding:
                hidden = torch.cat((hidden, hidden.new_zeros(padding, hidden.shape[1])))
            inputs = replace(inputs, hidden=hidden)
        for load in batch.state_loads:
            self._kv_cache.write_state(load.slot, load.position, load.values)
        fused = self._model.fused
        with fused.team.alone() if fused and fused.team else nullcontext():
            wanted = wanted_taps(self._taps, self._model, batch)
            hidden, taps = self._model.forward_last(inputs, self._kv_cache, wanted)
        for save in batch.state_saves:
            save.values = self._kv_cache.read_state(save.slot, save.position)
        count = inputs.num_tokens
        self._hidden = tuple(tap if len(tap) == count else tap[:count] for tap in taps)
        if inputs.num_logit_rows == 0:
            return torch.empty((0, self._model.architecture.vocab_size), device=self._device)
        logits = self._model.compute_logits(hidden)
        return logits[: inputs.num_logit_rows]


def _is_bound(request: Request) -> bool:
    """Whether some tokens are forbidden or favoured."""
    return request.matcher is not None or bool(request.params.logit_bias)
