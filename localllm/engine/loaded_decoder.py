"""Loads a decoder: checks its files, divides the memory, and puts the weights on the device."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from localllm.drafting.head_source import find_head, is_named
from localllm.engine.chosen_device import as_cached, dtypes_of, free_bytes, select_device
from localllm.engine.chosen_operators import operators_for
from localllm.engine.coding_file import kept_codings
from localllm.engine.config import EngineConfig
from localllm.engine.decoder_memory import DecoderMemory
from localllm.engine.expert_memory import expert_sizes
from localllm.engine.key_codings import find_codings
from localllm.engine.memory import MemoryPlan, describe_taken, reconcile
from localllm.engine.threads import choose_threads
from localllm.errors import CheckpointError, GpuMemoryError
from localllm.model.architecture import Architecture
from localllm.model.decoder import DecoderModel
from localllm.model.found_head import FoundHead
from localllm.model.random_weights import RandomWeights
from localllm.model.weight_check import check_weights
from localllm.model.weight_files import find_weight_files, fingerprint
from localllm.model.weights import (
    CheckpointWeights,
    HeadWeights,
    load_head,
    load_model,
    open_source,
)
from localllm.operators.cpu_products import make_products_reproducible
from localllm.operators.device import prepare
from localllm.operators.listener import LOGGED, Listener
from localllm_kernels import Ops
from localllm_kernels.attention.four_bits import FOUR_BITS, KeyCoding
from localllm_kernels.compiling.tunings import Tunings

logger = logging.getLogger(__name__)


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
    # Of each cache group's keys in 4 bits; none for other caches.
    codings: tuple[KeyCoding, ...] = ()


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
        return build_decoder(
            source,
            weights.resident_bytes,
            architecture,
            config,
            listener,
            draft,
            head,
            lambda model: kept_codings(model, fingerprint(folder, files), listener),
        )


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


def build_decoder(
    source: CheckpointWeights | RandomWeights,
    resident_bytes: Callable[[int], int],
    architecture: Architecture,
    config: EngineConfig,
    listener: Listener = LOGGED,
    draft: LoadedDecoder | None = None,
    head: FoundHead | None = None,
    codings_of: Callable[[DecoderModel], tuple[KeyCoding, ...]] = find_codings,
) -> LoadedDecoder:
    """A decoder with the weights of `source`; `resident_bytes` gives their size in memory for the
    byte width of an unquantized value. `head`: the head that drafts for it, which is loaded first;
    where that fails, the decoder is loaded without it, unless it was asked for by name.
    `codings_of`: gives the codings of keys in 4 bits.

    Raises: as `load_decoder`.
    """
    make_products_reproducible()
    architecture = architecture.with_states(config.state_dtype)
    device = _prepared_device(config)
    dtype, kv_dtype = dtypes_of(architecture, config)
    architecture = as_cached(architecture, kv_dtype)
    weights = source.weights if isinstance(source, CheckpointWeights) else source
    chosen = operators_for(weights, architecture, config, device, listener)
    ops = chosen.ops
    memory = DecoderMemory(
        architecture,
        device.type,
        ops.traits,
        dtype,
        resident_bytes(dtype.itemsize),
        expert_sizes(
            architecture,
            lambda name: weights.linear_bytes(name, dtype.itemsize),
            weights.layouts,
        ),
        None if draft is None else draft.plan,
        source.weights.unread_bytes(dtype) if isinstance(source, CheckpointWeights) else 0,
    )
    # Before the model, which takes longer.
    plan, head_weights = _plan_beside_head(memory, config, device, ops, head)
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
    codings = codings_of(model) if kv_dtype == FOUR_BITS else ()
    return LoadedDecoder(model, plan, dtype, kv_dtype, device, chosen.tunings, loaded_head, codings)


def _prepared_device(config: EngineConfig) -> torch.device:
    """The device that `config` asks for, ready to compute. Raises: BackendError."""
    device = select_device(config)
    threads = choose_threads(config.threads)
    if device.type == "cpu":
        torch.set_num_threads(threads.most)
    prepare(device)
    return device


def _plan_beside_head(
    memory: DecoderMemory,
    config: EngineConfig,
    device: torch.device,
    ops: Ops,
    head: FoundHead | None,
) -> tuple[MemoryPlan, HeadWeights | None]:
    """The plan, and the weights of the head; None if there is no head, or if it cannot be loaded
    and was not asked for by name. Raises: as `load_decoder`.
    """
    free = free_bytes(device)
    try:
        plan = memory.plan(config, free, head)
        _check_host(plan)
        if head is None:
            return plan, None
        with open_source(head.weights) as source:
            weights = load_head(
                source,
                head.architecture,
                max_model_len=plan.max_model_len,
                dtype=memory.dtype,
                device=device,
                ops=ops,
            )
        return plan, weights
    except (CheckpointError, GpuMemoryError) as error:
        if head is None or is_named(config.speculation, has_draft=memory.draft is not None):
            raise
        logger.warning("the model's %s is not used: %s", head.kind, error)
    plan = memory.plan(config, free, None)
    _check_host(plan)
    return plan, None


def _check_host(plan: MemoryPlan) -> None:
    host_free = free_bytes(torch.device("cpu"))
    if plan.host_bytes > host_free:
        raise GpuMemoryError(
            f"experts need {plan.host_bytes / (1 << 30):.1f} GiB of host memory, "
            f"{host_free / (1 << 30):.1f} GiB are free",
            hint="a smaller model: localllm plan",
        )
