"""Builds an engine from a checkpoint folder and an EngineConfig: check, plan, load."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from localllm.drafting.assistant_drafter import AssistantDrafter
from localllm.drafting.draft_lengths import DraftLengths
from localllm.drafting.draft_model import DraftModel
from localllm.drafting.drafter import Drafter
from localllm.drafting.head_drafter import HeadDrafter
from localllm.drafting.head_source import HeadMemory, find_head, head_memory, is_named
from localllm.drafting.ngram import NgramDrafter
from localllm.drafting.speculation import Proposer, Speculator
from localllm.engine.config import EngineConfig
from localllm.engine.device_runner import DeviceRunner
from localllm.engine.engine import Engine
from localllm.engine.expert_memory import expert_sizes, plan_experts
from localllm.engine.memory import (
    MemoryPlan,
    describe_taken,
    plan_memory,
    reconcile,
    slot_sizes,
)
from localllm.engine.model_runner import ModelRunner
from localllm.engine.pooler import Pooler
from localllm.engine.prefix_disk import PrefixDisk
from localllm.engine.prompt_scorer import PromptScorer
from localllm.engine.step_inputs import graph_rows
from localllm.engine.thread_count import ThreadCount
from localllm.engine.threads import choose_threads
from localllm.errors import BackendError, CheckpointError, GpuMemoryError
from localllm.files.private_files import private_folder
from localllm.model.architecture import Architecture
from localllm.model.decoder import DecoderModel
from localllm.model.found_head import FoundHead
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.model.random_weights import RandomWeights
from localllm.model.weight_check import WeightMap, check_weights
from localllm.model.weight_files import find_weight_files, fingerprint
from localllm.model.weights import (
    CheckpointWeights,
    HeadWeights,
    load_head,
    load_model,
    open_source,
)
from localllm.operators.case import Sizes
from localllm.operators.check import CheckRequest
from localllm.operators.choice import choose_operators
from localllm.operators.cpu_products import make_products_reproducible, products_ignore_threads
from localllm.operators.device import CudaDevice, prepare
from localllm.operators.listener import LOGGED, Listener
from localllm.operators.tuning import TuningFile, tune
from localllm.schedule.block_group import BlockGroup
from localllm.schedule.block_pool import BlockPool
from localllm.schedule.pacing import Pacer
from localllm.schedule.request_check import EngineLimits
from localllm.schedule.runner import HeadRunner
from localllm.schedule.scheduler import Scheduler, SchedulerConfig
from localllm.schedule.snapshots import Snapshots
from localllm.schedule.step_times import StepTimes
from localllm.user.places import cache_folder, prefix_folder
from localllm.user.version import __version__
from localllm_kernels import select_ops
from localllm_kernels.attention.kv_cache import row_bytes
from localllm_kernels.compiling.choice import ALL_OWN, Choice
from localllm_kernels.compiling.tunings import Tunings

logger = logging.getLogger(__name__)

# Tokens in one step. On a CPU, matrix products reach the same speed with 64 rows as with 2,048 (see
# docs/performance.md), and every request waits for the whole step for its next token.
_STEP_TOKENS = {"cpu": 256, "cuda": 2048}
# Depths of a head's drafts whose acceptances are told apart.
_HEAD_DEPTHS = 4
KV_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head that drafts for a decoder, and where it was found."""

    model: DecoderModel
    found: FoundHead


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    """A decoder on its device, and the plan by which its memory was divided."""

    model: DecoderModel
    plan: MemoryPlan
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    # Configurations of its kernels; None if nothing is tuned.
    tunings: Tunings | None = None
    # The head that drafts for it, if there is one and it is wanted.
    head: LoadedHead | None = None


def load_decoder(
    folder: Path,
    architecture: Architecture,
    config: EngineConfig,
    listener: Listener = LOGGED,
    draft: LoadedDecoder | None = None,
    head: FoundHead | None = None,
) -> LoadedDecoder:
    """Load the weights in `folder`, whose config was read by `read_architecture`.

    The files are checked before memory is allocated; `listener` gets the plan for the memory, and
    how it was divided in the end. `draft`: the draft model, if there is one; `head`: a head from
    other files, which takes the place of the model's own.

    Raises: CheckpointError, UnsupportedModelError, GpuMemoryError, BackendError.
    """
    files = find_weight_files(folder)
    weights = check_weights(files, architecture)
    head = head or find_head(files, architecture, config.speculation)
    with open_source(weights) as source:
        resident = weights.resident_bytes
        return build_decoder(source, resident, architecture, config, listener, draft, head)


def build_decoder(
    source: CheckpointWeights | RandomWeights,
    resident_bytes: Callable[[int], int],
    architecture: Architecture,
    config: EngineConfig,
    listener: Listener = LOGGED,
    draft: LoadedDecoder | None = None,
    head: FoundHead | None = None,
) -> LoadedDecoder:
    """A decoder with the weights of `source`; `resident_bytes` gives their size in memory for the
    byte width of an unquantized value. `head`: the head that drafts for it, which is loaded first;
    where that fails, the decoder is loaded without it, unless it was asked for by name.

    Raises: as `load_decoder`.
    """
    make_products_reproducible()
    architecture = architecture.with_states(config.state_dtype)
    device = select_device(config)
    threads = choose_threads(config.threads)
    if device.type == "cpu":
        torch.set_num_threads(threads.most)
    prepare(device)
    dtype, kv_dtype = _types(architecture, config)
    is_tuned = device.type == "cuda" and not config.deterministic
    tunings = _tuning_file(device).read() if is_tuned else None

    def choose() -> Choice:
        if not config.self_check:
            return ALL_OWN
        weights = source.weights if isinstance(source, CheckpointWeights) else source
        return choose_operators(check_request(weights, architecture, config), listener)

    try:
        ops = select_ops(
            device.type,
            config.backend,
            dtype,
            library_folder=library_folder(),
            deterministic=config.deterministic,
            tunings=tunings,
            choose=choose,
        )
    except ValueError as error:
        raise BackendError(str(error), hint="--backend torch") from error
    free = free_bytes(device)
    weights = source.weights if isinstance(source, CheckpointWeights) else source

    def plan_with(
        weights_bytes: int, config: EngineConfig, *, is_captured: bool, of_head: HeadMemory
    ) -> MemoryPlan:
        has_graphs = is_captured and device.type == "cuda" and ops.traits.captures
        return plan_memory(
            architecture,
            config,
            max_num_batched_tokens=config.max_num_batched_tokens or step_tokens(device.type),
            weights_bytes=weights_bytes,
            item_bytes=dtype.itemsize,
            row_bytes=partial(row_bytes, dtype=kv_dtype),
            free_bytes=free,
            graph_rows=of_head.num_models * graph_rows(config.max_num_seqs) if has_graphs else 0,
            draft_token_bytes=of_head.token_bytes + (draft.plan.draft_token_bytes if draft else 0),
            draft_bytes=of_head.waiting_bytes + (draft.plan.besides_cache_bytes if draft else 0),
            gathers=ops.traits.gathers,
        )

    def plan_beside(head: FoundHead | None) -> MemoryPlan:
        of_head = head_memory(
            head, dtype.itemsize, partial(row_bytes, dtype=kv_dtype), config.block_size
        )
        plan = plan_experts(
            partial(plan_with, of_head=of_head),
            resident_bytes(dtype.itemsize) + of_head.weights_bytes,
            expert_sizes(architecture, lambda name: weights.linear_bytes(name, dtype.itemsize)),
            config,
            architecture,
            has_slots=ops.traits.captures,
        )
        host_free = free_bytes(torch.device("cpu"))
        if plan.host_bytes > host_free:
            raise GpuMemoryError(
                f"experts need {plan.host_bytes / (1 << 30):.1f} GiB of host memory, "
                f"{host_free / (1 << 30):.1f} GiB are free",
                hint="a smaller model: localllm plan",
            )
        return plan

    # Before the model, which takes longer.
    head_weights: HeadWeights | None = None
    try:
        plan = plan_beside(head)
        if head is not None:
            with open_source(head.weights) as head_source:
                head_weights = load_head(
                    head_source,
                    head.architecture,
                    max_model_len=plan.max_model_len,
                    dtype=dtype,
                    device=device,
                    ops=ops,
                )
    except (CheckpointError, GpuMemoryError) as error:
        if head is None or is_named(config.speculation, has_draft=draft is not None):
            raise
        plan = plan_beside(None)
        logger.warning("the model's %s is not used: %s", head.kind, error)
    listener.line(plan.describe())
    model = load_model(
        source,
        architecture,
        max_model_len=plan.max_model_len,
        dtype=dtype,
        device=device,
        ops=ops,
        deterministic=config.deterministic,
        expert_slots=plan.expert_slots,
    )
    loaded_head = None
    if head is not None and head_weights is not None:
        loaded_head = LoadedHead(head_weights.beside(model), head)
    if device.type == "cuda":
        planned, left = plan, free_bytes(device)
        plan = reconcile(planned, config, left)
        listener.line(describe_taken(plan, planned, left - plan.kv_bytes))
    return LoadedDecoder(model, plan, dtype, kv_dtype, device, tunings, loaded_head)


def check_request(
    weights: WeightMap | RandomWeights,
    architecture: Architecture,
    config: EngineConfig,
) -> CheckRequest:
    """What the self-check of such a model on this GPU covers."""
    sizes = Sizes(architecture, *_types(architecture, config), config.block_size)
    tunings = _tuning_file(torch.device("cuda")).read()
    found = {} if config.deterministic else tunings.found
    return CheckRequest(weights, sizes, found, config.deterministic)


def _types(architecture: Architecture, config: EngineConfig) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of computation, and that of cached keys and values."""
    name = architecture.dtype if config.dtype == "auto" else config.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype, KV_DTYPES.get(config.kv_cache_dtype, dtype)


def load_engine(
    folder: Path,
    architecture: Architecture,
    config: EngineConfig,
    eos_token_ids: frozenset[int],
    listener: Listener = LOGGED,
    draft: LoadedDecoder | None = None,
    head: FoundHead | None = None,
) -> Engine:
    """An engine around the decoder in `folder`; see `load_decoder`. Raises: as it does."""
    loaded = load_decoder(folder, architecture, config, listener, draft, head)
    weights_id = fingerprint(folder, find_weight_files(folder))
    return build_engine(loaded, config, eos_token_ids, weights_id, draft)


def load_draft(
    folder: Path,
    architecture: Architecture,
    config: EngineConfig,
    listener: Listener = LOGGED,
) -> LoadedDecoder:
    """Load the decoder of a draft model; its plan has a cache of one block only.

    Raises: as `load_decoder`.
    """
    speculation = replace(config.speculation, drafter="ngram")  # without a head of its own
    alone = replace(
        config, kv_cache_tokens=config.block_size, max_model_len=None, speculation=speculation
    )
    return load_decoder(folder, architecture, alone, listener)


def build_engine(
    loaded: LoadedDecoder,
    config: EngineConfig,
    eos_token_ids: frozenset[int],
    weights_id: str,
    draft: LoadedDecoder | None = None,
) -> Engine:
    """An engine for a decoder; `weights_id` stands for its weights in the keys of blocks."""
    plan, architecture = loaded.plan, loaded.model.architecture
    num_blocks = [group.num_blocks for group in plan.groups]
    # If the model has no full group, the plan ends with one for the draft model.
    kv_cache = _allocate(loaded, config, num_blocks[: len(architecture.cache_groups)])
    # Everything besides the tokens that the bits of keys and values depend on.
    parts = (
        weights_id,
        loaded.dtype,
        loaded.kv_dtype,
        config.block_size,
        *architecture.ropes,
        *(group.state for group in architecture.recurrent_groups),
        # Of the tables' length, which a plan that was made smaller afterwards does not have.
        *(rope.pair_factors(loaded.model.ropes.num_positions) for rope in architecture.ropes),
        loaded.device.type,
        loaded.model.ops.traits.name,
        loaded.model.ops.choice,
        loaded.model.ops.build,
        config.deterministic,
        __version__,
    )
    scheduling = SchedulerConfig(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        cache_root=hashlib.sha256(" ".join(map(str, parts)).encode()).digest(),
    )
    limits = EngineLimits(
        vocab_size=architecture.vocab_size,
        max_model_len=plan.max_model_len,
        num_positions=architecture.max_position_embeddings,
        eos_token_ids=eos_token_ids,
        writes_text=architecture.writes_text,
        num_labels=architecture.num_labels,
    )
    longest = plan.max_model_len
    threads = choose_threads(config.threads)
    is_fixed = threads.is_fixed or not products_ignore_threads(loaded.dtype)
    count = ThreadCount(threads.most, is_fixed=is_fixed)
    proposers = _proposers(loaded, kv_cache, config, scheduling, draft)
    speculator = Speculator(proposers, config.speculation.max_draft) if proposers else None
    pooler = Pooler(loaded.model) if config.pools else None
    taps = [*(speculator.taps if speculator else ()), *(pooler.taps if pooler else ())]
    runner = _make_runner(loaded, kv_cache, scheduling, longest, count, taps=taps)
    groups = [
        BlockGroup(BlockPool(group.num_blocks), config.block_size, group.window)
        for group in plan.groups
    ]
    # The slots that the plan has beyond those of requests.
    per_step = slot_sizes(architecture, config).num_slots - config.max_num_seqs
    snapshots = Snapshots(config.snapshot_bytes, per_step) if per_step else None
    disk = None
    if config.cache_disk_bytes and config.enable_prefix_caching:
        folder = prefix_folder(config.cache_dir)
        pools = [group.pool for group in groups[: len(kv_cache.stacks)]]
        disk = PrefixDisk(folder, config.cache_disk_bytes, kv_cache, pools, snapshots)
    scheduler = Scheduler(scheduling, groups, disk, snapshots)
    scorer = PromptScorer(loaded.model)
    return Engine(runner, scheduler, limits, speculator, disk, Pacer(), pooler, scorer)


def _proposers(
    loaded: LoadedDecoder,
    kv_cache: PagedKVCache,
    config: EngineConfig,
    scheduling: SchedulerConfig,
    draft: LoadedDecoder | None,
) -> list[Proposer]:
    """Who drafts for a decoder, from the cheapest to the dearest."""
    speculation, plain = config.speculation, StepTimes()
    found = list[Proposer]()
    if speculation.has("ngram"):
        ngrams = NgramDrafter(speculation.min_match, speculation.max_match)
        lengths = DraftLengths(speculation.max_match + 1, plain)
        found.append(Proposer("n-grams", ngrams, lengths))
    if loaded.head is None and draft is None:
        return found
    groups = loaded.plan.groups
    table = next(i for i, group in enumerate(groups) if group.window is None)
    num_blocks = groups[table].num_blocks
    if loaded.head is not None:
        head: Drafter
        if loaded.head.found.reads_target:
            head = _assistant_drafter(loaded, loaded.head, kv_cache, scheduling)
        else:
            head = _head_drafter(loaded, loaded.head, config, scheduling, num_blocks, table)
        lengths = DraftLengths(_HEAD_DEPTHS, plain, has_matches=False)
        found.append(Proposer(loaded.head.found.kind, head, lengths))
    if draft is not None:
        smaller = _model_drafter(loaded, draft, config, scheduling, num_blocks, table)
        found.append(Proposer("draft model", smaller, DraftLengths(1, plain, has_matches=False)))
    return found


def _model_drafter(
    loaded: LoadedDecoder,
    draft: LoadedDecoder,
    config: EngineConfig,
    scheduling: SchedulerConfig,
    num_blocks: int,
    table: int,
) -> DraftModel:
    """The drafter with a draft model, over the blocks of the cache group `table`."""
    plan, num_groups = loaded.plan, len(draft.model.architecture.cache_groups)
    kv_cache, tables = _allocate(draft, config, [num_blocks] * num_groups), [table] * num_groups
    runner = _make_runner(draft, kv_cache, scheduling, plan.max_model_len, tables=tables)
    return DraftModel(
        runner, kv_cache, draft.plan.max_model_len, plan.max_num_batched_tokens, table
    )


def _head_drafter(
    loaded: LoadedDecoder,
    head: LoadedHead,
    config: EngineConfig,
    scheduling: SchedulerConfig,
    num_blocks: int,
    table: int,
) -> HeadDrafter:
    """The drafter with a decoder's head, over the blocks of the cache group `table`."""
    own, plan, join = replace(loaded, model=head.model), loaded.plan, head.model.join
    num_groups = len(head.model.architecture.cache_groups)
    kv_cache, tables = _allocate(own, config, [num_blocks] * num_groups), [table] * num_groups
    taps = [head.found.own_tap]
    runner = _make_runner(own, kv_cache, scheduling, plan.max_model_len, tables=tables, taps=taps)
    assert join is not None
    return HeadDrafter(
        runner,
        kv_cache,
        head.found.taps,
        head.found.states_width,
        plan.max_model_len,
        plan.max_num_batched_tokens,
        table,
        None if join.fusion is None else partial(join.fusion, ops=head.model.ops),
    )


def _assistant_drafter(
    loaded: LoadedDecoder,
    assistant: LoadedHead,
    kv_cache: PagedKVCache,
    scheduling: SchedulerConfig,
) -> AssistantDrafter:
    """The drafter with a decoder's assistant, which reads the decoder's cache."""
    own, found = replace(loaded, model=assistant.model), assistant.found
    places = tuple(
        None if plan.reads is None else kv_cache.places[plan.reads]
        for plan in found.architecture.layers
    )
    longest = loaded.plan.max_model_len
    seen = PagedKVCache(kv_cache.stacks, places)
    runner = _make_runner(own, seen, scheduling, longest, taps=[found.own_tap])
    return AssistantDrafter(runner, found.taps, longest)


def _allocate(
    loaded: LoadedDecoder, config: EngineConfig, num_blocks: Sequence[int]
) -> PagedKVCache:
    """The cache of a decoder, with `num_blocks` blocks in each of its groups."""
    return PagedKVCache.allocate(
        loaded.model.architecture,
        num_blocks,
        config.block_size,
        loaded.kv_dtype,
        loaded.device,
        slot_sizes(loaded.model.architecture, config),
    )


def _make_runner(
    loaded: LoadedDecoder,
    kv_cache: PagedKVCache,
    scheduling: SchedulerConfig,
    longest: int,
    threads: ThreadCount | None = None,
    tables: Sequence[int] | None = None,
    taps: Sequence[int] = (),
) -> HeadRunner:
    """The runner of a decoder on its device; `longest`: the most tokens of a request; `threads`,
    `tables`, `taps`: see ModelRunner.
    """
    if not loaded.model.ops.traits.captures or loaded.device.type != "cuda":
        own_threads = threads if loaded.device.type == "cpu" else None
        return ModelRunner(loaded.model, kv_cache, own_threads, tables, taps)
    device = CudaDevice()
    tuning: Iterator[None] | None = None
    if loaded.tunings is not None:
        tuning = tune(loaded.model, loaded.tunings, device, _tuning_file(loaded.device).add)
    return DeviceRunner(loaded.model, kv_cache, device, scheduling, longest, tuning, tables, taps)


def select_device(config: EngineConfig) -> torch.device:
    """The device that `config` asks for. Raises: BackendError if it asks for a missing GPU."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise BackendError(
            "no usable GPU: torch sees no CUDA device",
            where=f"torch {torch.__version__}",
            hint="a driver and a torch build with CUDA, or --device cpu where a command takes it",
        )
    wants_cuda = config.device == "cuda" or (config.device == "auto" and has_cuda)
    return torch.device("cuda" if wants_cuda else "cpu")


def step_tokens(device: str) -> int:
    """The default number of tokens in one step on `cpu` or `cuda`."""
    return _STEP_TOKENS[device]


def library_folder() -> Path | None:
    """Where compiled CPU kernels are kept; None if there is no usable folder."""
    return private_folder(cache_folder("kernels"), "kernels are compiled again at each start")


def _tuning_file(device: torch.device) -> TuningFile:
    return TuningFile.of(torch.cuda.get_device_name(device))


def total_bytes(device: torch.device) -> int:
    """Total bytes of a device's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device: torch.device) -> int:
    """Bytes of a device's memory that a program could allocate now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # return freed memory that torch still holds
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        # Memory available without swapping; free pages alone would leave out the file cache.
        lines = Path("/proc/meminfo").read_text().splitlines()
        [available] = [line for line in lines if line.startswith("MemAvailable:")]
        return int(available.split()[1]) * 1024
    except (OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
