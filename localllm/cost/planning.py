"""Whether a model fits a machine's memory, and how fast it will run, before any download.

The same functions divide the memory when a model is loaded (engine/memory.py) and predict a step in
the speed tests (cost/step_model.py).
"""

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from localllm.answer.drafters import find_head_apart, is_assistant, vocabularies_differ
from localllm.cost.gpus import PCIE_4_BYTES_PER_S, GpuCard
from localllm.cost.rates import ModelWork, best_time, measure_rates
from localllm.cost.step_model import WITH_CARE, Gpu, predict_decode
from localllm.drafting.head_source import find_head
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.engine.chosen_device import KV_DTYPES, free_bytes, select_device, total_bytes
from localllm.engine.config import EngineConfig
from localllm.engine.decoder_memory import DecoderMemory
from localllm.engine.expert_memory import expert_sizes
from localllm.engine.memory import MemoryPlan
from localllm.errors import GpuMemoryError, RequestError
from localllm.files.json_file import read_json_object
from localllm.hub.card import describe_quantization
from localllm.hub.catalog import (
    BUILT_IN_MODELS,
    CatalogEntry,
    ModelSource,
    load_catalog,
    recommended,
    resolve_model,
)
from localllm.hub.catalog_shape import catalog_shape
from localllm.hub.checkpoint import FetchedModel, NamedDrafters
from localllm.hub.download import fetch_model, find_here, find_snapshot
from localllm.model.architecture import TABLE, Architecture
from localllm.model.blocks.block import RowBytes
from localllm.model.dtypes import StateDType
from localllm.model.families.table import read_architecture
from localllm.model.found_head import FoundHead
from localllm.model.prompt_work import prompt_work
from localllm.model.random_weights import WEIGHT_KINDS, RandomWeights, WeightKind
from localllm.model.weight_check import check_weights
from localllm.model.weight_files import find_weight_files, is_gguf_folder
from localllm_kernels.attention.kv_cache import row_bytes
from localllm_kernels.backend import find_traits
from localllm_kernels.compiling.traits import Traits, WeightLayout

# Assumed of a GPU's nominal memory: the share that is free for a program, and what a display, its
# desktop and the driver take at least.
_FREE_SHARE, _DISPLAY_BYTES = 0.92, 1 << 30
# Shares of the limits reached: on a CPU, decode of the memory bandwidth and prefill of the
# arithmetic, see docs/benchmarks.md; on a GPU, prefill of the arithmetic, assumed.
_CPU_DECODE, _CPU_PREFILL, _GPU_PREFILL = 0.63, 0.6, 0.5
_CHAT_TOKENS = 4096
# Of the prompt and the chat whose speed is predicted.
_RATED_TOKENS = 1024
# More than the caches of most processors hold.
_GLANCE_BYTES = 128 << 20
_SHORTEST_CONTEXT = 2048
# What drafts for a model by default: what lies in its own files or beside them.
_ITSELF = SpeculationConfig()
# Assumed: what a launch outside a graph takes, and a look at a layer's choice of experts.
_LAUNCH_S, _LOOK_S = 1e-5, 3e-5


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine's memory, what is free of it, its bandwidth and its arithmetic rate, or None."""

    name: str
    device: str
    memory_bytes: int
    free_bytes: int
    memory_bytes_per_s: float | None
    operations_per_s: float | None
    # Of copies from host memory; of an unknown GPU, those of PCI Express 4 with 16 lanes.
    host_bytes_per_s: float = PCIE_4_BYTES_PER_S
    # Its memory as its maker or the user writes it; empty where it was measured.
    told: str = ""

    @property
    def summary(self) -> str:
        """Its name, and how much memory is free."""
        free = f"{self.free_bytes / 1e9:.1f} GB"
        if not self.told:
            return f"{self.name}, {free} free"
        if self.free_bytes == self.memory_bytes:
            return f"{self.name} with {self.told} ({free}) free"
        return f"{self.name} with {self.told}, of which {free} are assumed free beside a display"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a plan needs to know about a model. `kind`: of its weights, as `--weights` names it;
    `dtype`: of unquantized weights, keys and values; `layouts_of`: those of linears by their names,
    None for plain ones; `layouts`: of all linears of the layers.
    """

    name: str
    architecture: Architecture
    kind: str
    dtype: torch.dtype
    weights_bytes: int
    linear_bytes: Callable[[str], int]
    layouts_of: Callable[[Iterable[str]], Set[WeightLayout | None]]
    layouts: Set[WeightLayout | None]
    num_parameters: int
    is_here: bool
    entry: CatalogEntry | None
    # The head or assistant, and the model, that draft for it.
    head: FoundHead | None = None
    draft: "Shape | None" = None
    # Of the weights, what stays in its file; of a publisher's copy in this format.
    unread_bytes: int = 0
    published_bytes: int = 0

    def with_states(self, dtype: StateDType) -> "Shape":
        """The same, whose recurrences keep their matrices in `dtype`."""
        draft = None if self.draft is None else self.draft.with_states(dtype)
        return replace(self, architecture=self.architecture.with_states(dtype), draft=draft)

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft model's weights."""
        return 0 if self.draft is None else self.draft.weights_bytes


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What a model needs on a machine. `memory`: without the weights of a draft model, which is
    loaded first; `problem` says why it does not fit, `remedy` names one flag or model that would;
    `without_kernel`: types of weights that are dequantized for each product.
    """

    shape: Shape
    machine: Machine
    memory: MemoryPlan
    kv_token_bytes: int
    cached_tokens: int
    decode_tokens_per_s: float | None
    prefill_tokens_per_s: float | None
    without_kernel: tuple[str, ...] = ()
    problem: str = ""
    remedy: str = ""

    @property
    def fits(self) -> bool:
        """Whether the model runs on the machine."""
        return not self.problem

    @property
    def resident_bytes(self) -> int:
        """What the process holds once a conversation has filled the context; 0: not known, as on a
        GPU.
        """
        own = self.memory.resident_bytes
        return own + self.shape.draft_bytes if own else 0

    @property
    def cached_1k(self) -> dict[str, int]:
        """Bytes of 1,024 tokens in a KV cache of each type, by its name."""
        groups = self.shape.architecture.cache_groups
        return {
            name: 1024 * sum(group.token_bytes(partial(row_bytes, dtype=dtype)) for group in groups)
            for name, dtype in KV_DTYPES.items()
        }

    def prompt_s(self, num_tokens: int) -> float | None:
        """Predicted seconds to read a prompt; later tokens take longer."""
        if self.prefill_tokens_per_s is None:
            return None
        work = prompt_work(self.shape.architecture)
        share = work(num_tokens) / work(_RATED_TOKENS)
        return share * _RATED_TOKENS / self.prefill_tokens_per_s

    @property
    def chats_at_once(self) -> int:
        """Conversations of 4,096 tokens, or of the whole context where that is shorter."""
        each = min(_CHAT_TOKENS, max(1, self.memory.max_model_len))
        # The states of the first one are part of the plan; those of others take room of the cache.
        state_tokens = self.shape.architecture.slot_bytes() // max(1, self.kv_token_bytes)
        return (self.cached_tokens + state_tokens) // (each + state_tokens)

    def as_json(self) -> dict[str, Any]:
        """The plan as one flat object."""
        memory = self.memory
        return {
            "model": self.shape.name,
            "weights": self.shape.kind,
            "parameters": self.shape.num_parameters,
            "machine": self.machine.name,
            "free_bytes": memory.free_bytes,
            "usable_bytes": memory.budget_bytes,
            "weights_bytes": memory.weights_bytes,
            "has_head": self.shape.head is not None,
            "draft_model": None if self.shape.draft is None else self.shape.draft.name,
            "draft_model_bytes": self.shape.draft_bytes,
            "host_bytes": memory.host_bytes,
            "expert_slots": memory.expert_slots,
            "activations_bytes": memory.activations_bytes,
            "graphs_bytes": memory.graphs_bytes,
            "states_bytes": memory.states_bytes,
            "resident_bytes": self.resident_bytes,
            "kv_bytes_per_1k_tokens": 1024 * self.kv_token_bytes,
            "kv_bytes_per_1k_tokens_in": self.cached_1k,
            "context": memory.max_model_len,
            "model_context": self.shape.architecture.max_position_embeddings,
            "cached_tokens": self.cached_tokens,
            "chats_at_once": self.chats_at_once,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "context_prefill_s": self.prompt_s(memory.max_model_len),
            "without_kernel": list(self.without_kernel),
            "fits": self.fits,
            "problem": self.problem,
            "remedy": self.remedy,
        }


def this_machine(config: EngineConfig, *, measures: bool = True) -> Machine:
    """This machine, with the memory that is free now, and its bandwidth. `measures`: measure the
    bandwidth more precisely, and the arithmetic rate too, which takes seconds on a CPU.
    """
    device = select_device(config)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    free, memory = free_bytes(device), total_bytes(device)
    if not measures:
        x = torch.ones(_GLANCE_BYTES // 4, device=device)
        rate = _GLANCE_BYTES / best_time(lambda: x.sum(), device)
        return Machine(name, device.type, memory, free, rate, None)
    limits = measure_rates(device)
    rates = limits.memory_bytes_per_s, limits.peak("bf16")
    return Machine(name, device.type, memory, free, *rates)


def machine_of(card: GpuCard) -> Machine:
    """A GPU by its data sheet."""
    return Machine(
        card.title,
        "cuda",
        card.memory_bytes,
        min(int(card.memory_bytes * _FREE_SHARE), card.memory_bytes - _DISPLAY_BYTES),
        card.bandwidth_bytes_per_s,
        card.operations_per_s,
        card.host_bytes_per_s,
        f"{card.memory_bytes >> 30} GiB",
    )


def machine_with(num_bytes: int, told: str = "") -> Machine:
    """A GPU of which only the free memory is known; `told`: as somebody wrote it."""
    return Machine("a GPU", "cuda", num_bytes, num_bytes, None, None, told=told)


def shape_of(
    source: ModelSource, kind: str | None, speculation: SpeculationConfig = _ITSELF
) -> Shape:
    """A model's shape: from the files of a folder, from the catalogue without any file, or from
    config.json, which is fetched from the hub. `kind`: of its weights; None for the kind it has, or
    the catalogue's suggestion. `speculation`: which heads and models draft for it, of which heads
    and assistants must be here.

    Raises: as `fetch_model`, `read_architecture`, `find_head` and `find_head_apart`; RequestError
    for an unknown kind, and for a head that is not here.
    """
    shape, files = _shape_alone(source, kind)
    architecture = shape.architecture
    named, draft = _what_drafts(speculation)
    if draft is not None and draft.architecture.vocab_size != architecture.vocab_size:
        raise vocabularies_differ(draft.name, shape.name)
    head = find_head_apart(named, source.name, architecture, files, speculation)
    if head is None and files:
        head = find_head(files, architecture, speculation)
    elif head is None and speculation.needs("head"):
        raise _is_not_here(source.name)
    return replace(shape, head=head, draft=draft)


def _what_drafts(speculation: SpeculationConfig) -> tuple[NamedDrafters, Shape | None]:
    """The named head or assistant, and the named draft model's shape, as here or published."""
    eagle = None if speculation.eagle_head is None else _find_here(speculation.eagle_head)
    if speculation.draft_model is None:
        return NamedDrafters(eagle), None
    source = resolve_model(speculation.draft_model)
    folder, entry = find_here(source), load_catalog().get(source.name)
    if folder is not None and not is_assistant(folder):
        return NamedDrafters(eagle), _shape_alone(replace(source, folder=folder), None)[0]
    has_sizes = entry is not None and entry.sizes is not None
    if folder is None and (has_sizes or not is_assistant(fetch_model(source, with_weights=False))):
        is_mxfp4 = entry is not None and entry.quantization == "mxfp4-experts"
        kind = "mxfp4-experts" if is_mxfp4 else "bf16"
        return NamedDrafters(eagle), _shape_alone(source, kind)[0]
    return NamedDrafters(eagle, _find_here(speculation.draft_model)), None


def _find_here(name: str) -> FetchedModel:
    source = resolve_model(name)
    folder = find_here(source)
    if folder is None:
        raise _is_not_here(name)
    return FetchedModel(source, folder, 0.0)


def _is_not_here(name: str) -> RequestError:
    return RequestError(
        f"a head is counted from its files, and {name} is not on this machine",
        param="spec",
        hint=f"localllm pull {name}",
    )


def _shape_alone(source: ModelSource, kind: str | None) -> tuple[Shape, list[Path]]:
    """A model's shape without what drafts for it, and its weight files if it is from them."""
    if kind is not None and kind not in WEIGHT_KINDS:
        raise RequestError(
            f"--weights must be one of {', '.join(WEIGHT_KINDS)}, found {kind!r:.40}",
            param="weights",
        )
    entry = load_catalog().get(source.name)
    own = _own_folder(source)
    if own is not None and (kind is None or source.name in BUILT_IN_MODELS):
        files = find_weight_files(own)
        return _shape_of_files(source.name, own, files), files
    if entry is not None and entry.sizes is not None:
        architecture, _ = catalog_shape(entry.alias)
    else:
        folder = own or fetch_model(source, with_weights=False)
        if kind is None and is_gguf_folder(folder):
            files = find_weight_files(folder)
            return replace(_shape_of_files(source.name, folder, files), is_here=False), files
        architecture = read_architecture(folder)
    kind = kind or (entry.quantization if entry else "bf16")
    return _shape_of_kind(source.name, architecture, kind, entry), []


def _own_folder(source: ModelSource) -> Path | None:
    """The folder whose files tell a model's shape: its own, or that of a GGUF model that is here;
    None for other repositories, of which smaller copies can be made.
    """
    if source.folder is not None:
        return source.folder
    here = find_here(source)
    is_snapshot = source.repo is not None and here == find_snapshot(source.repo, source.revision)
    return None if is_snapshot else here


def _shape_of_kind(
    name: str, architecture: Architecture, kind: str, entry: CatalogEntry | None
) -> Shape:
    weights = RandomWeights(architecture, _kind(kind), torch.device("cpu"))
    return Shape(
        name=name,
        architecture=architecture,
        kind=kind,
        dtype=torch.bfloat16,
        weights_bytes=weights.resident_bytes(2),
        linear_bytes=weights.linear_bytes,
        layouts_of=weights.layouts,
        layouts=weights.layouts(_linears(architecture)),
        num_parameters=architecture.num_parameters,
        is_here=False,
        entry=entry,
        unread_bytes=0 if architecture.tie_word_embeddings else weights.linear_bytes(TABLE),
        published_bytes=weights.published_bytes,
    )


def _linears(architecture: Architecture) -> Iterator[str]:
    """All linears of the layers."""
    for layer, group in architecture.groups():
        yield from (f"{layer}.{name}" for name in group.names)


def _kind(name: str) -> WeightKind:
    return next(kind for kind in WEIGHT_KINDS if kind == name)


def _shape_of_files(name: str, folder: Path, files: list[Path]) -> Shape:
    architecture = read_architecture(folder)
    weights = check_weights(files, architecture)
    dtype: torch.dtype = getattr(
        torch, "float32" if name in BUILT_IN_MODELS else architecture.dtype
    )
    plain = RandomWeights(architecture, "bf16", torch.device("cpu"))

    def linear_bytes(linear: str) -> int:
        quantized = weights.find_quantized(linear)
        if quantized is not None:
            return quantized.read_bytes(dtype.itemsize)
        return plain.linear_bytes(linear) * dtype.itemsize // 2

    quantization = describe_quantization(read_json_object(folder / "config.json"))
    return Shape(
        name=name,
        architecture=architecture,
        kind=str(dtype).removeprefix("torch.") if quantization == "none" else quantization,
        dtype=dtype,
        weights_bytes=weights.resident_bytes(dtype.itemsize),
        linear_bytes=linear_bytes,
        layouts_of=weights.layouts,
        layouts=weights.layouts(_linears(architecture)),
        num_parameters=architecture.num_parameters,
        is_here=True,
        entry=load_catalog().get(name),
        unread_bytes=weights.unread_bytes(dtype),
    )


def plan_model(shape: Shape, machine: Machine, engine: EngineConfig) -> ModelPlan:
    """Divide the machine's memory and predict the speed; a plan that does not fit has a remedy.

    Raises: RequestError for a context that the model does not support.
    """
    shape = shape.with_states(engine.state_dtype)
    try:
        return _fitting(shape, machine, engine)
    except GpuMemoryError as error:
        return replace(
            _unbounded(shape, machine, engine),
            problem=_problem(error, shape, machine, engine),
            remedy=_remedy(shape, machine, engine),
        )


def _problem(error: GpuMemoryError, shape: Shape, machine: Machine, engine: EngineConfig) -> str:
    """What does not fit: the requested context, or the model."""
    if engine.max_model_len is not None:
        try:
            _fitting(shape, machine, replace(engine, max_model_len=None))
        except GpuMemoryError:
            return error.message
        return f"the model fits, but a context of {engine.max_model_len:,} tokens does not"
    return error.message


def _plan_memory(
    shape: Shape, machine: Machine, engine: EngineConfig, num_bytes: int
) -> MemoryPlan:
    of_draft = None
    if shape.draft is not None:
        # It is loaded first, with a cache of one block: what its tokens take is part of the cache.
        alone = replace(engine, kv_cache_tokens=engine.block_size, max_model_len=None)
        of_draft = _plan_memory(shape.draft, machine, alone, num_bytes)
        num_bytes -= of_draft.weights_bytes
    memory = DecoderMemory(
        shape.architecture,
        machine.device,
        _traits(shape, machine, engine),
        shape.dtype,
        shape.weights_bytes,
        expert_sizes(shape.architecture, shape.linear_bytes, shape.layouts_of),
        of_draft,
        shape.unread_bytes,
    )
    return memory.plan(engine, num_bytes, shape.head)


def _traits(shape: Shape, machine: Machine, engine: EngineConfig) -> Traits:
    return find_traits(machine.device, engine.backend, shape.dtype)


def _without_kernel(shape: Shape, machine: Machine, engine: EngineConfig) -> tuple[str, ...]:
    traits = _traits(shape, machine, engine)
    layouts = [each for each in shape.layouts if each is not None]
    slow = [
        each.kind for each in layouts if not traits.has_kernel(each, shape.dtype, machine.device)
    ]
    return tuple(sorted(set(slow)))


def _row_bytes(shape: Shape, engine: EngineConfig) -> RowBytes:
    return partial(row_bytes, dtype=KV_DTYPES.get(engine.kv_cache_dtype, shape.dtype))


def _fitting(shape: Shape, machine: Machine, engine: EngineConfig) -> ModelPlan:
    memory = _plan_memory(shape, machine, engine, machine.free_bytes)
    shortest = min(_SHORTEST_CONTEXT, shape.architecture.max_position_embeddings)
    if memory.max_model_len < shortest and engine.max_model_len is None:
        raise GpuMemoryError(f"there is room for a context of {memory.max_model_len:,} tokens only")
    return _with_speed(shape, machine, engine, memory)


def _unbounded(shape: Shape, machine: Machine, engine: EngineConfig) -> ModelPlan:
    """The plan of a model that does not fit, as if there were enough memory."""
    context = engine.max_model_len or min(_CHAT_TOKENS, shape.architecture.max_position_embeddings)
    asked = replace(engine, max_model_len=context, max_num_seqs=1)
    memory = _plan_memory(shape, machine, asked, 1 << 50)
    free = max(0, machine.free_bytes - shape.draft_bytes)
    budget = int(free * engine.gpu_memory_utilization)
    shown = replace(memory, free_bytes=free, budget_bytes=budget)
    return _with_speed(shape, machine, asked, shown)


def _with_speed(
    shape: Shape, machine: Machine, engine: EngineConfig, memory: MemoryPlan
) -> ModelPlan:
    decode, prefill = predict_speed(shape, machine, engine)
    if memory.expert_slots is not None:
        decode, prefill = _from_host(shape, machine, memory, decode, prefill)
    return ModelPlan(
        shape=shape,
        machine=machine,
        memory=memory,
        kv_token_bytes=memory.token_bytes,
        cached_tokens=memory.cached_tokens,
        decode_tokens_per_s=decode,
        prefill_tokens_per_s=prefill,
        without_kernel=_without_kernel(shape, machine, engine),
    )


def predict_speed(
    shape: Shape, machine: Machine, engine: EngineConfig, context: int = _RATED_TOKENS
) -> tuple[float | None, float | None]:
    """Tokens a second of decode, in one chat with `context` tokens, and of prefill."""
    if machine.memory_bytes_per_s is None:
        return None, None
    work = ModelWork.of(shape.architecture, shape.linear_bytes, _row_bytes(shape, engine))
    if machine.device == "cpu":
        decode = _CPU_DECODE * machine.memory_bytes_per_s / work.decode_bytes([context])
    else:
        gpu = Gpu(machine.name, machine.memory_bytes_per_s, machine.operations_per_s or 1e15)
        kinds = {None if each is None else each.kind for each in shape.layouts}
        is_fused = kinds <= _traits(shape, machine, engine).fused_kinds
        step = predict_decode(
            work, shape.linear_bytes, gpu, WITH_CARE, is_fused=is_fused, batch=1, context=context
        )
        decode = 1 / step.seconds
    if machine.operations_per_s is None:
        return decode, None
    share = _CPU_PREFILL if machine.device == "cpu" else _GPU_PREFILL
    operations = work.prefill_operations(context) / context
    return decode, share * machine.operations_per_s / operations


def _from_host(
    shape: Shape,
    machine: Machine,
    memory: MemoryPlan,
    decode: float | None,
    prefill: float | None,
) -> tuple[float | None, float | None]:
    """The same where experts without a slot are copied for each token, or for each step of a
    prompt: as if each were chosen as often as any other.
    """
    assert memory.expert_slots is not None
    mixtures = [spec.router for _, spec in shape.architecture.experts()]
    count = max(router.num_experts for router in mixtures)
    absent = 1 - memory.expert_slots / count
    layer_bytes = memory.host_bytes / len(mixtures)
    token_bytes = sum(layer_bytes * router.top_k / router.num_experts for router in mixtures)
    launches = sum(
        # One launch for a product, of however many experts, and one for the norm before the block.
        number
        * (1 + sum(each.copy == 0 for each in block.products) + block.launches(is_fused=False))
        for block, number in shape.architecture.blocks().items()
    )
    if decode is not None:
        seconds = max(1 / decode, launches * _LAUNCH_S) + len(mixtures) * _LOOK_S
        decode = 1 / (seconds + absent * token_bytes / machine.host_bytes_per_s)
    if prefill is not None:
        tokens = memory.max_num_batched_tokens
        seconds = tokens / prefill + absent * memory.host_bytes / machine.host_bytes_per_s
        prefill = tokens / seconds
    return decode, prefill


# Stands for the context that fits, until that is known.
_CTX = "--ctx auto"


def _remedy(shape: Shape, machine: Machine, engine: EngineConfig) -> str:
    """One flag that makes the model fit, or else a smaller model from the catalogue that fits."""
    attempts: list[tuple[str, Shape, EngineConfig]] = []
    if engine.kv_cache_dtype == "auto":
        attempts.append(("--kv-cache-dtype int8", shape, replace(engine, kv_cache_dtype="int8")))
    shapes = [("", shape)]
    for kind in ("int8", "int4"):
        if not shape.is_here and kind != shape.kind and shape.kind in ("bf16", "int8", "fp8"):
            smaller = _shape_of_kind(shape.name, shape.architecture, kind, shape.entry)
            shapes.append((f"--weights {kind}", smaller))
            attempts.append((f"--weights {kind}", smaller, engine))
    if engine.max_model_len is not None:
        # A shorter context than requested, with the same weights or else with smaller ones.
        any_length = replace(engine, max_model_len=None)
        attempts += [(f"{flag} {_CTX}".strip(), each, any_length) for flag, each in shapes]
    if engine.gpu_memory_utilization < 1:
        whole = replace(engine, gpu_memory_utilization=1.0)
        attempts.append(("--gpu-memory-utilization 1", shape, whole))
    for flag, smaller, config in attempts:
        try:
            plan = _fitting(smaller, machine, config)
        except GpuMemoryError:
            continue
        return flag.replace(_CTX, f"--ctx {plan.memory.max_model_len}")
    plans = plan_catalog(machine, EngineConfig())
    others = [
        plan
        for plan in plans
        if plan.fits
        and plan.memory.expert_slots is None
        and plan.shape.num_parameters < shape.num_parameters
    ]
    if not others:
        return "a machine with more memory"
    # The recommended model if it fits, else the largest that does.
    entry = recommended("cpu" if machine.device == "cpu" else "gpu", machine.memory_bytes)
    own = [plan for plan in others if entry is not None and plan.shape.name == entry.alias]
    best = own[0] if own else max(others, key=lambda plan: plan.shape.num_parameters)
    return f"a smaller model: {best.shape.name}"


def plan_catalog(machine: Machine, engine: EngineConfig) -> list[ModelPlan]:
    """A plan for every model in the catalogue, quantized as it suggests; the smallest first."""
    plans = []
    for entry in load_catalog().values():
        if entry.sizes is None:
            continue
        shape = shape_of(ModelSource(entry.alias, repo=entry.repo), None)
        try:
            plans.append(_fitting(shape, machine, engine))
        except GpuMemoryError as error:
            failed = _unbounded(shape, machine, engine)
            plans.append(replace(failed, problem=error.message))
    return sorted(plans, key=lambda plan: plan.shape.num_parameters)
