"""Engines around one loaded model, with any limits; and runs that check the books at every step."""

import tempfile
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from checkpoints import tiny_config, write_checkpoint
from every_family import EVERY_FAMILY, WITH_EXPERTS
from launched_operators import launched_ops
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from localllm.drafting.speculator import Speculator
from localllm.engine.chosen_device import as_cached
from localllm.engine.chosen_operators import library_folder
from localllm.engine.device_runner import DeviceRunner
from localllm.engine.engine import Engine
from localllm.engine.key_codings import plain_codings
from localllm.engine.model_runner import ModelRunner
from localllm.engine.pooler import Pooler
from localllm.engine.prefix_disk import PrefixDisk
from localllm.engine.prompt_scorer import PromptScorer
from localllm.engine.thread_count import ThreadCount
from localllm.model.architecture import Architecture, SlotSizes
from localllm.model.blocks.attention import AttentionSpec, Scores
from localllm.model.config_fields import ConfigFields
from localllm.model.decoder import DecoderModel
from localllm.model.dtypes import StateDType
from localllm.model.families.mistral import read_mistral
from localllm.model.families.table import FAMILIES, read_architecture
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.model.weight_check import check_weights
from localllm.model.weight_files import find_weight_files
from localllm.model.weights import load_model, open_source
from localllm.operators.device import Device
from localllm.quantize.calibrate import CalibrationRequest
from localllm.quantize.recipe import Recipe
from localllm.quantize.run import QuantizeRequest, quantize_model
from localllm.schedule.block_group import BlockGroup
from localllm.schedule.block_pool import BlockPool
from localllm.schedule.form_ends import FormEnds
from localllm.schedule.matcher import Matcher
from localllm.schedule.request import FinishReason, Request, TokenEvent
from localllm.schedule.request_check import EngineLimits
from localllm.schedule.runner import Launched, Runner
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import (
    ScheduledBatch,
    ScheduledRequest,
    Scheduler,
    SchedulerConfig,
)
from localllm.schedule.snapshots import Snapshots
from localllm.text.grammar import Grammar
from localllm_kernels import TORCH_OPS, Ops, select_ops
from localllm_kernels.attention.four_bits import FOUR_BITS, OWN_KEYS

EOS_TOKEN_ID = 0
# Rows of the head: more than there are tokens.
VOCAB_SIZE = 288
MAX_MODEL_LEN = 256


# Snapshots that a step can take.
SAVES = 4


@dataclass(frozen=True)
class Limits:
    """What shapes a run and must not shape its text."""

    block_size: int = 16
    num_blocks: int = 200  # without the null block
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 4096
    enable_prefix_caching: bool = False
    snapshot_bytes: int = 1 << 30
    max_model_len: int = MAX_MODEL_LEN
    prefix_folder: Path | None = None
    # Whether a step is scheduled before the tokens of the last one are there; and which requests
    # wait for theirs.
    overlaps: bool = False
    needs_ids: Callable[[SamplingParams], bool] = lambda params: False
    device: Device | None = None
    speculator: Callable[[], Speculator] | None = None
    # One that drafts from the model's own cache.
    reader: Callable[[PagedKVCache], Speculator] | None = None
    pools: bool = False
    # How many compute the first step, the second, and so on, from the beginning again.
    threads: tuple[int, ...] = ()


class GivenThreads(ThreadCount):
    """Numbers that are given, whatever steps take."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        super().__init__(1)
        self._given = cycle(numbers)
        self._next = next(self._given)

    def count(self, num_rows: int, *, has_prompt: bool = False) -> int:
        return self._next

    def book(self, num_rows: int, seconds: float, *, has_prompt: bool = False) -> None:
        self._next = next(self._given)


WITH_SINKS = "SinksForCausalLM"
# Heads of two sizes, keys of other layers, and inputs of each layer, as in E2B.
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    },
    "Gemma2ForCausalLM": {
        "hidden_act": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 20,
    },
    "Gemma4ForCausalLM": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "tie_word_embeddings": True,
    },
    "GraniteMoeHybridForCausalLM": EVERY_FAMILY["GraniteMoeHybridForCausalLM"],
    "Lfm2ForCausalLM": EVERY_FAMILY["Lfm2ForCausalLM"],
    "Qwen3_5ForCausalLM": EVERY_FAMILY["Qwen3_5ForCausalLM"],
    "Ministral3ForCausalLM": EVERY_FAMILY["Ministral3ForCausalLM"],
    **{
        name: {each: size for each, size in sizes.items() if each != "sliding_window"}
        for name, sizes in WITH_EXPERTS.items()
    },
}


def _read_with_sinks(fields: ConfigFields) -> Architecture:
    """Mistral with a sink for each head, which no dense family has."""
    plain = read_mistral(fields)
    layers = []
    for layer in plain.layers:
        first, second = layer.places
        assert isinstance(first.block, AttentionSpec)
        places = (replace(first, block=replace(first.block, scores=Scores(has_sinks=True))), second)
        layers.append(replace(layer, places=places))
    return replace(plain, layers=tuple(layers))


@cache
def load_tiny_model(
    architecture: str,
    sliding_window: int | None = None,
    dtype: torch.dtype = torch.float32,
    recipe: Recipe | None = None,
    backend: str = "torch",
    deterministic: bool = False,
    state_dtype: StateDType = "float32",
) -> DecoderModel:
    """A two-layer model with random weights, quantized if there is a recipe. A window is that of
    all layers, of Qwen2 of the second. `backend`: as of a command, or "launched", torch's operators
    as launches.
    """
    # The groups of a quantized weight divide its width.
    sizes: dict[str, Any] = {} if recipe is None else {"hidden_size": 64, "intermediate_size": 96}
    if architecture == "Qwen2ForCausalLM" and sliding_window is not None:
        sizes |= {"use_sliding_window": True, "max_window_layers": 1}
    sizes |= _OWN_SIZES.get(architecture, {})
    config = tiny_config(architecture, sliding_window=sliding_window, **sizes)
    with (
        tempfile.TemporaryDirectory() as root,
        patch.dict(FAMILIES, {WITH_SINKS: _read_with_sinks}),
    ):
        folder = write_checkpoint(Path(root) / "plain", config)
        if recipe is not None:
            request = QuantizeRequest(
                str(folder),
                Path(root) / "quantized",
                recipe,
                CalibrationRequest(),
                torch.device("cpu"),
                verify=False,
            )
            folder = quantize_model(request, lambda *args: None).out
        ops = launched_ops()
        if backend != "launched":
            ops = select_ops(
                "cpu", backend, dtype, library_folder=library_folder(), deterministic=deterministic
            )
        return load_folder(folder, dtype, ops, deterministic=deterministic, state_dtype=state_dtype)


def load_folder(
    folder: Path,
    dtype: torch.dtype,
    ops: Ops = TORCH_OPS,
    *,
    deterministic: bool = False,
    max_model_len: int = MAX_MODEL_LEN,
    state_dtype: StateDType = "float32",
) -> DecoderModel:
    """The model of a checkpoint folder."""
    architecture = read_architecture(folder).with_states(state_dtype)
    with open_source(check_weights(find_weight_files(folder), architecture)) as source:
        return load_model(
            source,
            architecture,
            max_model_len=max_model_len,
            dtype=dtype,
            device=torch.device("cpu"),
            ops=ops,
            deterministic=deterministic,
        )


def make_engine(model: DecoderModel, limits: Limits, kv_dtype: torch.dtype | None = None) -> Engine:
    """A fresh engine with an empty cache, of the model's dtype or another."""
    kv_dtype = kv_dtype or model.embedding.dtype
    model = replace(model, architecture=as_cached(model.architecture, kv_dtype))
    groups = model.architecture.cache_groups
    kv_cache = PagedKVCache.allocate(
        model.architecture,
        [limits.num_blocks + 1] * len(groups),
        limits.block_size,
        kv_dtype,
        torch.device("cpu"),
        SlotSizes(limits.max_num_seqs + SAVES, max_draft=20),
        codings=plain_codings(model) if kv_dtype == FOUR_BITS else (),
        uncoded_dtype=model.embedding.dtype,
    )
    threads = GivenThreads(limits.threads) if limits.threads else None
    pooler = Pooler(model) if limits.pools else None
    speculator = None if limits.speculator is None else limits.speculator()
    if limits.reader is not None:
        speculator = limits.reader(kv_cache)
    taps = (*(speculator.taps if speculator else ()), *(pooler.taps if pooler else ()))
    runner: Runner = ModelRunner(model, kv_cache, threads, taps=taps)
    if limits.overlaps:
        runner = LateRunner(model, kv_cache, limits.needs_ids, taps)
    scheduling = SchedulerConfig(
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        enable_prefix_caching=limits.enable_prefix_caching,
        cache_root=b"root",
    )
    if limits.device is not None:
        runner = DeviceRunner(
            model, kv_cache, limits.device, scheduling, limits.max_model_len, taps=taps
        )
    windows = [(group.state.window, group.coded is not None) for group in groups]
    if limits.speculator is not None and (None, False) not in windows:
        windows.append((None, False))  # for a model that drafts
    blocks = [
        BlockGroup(
            BlockPool(limits.num_blocks + 1),
            limits.block_size,
            window,
            is_aligned=is_own and window == OWN_KEYS,
        )
        for window, is_own in windows
    ]
    is_recurrent = bool(model.architecture.recurrent_groups)
    snapshots = Snapshots(limits.snapshot_bytes, SAVES) if is_recurrent else None
    disk = None
    if limits.prefix_folder is not None:
        pools = [group.pool for group in blocks[: len(groups)]]
        disk = PrefixDisk(limits.prefix_folder, 1 << 30, kv_cache, pools, snapshots)
    scheduler = Scheduler(scheduling, blocks, disk, snapshots)
    vocabulary = EngineLimits(
        model.architecture.vocab_size,
        limits.max_model_len,
        limits.max_model_len,
        frozenset({EOS_TOKEN_ID}),
    )
    scorer = PromptScorer(model)
    return Engine(runner, scheduler, vocabulary, speculator, disk, pooler=pooler, scorer=scorer)


class LateRunner(ModelRunner):
    """Keeps the ids of a batch to itself until they are waited for, as a GPU does."""

    overlaps = True

    def __init__(
        self,
        model: DecoderModel,
        kv_cache: PagedKVCache,
        needs_ids: Callable[[SamplingParams], bool],
        taps: tuple[int, ...] = (),
    ) -> None:
        super().__init__(model, kv_cache, taps=taps)
        self._needs_ids = needs_ids
        self._newest: dict[Request, int] = {}

    def needs_ids(self, params: SamplingParams) -> bool:
        return self._needs_ids(params)

    def launch(self, batch: ScheduledBatch) -> Launched:
        known = replace(batch, requests=[self._with_ids(entry) for entry in batch.requests])
        launched = super().launch(known)
        caught_up = [entry.request for entry in batch.requests if entry.catches_up]
        for request, tokens in zip(caught_up, launched.wait(), strict=True):
            self._newest[request] = tokens[-1].token_id or 0
        return launched

    def _with_ids(self, entry: ScheduledRequest) -> ScheduledRequest:
        request = copy(entry.request)
        if entry.known_end > len(request.token_ids):
            assert not request.needs_ids
            assert not entry.draft
            request.token_ids = [*request.token_ids, self._newest[entry.request]]
        assert entry.known_end <= len(request.token_ids)
        return entry._replace(request=request)


@dataclass
class Answer:
    """What one sample of a request got."""

    token_ids: list[int] = field(default_factory=list)
    # The bits of the logits that each token was drawn from.
    logits: list[bytes] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0

    def add(self, event: TokenEvent) -> None:
        assert self.finish_reason is None, "an event after the end"
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
            self.num_cached_tokens = event.num_cached_tokens
        self.finish_reason = event.finish_reason


def run(
    engine: Engine, requests: list[tuple[list[int], SamplingParams]]
) -> dict[tuple[int, int], Answer]:
    """Run requests together to their ends: answers by (index of the request, sample)."""
    indices = {add(engine, *request): i for i, request in enumerate(requests)}
    answers = {(i, s): Answer() for i, (_, p) in enumerate(requests) for s in range(p.n)}
    drain(engine, indices, answers)
    assert engine.scheduler.num_free_blocks == engine.scheduler.num_usable_blocks
    return answers


def add(engine: Engine, prompt: list[int], params: SamplingParams) -> int:
    """Queue a request, with a matcher for its grammar."""
    matcher = None if params.grammar is None else match_bytes(params.grammar)
    borders = range(0, len(prompt), 19)
    return engine.add_request(prompt, params, matcher=matcher, borders=borders)


@cache
def _byte_tokens() -> LLTokenizer:
    """Three special tokens, the first of which is the end; one for each byte; and no others."""

    class Bytes:
        def __init__(self) -> None:
            self.eos_token_id, self.bos_token_id = EOS_TOKEN_ID, None
            self.special_token_ids = [0, 1, 2, *range(259, VOCAB_SIZE)]
            special = {i: f"<{i}>".encode() for i in self.special_token_ids}
            self.tokens = [special.get(i) or bytes([i - 3]) for i in range(VOCAB_SIZE)]

        def __call__(self, text: bytes) -> list[int]:
            return [3 + byte for byte in text]

    return LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=VOCAB_SIZE, eos_token=EOS_TOKEN_ID)


def byte_state(grammar: Grammar) -> LLMatcher:
    """For a vocabulary of bytes; regular expressions and Lark grammars."""
    read = {"regex": LLMatcher.grammar_from_regex, "lark": LLMatcher.grammar_from_lark}
    return LLMatcher(_byte_tokens(), read[grammar.kind](grammar.source))


def match_bytes(grammar: Grammar) -> Matcher:
    """`byte_state`, which is led to its end where tokens run short."""
    ends = FormEnds(lambda char: 3 + ord(char), [EOS_TOKEN_ID])
    return Matcher(byte_state(grammar), ends)


def drain(engine: Engine, indices: dict[int, int], answers: dict[tuple[int, int], Answer]) -> None:
    """Step to the end, booking events and logits."""
    runner = engine._runner
    forward = type(runner).forward
    # Of each step that sampled a request, the logits of its positions.
    computed: dict[tuple[int, int], deque[list[bytes]]] = {key: deque() for key in answers}

    def forward_recorded(batch: ScheduledBatch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        logits = forward(runner, batch)
        rows = iter(logits)
        for entry in batch.requests:
            if entry.catches_up:
                key = (indices[entry.request.request_id], entry.request.sample)
                own = islice(rows, entry.num_samples)
                computed[key].append([row.numpy().tobytes() for row in own])
        assert next(rows, None) is None
        return logits

    runner.forward = forward_recorded  # type: ignore[method-assign]
    while engine.has_unfinished():
        events: dict[tuple[int, int], list[TokenEvent]] = {}
        for event in checked_step(engine):
            events.setdefault((indices[event.request_id], event.sample), []).append(event)
        for key, own in events.items():
            # Those behind the last token were rejected, or came behind the end.
            num_tokens = sum(event.token_id is not None for event in own)
            answers[key].logits += computed[key].popleft()[:num_tokens]
            for event in own:
                answers[key].add(event)


def checked_step(engine: Engine) -> list[TokenEvent]:
    """One step that must do something and leave the books balanced."""
    before = progress(engine)
    events = engine.step()
    engine.scheduler.check_invariants()
    assert events or progress(engine) != before, "a step without progress"
    return events


def progress(engine: Engine) -> list[tuple[int, int]]:
    """Computed tokens of all requests, and their steps that are not booked: changes with every step
    that is not stuck.
    """
    unfinished = engine.scheduler.unfinished()
    return [(request.num_computed_tokens, request.steps_under_way) for request in unfinished]


def run_alone(
    model: DecoderModel,
    prompt: list[int],
    params: SamplingParams,
    kv_dtype: torch.dtype | None = None,
) -> list[Answer]:
    """The answer of each sample of a request, computed with nothing else in the engine."""
    answers = []
    for sample in range(params.n):
        engine = make_engine(model, Limits(), kv_dtype)
        request_id = add(engine, prompt, params)
        for other in range(params.n):
            if other != sample:
                engine.abort(request_id, other)
        [request] = engine.scheduler.unfinished()
        request.parent = None
        answer = Answer()
        drain(engine, {request_id: 0}, {(0, sample): answer})
        answers.append(answer)
    return answers
