"""Runs batches on a GPU while Python goes on: inputs in one copy, steps of few tokens as graphs.

Only `wait` waits for the device, for the ids of a step that has been launched. The newest tokens
stay on the device, so the next step can start before the host knows them.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.engine.model_runner import own_tables, wanted_taps
from localllm.engine.sampler import accept_draft
from localllm.engine.slots import Slots
from localllm.engine.step_inputs import (
    DeviceInputs,
    Filled,
    StepShape,
    buckets,
    exact_shape,
    fill,
    fill_nothing,
    graph_rows,
    padded_shape,
)
from localllm.engine.token_masks import find_masks, forbid
from localllm.engine.warm_steps import WarmStep, warm_steps
from localllm.model.decoder import DecoderModel
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.operators.device import CaptureError, Device, is_fatal, is_out_of_memory
from localllm.schedule.logprobs import TokenLogprobs
from localllm.schedule.runner import HeadDraft, HeadRunner, Launched
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import SampledToken, ScheduledBatch, SchedulerConfig
from localllm_kernels.compiling.choice import LOOKING
from localllm_kernels.compiling.driver import KernelCompiledError, stopping_at_compilation

logger = logging.getLogger(__name__)

_NOTHING_LEFT = object()


@dataclass(slots=True)
class _Graph:
    replay: Callable[[], None]
    computed: "_Computed"


class _Computed(NamedTuple):
    """A step's results on the device: logits, float32 [rows, vocab], and the rows of each tap."""

    logits: Tensor
    taps: tuple[Tensor, ...]


class DeviceRunner(HeadRunner):
    """Runs a model and its cache on a device whose work overlaps with Python's."""

    overlaps = True

    def __init__(
        self,
        model: DecoderModel,
        kv_cache: PagedKVCache,
        device: Device,
        limits: SchedulerConfig,
        max_model_len: int,
        tuning: Iterator[None] | None = None,
        tables: Sequence[int] | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        """`tuning`: work for idle moments, one piece per iteration, once all steps are captured;
        `tables`, `taps`: see ModelRunner.
        """
        self._taps = taps
        self._model, self._kv_cache, self._device = model, kv_cache, device
        self._tables = own_tables(kv_cache) if tables is None else tables
        assert model.ops.sample is not None
        self._sample = model.ops.sample
        self._sizes = buckets(limits.max_num_seqs)
        self._graph_rows = graph_rows(limits.max_num_seqs)
        most_rows = self._sizes[-1]
        block_size = kv_cache.block_size
        where = model.embedding.device
        self._slots = Slots(limits.max_num_seqs, model.architecture.vocab_size, where)
        self._inputs = DeviceInputs(
            limits.max_num_seqs,
            max(limits.max_num_batched_tokens, most_rows),
            most_rows,
            -(-max_model_len // block_size),
            where,
            self._tables,
            kv_cache.num_slots - limits.max_num_seqs if kv_cache.recurrent else None,
            model.hidden_inputs,
        )
        # Two of each: one is filled while the other is being copied.
        self._hosts = [device.host_buffer(self._inputs.num_bytes) for _ in range(2)]
        ids_bytes = 8 * max(most_rows, limits.max_num_batched_tokens)
        self._id_hosts = [device.host_buffer(ids_bytes).view(torch.int64) for _ in range(2)]
        self._turn = 0
        self._warm_steps = warm_steps(
            self._sizes, limits.max_num_seqs, limits.max_num_batched_tokens
        )
        self._is_warm = False
        self._graphs: dict[StepShape, _Graph] = {}
        # Shapes that have run, so their kernels are compiled.
        self._seen: set[StepShape] = set()
        self._warmed: set[WarmStep] = set()
        # Shapes whose graphs did not fit into memory.
        self._without_room: set[StepShape] = set()
        # An operator whose host code reads device values cannot be captured.
        self._captures = not (model.looks or model.ops.choice.to_torch & LOOKING)
        self._tuning = tuning or iter(())

    def needs_ids(self, params: SamplingParams) -> bool:
        """Penalties are counted on the device."""
        return False

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, hidden: Tensor | None = None) -> Launched:
        if hidden is not None:
            assert self._inputs.hidden is not None
            self._inputs.hidden[: len(hidden)].copy_(hidden)
        try:
            return self._launch(batch)
        except BaseException:
            self._slots.forget()
            raise

    def draft(self, drafts: Sequence[HeadDraft], hidden: Tensor) -> list[list[int]] | None:
        """Token by token is fast enough, from captured graphs."""
        return None

    @property
    def is_warm(self) -> bool:
        return self._is_warm

    @torch.inference_mode()
    def work_ahead(self) -> bool:
        """Compiles one kernel, or captures a decode step that is still missing."""
        for step in self._warm_steps:
            if step not in self._warmed:
                self._warm(step)
                return True
            # Draft windows have many shapes; one is captured when it occurs again.
            is_decode = step.shape.samples_all and step.shape.max_query_len == 1
            is_missing = step.shape not in self._graphs and step.shape not in self._without_room
            if self._captures and is_decode and is_missing:
                self._seen.add(step.shape)
                self._capture(step.shape)
                return True
        self._is_warm = True
        return next(self._tuning, _NOTHING_LEFT) is not _NOTHING_LEFT

    def release_memory(self) -> None:
        self._device.mark()()  # a graph may be running
        self._graphs.clear()
        self._without_room.clear()
        self._device.release_memory()

    def _launch(self, batch: ScheduledBatch) -> Launched:
        self._turn = 1 - self._turn
        self._slots.admit(batch)
        self._kv_cache.copy_blocks(self._tables, batch.block_copies)
        self._write_states(batch)
        # What is captured has no more taps than the runner.
        padded = None if batch.scores_prompts else padded_shape(batch, self._sizes)
        shape = padded or exact_shape(batch)
        host = self._hosts[self._turn]
        caught_up = [entry for entry in batch.requests if entry.catches_up]
        block_size, tables = self._kv_cache.block_size, self._inputs.tables
        filled = fill(host.numpy(), batch, shape, self._slots, block_size, tables)
        self._upload(shape, filled.num_bytes, filled.table_shape)
        taps = wanted_taps(self._taps, self._model, batch)
        computed = self._compute(shape, taps) if padded is None else self._compute_padded(shape)
        logits = computed.logits
        take_states = self._read_states(batch)
        num_tokens = sum(entry.num_scheduled_tokens for entry in batch.requests)
        hidden = tuple(tap[:num_tokens] for tap in computed.taps)
        if len(filled.rows) == 0:

            def only_states() -> list[list[SampledToken]]:
                take_states()
                return []

            return _Launched(self._device.mark(), only_states, self._slots.forget, hidden)
        rows, factors = self._inputs.sampling_rows(shape, has_drafts=filled.has_drafts)
        rows = replace(
            rows,
            penalties=self._slots.penalties(batch, factors),
            biases=self._slots.biases(filled.slots),
        )
        wanted = _Wanted.of(batch, filled, logits)
        masks = find_masks(caught_up, logits.shape[1])  # while the device computes
        if masks is not None:
            forbid(logits, filled.rows[masks.rows].tolist(), masks.bits)
        ids = self._sample(logits, rows)
        target = self._id_hosts[self._turn][: len(ids)]
        self._device.download(target, ids)
        logprobs = wanted.compute(ids, self._device) if wanted else None

        def collect() -> list[list[SampledToken]]:
            take_states()
            found = target.numpy()[filled.rows].tolist()
            tokens = [SampledToken(None if token < 0 else token) for token in found]
            for i, values in (logprobs() if logprobs else {}).items():
                if tokens[i].token_id is not None:
                    tokens[i] = tokens[i]._replace(logprobs=values)
            rows = iter(tokens)
            sampled = [accept_draft(e.draft, list(islice(rows, e.num_samples))) for e in caught_up]
            for place, error in (masks.errors if masks else {}).items():
                sampled[place] = [SampledToken(None, error=error)]
            return sampled

        return _Launched(self._device.mark(), collect, self._slots.forget, hidden)

    def _write_states(self, batch: ScheduledBatch) -> None:
        """Start to fill the slots of requests that begin from a snapshot."""
        for load in batch.state_loads:
            host = self._device.host_buffer(load.values.nbytes)
            host.copy_(load.values)
            values = torch.empty_like(host, device=self._inputs.newest.device)
            self._device.upload(values, host)
            self._kv_cache.write_state(load.slot, load.position, values)

    def _read_states(self, batch: ScheduledBatch) -> Callable[[], None]:
        """Start to copy the batch's snapshots to the host; returns a function that hands them over
        once they have arrived.
        """
        arriving = []
        for save in batch.state_saves:
            values = self._kv_cache.gather_state(save.slot, save.position)
            arriving.append((save, self._device.host_buffer(values.nbytes)))
            self._device.download(arriving[-1][1], values)

        def take() -> None:
            for save, host in arriving:
                save.values = host.clone()  # memory that a device can copy to is scarce

        return take

    def _upload(self, shape: StepShape, num_bytes: int, table_shape: tuple[int, int, int]) -> None:
        self._device.upload(self._inputs.place(num_bytes), self._hosts[self._turn][:num_bytes])
        self._inputs.spread_tables(shape, table_shape)

    def _compute(self, shape: StepShape, taps: Sequence[int] | None = None) -> _Computed:
        """Compute a step from the inputs in the device's buffer; without `taps`, with its own."""
        wanted = self._taps if taps is None else taps
        batch = self._inputs.forward_batch(shape)
        forward = self._model.forward_tapped if shape.samples_all else self._model.forward_last
        hidden, tapped = forward(batch, self._kv_cache, wanted)
        return _Computed(self._model.compute_logits(hidden), tapped)

    def _compute_padded(self, shape: StepShape) -> _Computed:
        """The same, replayed if the shape has been captured; its second step captures it.

        The first step does not: a request waits for its token, and kernels must run once to be
        compiled.
        """
        if self._captures and shape in self._seen and shape not in self._graphs:
            self._capture(shape)
        graph = self._graphs.pop(shape, None)
        if graph is None:
            computed = self._compute(shape)
            self._seen.add(shape)
            return computed
        self._graphs[shape] = graph  # most recently used last
        graph.replay()
        return graph.computed

    def _capture(self, shape: StepShape) -> None:
        while shape.num_tokens + sum(each.num_tokens for each in self._graphs) > self._graph_rows:
            self._device.mark()()  # it may be running
            del self._graphs[next(iter(self._graphs))]  # the least recently used
        try:
            self._graphs[shape] = _Graph(*self._device.capture(lambda: self._compute(shape)))
        except CaptureError as error:
            if error.__cause__ is not None and is_out_of_memory(error.__cause__):
                self._seen.discard(shape)  # retried when the shape occurs again
                self._without_room.add(shape)
                return
            self._captures = False
            logger.warning(
                "steps cannot be captured, so kernels are launched one by one, which is slower: %s",
                error,
            )

    def _warm(self, step: WarmStep) -> None:
        """Run a step that stores and samples nothing, up to the first kernel that had to be
        compiled: a request that arrives meanwhile waits for one kernel at most.
        """
        shape = step.shape
        self._turn = 1 - self._turn
        tables = self._inputs.tables
        num_bytes = fill_nothing(self._hosts[self._turn].numpy(), shape, tables)
        self._upload(shape, num_bytes, (len(tables), 0, 0))
        rows, factors = self._inputs.sampling_rows(shape, has_drafts=step.has_drafts)
        rows = replace(
            rows,
            penalties=self._slots.no_penalties(factors) if step.has_penalties else None,
            biases=self._slots.no_biases(len(rows.slots)) if step.has_biases else None,
        )
        try:
            with stopping_at_compilation():
                self._sample(self._compute(shape).logits, rows)
            self._warmed.add(step)
        except KernelCompiledError:
            pass
        except Exception as error:
            if is_fatal(error):
                raise
            # A request that needs such a step will get the error; running requests go on.
            logger.warning("could not prepare %s: %s", step, error)
            self._warmed.add(step)
        finally:
            self._device.mark()()


@dataclass(frozen=True, slots=True)
class _Launched:
    arrived: Callable[[], None]
    collect: Callable[[], list[list[SampledToken]]]
    on_failure: Callable[[], None]
    hidden: tuple[Tensor, ...]

    def wait(self) -> list[list[SampledToken]]:
        try:
            self.arrived()
            return self.collect()
        except BaseException:
            self.on_failure()
            raise


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Rows whose log-probabilities are requested, with the logits before penalties.

    `which`: their indices among the sampled rows; `counts`: how many of the likeliest tokens.
    """

    which: list[int]
    counts: list[int]
    rows: Tensor
    logits: Tensor

    @classmethod
    def of(cls, batch: ScheduledBatch, filled: Filled, logits: Tensor) -> "_Wanted | None":
        each_row = chain.from_iterable(
            repeat(entry.request.params.logprobs, entry.num_samples) for entry in batch.requests
        )
        asked = [(i, count) for i, count in enumerate(each_row) if count is not None]
        if not asked:
            return None
        which, counts = [i for i, _ in asked], [count for _, count in asked]
        rows = torch.from_numpy(filled.rows[which]).to(logits.device, non_blocking=True)
        return cls(which, counts, rows, logits.index_select(0, rows))

    def compute(self, ids: Tensor, device: Device) -> Callable[[], dict[int, TokenLogprobs]]:
        """Start to compute them for the tokens `ids`; returns a function that reads them once the
        device is done.
        """
        logprobs = torch.log_softmax(self.logits, dim=-1)
        top = logprobs.topk(min(max(self.counts), logprobs.shape[1]), dim=-1)
        chosen = ids.index_select(0, self.rows).clamp(min=0)
        values = torch.cat((logprobs.gather(1, chosen[:, None]), top.values), dim=1)
        parts = []
        for part in (values.contiguous(), top.indices.contiguous()):
            parts.append(device.host_buffer(part.nbytes).view(part.dtype).view(part.shape))
            device.download(parts[-1], part)

        def collect() -> dict[int, TokenLogprobs]:
            host_values, host_ids = parts
            found = {}
            for i, count, own, tokens in zip(
                self.which, self.counts, host_values.tolist(), host_ids.tolist(), strict=True
            ):
                pairs = zip(tokens[:count], own[1 : count + 1], strict=False)
                found[i] = TokenLogprobs(own[0], tuple(pairs))
            return found

        return collect
