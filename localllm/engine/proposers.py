"""Who drafts for a loaded decoder."""

from dataclasses import replace
from functools import partial

from localllm.drafting.assistant_drafter import AssistantDrafter
from localllm.drafting.draft_model import DraftModel
from localllm.drafting.drafter import Drafter
from localllm.drafting.head_drafter import HeadDrafter
from localllm.drafting.ngram import NgramDrafter
from localllm.drafting.speculator import Proposer
from localllm.engine.config import EngineConfig
from localllm.engine.key_codings import plain_codings
from localllm.engine.loaded_decoder import LoadedDecoder, LoadedHead
from localllm.engine.runners import allocate, make_runner
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.schedule.scheduler import SchedulerConfig


def proposers_for(
    loaded: LoadedDecoder,
    kv_cache: PagedKVCache,
    config: EngineConfig,
    scheduling: SchedulerConfig,
    draft: LoadedDecoder | None,
) -> list[Proposer]:
    """Who drafts for a decoder, from the cheapest to the dearest."""
    speculation = config.speculation
    found = list[Proposer]()
    if speculation.has("ngram"):
        ngrams = NgramDrafter(speculation.min_match, speculation.max_match)
        found.append(Proposer("n-grams", ngrams))
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
        found.append(Proposer(loaded.head.found.kind, head))
    if draft is not None:
        smaller = _model_drafter(loaded, draft, config, scheduling, num_blocks, table)
        found.append(Proposer("draft model", smaller))
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
    # Drafts may be worse for codes alone.
    architecture = replace(draft.model.architecture, own_keys=0)
    draft = replace(draft, model=replace(draft.model, architecture=architecture))
    plan, num_groups = loaded.plan, len(architecture.cache_groups)
    kv_cache, tables = allocate(draft, config, [num_blocks] * num_groups), [table] * num_groups
    runner = make_runner(draft, kv_cache, scheduling, plan.max_model_len, tables=tables)
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
    codings = plain_codings(head.model) if loaded.codings else ()
    own = replace(loaded, model=head.model, codings=codings)
    plan, join = loaded.plan, head.model.join
    num_groups = len(head.model.architecture.cache_groups)
    kv_cache, tables = allocate(own, config, [num_blocks] * num_groups), [table] * num_groups
    taps = [head.found.own_tap]
    runner = make_runner(own, kv_cache, scheduling, plan.max_model_len, tables=tables, taps=taps)
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
    seen = PagedKVCache(kv_cache.stacks, places, uncoded=kv_cache.uncoded)
    runner = make_runner(own, seen, scheduling, longest, taps=[found.own_tap])
    return AssistantDrafter(runner, found.taps, longest)
