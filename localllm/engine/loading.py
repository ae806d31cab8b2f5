"""Builds an engine from a checkpoint folder and an EngineConfig."""

from pathlib import Path

from localllm.drafting.speculator import Speculator
from localllm.engine.config import EngineConfig
from localllm.engine.engine import Engine
from localllm.engine.loaded_decoder import LoadedDecoder, load_decoder
from localllm.engine.pooler import Pooler
from localllm.engine.prompt_scorer import PromptScorer
from localllm.engine.proposers import proposers_for
from localllm.engine.runners import allocate, make_runner
from localllm.engine.scheduling import make_scheduler, scheduler_config
from localllm.engine.thread_count import ThreadCount
from localllm.engine.threads import choose_threads
from localllm.model.architecture import Architecture
from localllm.model.found_head import FoundHead
from localllm.model.prompt_work import prompt_work
from localllm.model.weight_files import find_weight_files, fingerprint
from localllm.operators.cpu_products import products_ignore_threads
from localllm.operators.listener import LOGGED, Listener
from localllm.schedule.pacing import Pacer
from localllm.schedule.request_check import EngineLimits
from localllm.schedule.step_clock import StepClock


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
    kv_cache = allocate(loaded, config, num_blocks[: len(architecture.cache_groups)])
    scheduling = scheduler_config(loaded, config, weights_id)
    limits = EngineLimits(
        vocab_size=architecture.vocab_size,
        max_model_len=plan.max_model_len,
        num_positions=architecture.max_position_embeddings,
        eos_token_ids=eos_token_ids,
        writes_text=architecture.writes_text,
        num_labels=architecture.num_labels,
    )
    threads = choose_threads(config.threads)
    is_fixed = threads.is_fixed or not products_ignore_threads(loaded.dtype)
    proposers = proposers_for(loaded, kv_cache, config, scheduling, draft)
    clock, most = StepClock(len(proposers)), config.speculation.max_draft
    count = ThreadCount(threads.most, clock, is_fixed=is_fixed)
    speculator = Speculator(proposers, most, clock) if proposers else None
    pooler = Pooler(loaded.model) if config.pools else None
    taps = [*(speculator.taps if speculator else ()), *(pooler.taps if pooler else ())]
    runner = make_runner(loaded, kv_cache, scheduling, plan.max_model_len, count, taps=taps)
    scheduler, disk = make_scheduler(loaded, config, scheduling, kv_cache)
    scorer = PromptScorer(loaded.model)
    return Engine(
        runner,
        scheduler,
        limits,
        speculator,
        disk,
        Pacer(clock),
        pooler,
        scorer,
        prompt_work(architecture),
    )
