"""The subject of a benchmark: an engine with a real model, or with random weights."""

import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch

from localllm.answer.drafters import find_drafters
from localllm.answer.opening import load_draft_model
from localllm.cost.rates import ModelWork
from localllm.drafting.speculator import Speculator
from localllm.engine.chosen_device import select_device
from localllm.engine.config import EngineConfig
from localllm.engine.engine import Engine
from localllm.engine.loaded_decoder import LoadedDecoder, build_decoder, load_decoder
from localllm.engine.loading import build_engine
from localllm.errors import RequestError
from localllm.files.json_file import read_json_object
from localllm.hub.catalog_shape import catalog_shape
from localllm.hub.checkpoint import Checkpoint, open_checkpoint
from localllm.model.architecture import EMBEDDING, Architecture
from localllm.model.blocks.block import RowBytes
from localllm.model.random_weights import RandomWeights, WeightKind
from localllm.model.weight_check import WeightMap, check_weights
from localllm.model.weight_files import find_weight_files, fingerprint
from localllm_kernels.attention.kv_cache import row_bytes
from localllm_kernels.compiling.traits import Arithmetic


@dataclass(frozen=True, slots=True)
class Subject:
    """A loaded model and what is known about its weights.

    `weights`: their kind, as the report names it; `arithmetic`: the arithmetic of large products;
    `config_json`: the fields of that file. `engine` does not draft; `speculator` is for a second
    engine beside it that does.
    """

    name: str
    weights: str
    engine: Engine
    decoder: LoadedDecoder
    work: ModelWork
    arithmetic: Arithmetic
    load_s: float
    source: Checkpoint | RandomWeights
    config_json: Mapping[str, Any]
    speculator: Speculator | None

    @property
    def architecture(self) -> Architecture:
        """The model's sizes."""
        return self.work.architecture

    def random_tokens(self, rng: random.Random, count: int) -> list[int]:
        """`count` random token ids from the vocabulary."""
        return [rng.randrange(self.architecture.vocab_size) for _ in range(count)]

    @property
    def device(self) -> torch.device:
        """The device that the model runs on."""
        return self.decoder.device


def open_subject(name: str | None, config: EngineConfig, longest: int) -> Subject:
    """Load a model, with `longest` tokens of context at most. Raises: as `open_model`."""
    started = time.monotonic()
    found = open_checkpoint(name, config)
    config = _fitted(found.engine_config, found.architecture, longest)
    files = find_weight_files(found.folder)
    weights = check_weights(files, found.architecture)
    drafters = find_drafters(found)
    draft, head = load_draft_model(drafters), drafters.head
    decoder = load_decoder(found.folder, found.architecture, config, draft=draft, head=head)
    weights_id = fingerprint(found.folder, files)
    engine = build_engine(decoder, config, found.eos_token_ids, weights_id, draft)
    load_s = time.monotonic() - started
    formats = {type(each.scheme).__name__.lower() for each in weights.quantized.values()}
    return Subject(
        found.name,
        ", ".join(sorted(formats)) or str(decoder.dtype).removeprefix("torch."),
        engine.beside(),
        decoder,
        ModelWork.of(
            found.architecture,
            lambda linear: _stored_bytes(weights, linear, decoder),
            _row_bytes(decoder),
        ),
        _arithmetic(decoder, sorted(weights.kinds)),
        load_s,
        found,
        read_json_object(found.folder / "config.json"),
        engine.speculator,
    )


def open_random(
    alias: str, kind: WeightKind, config: EngineConfig, longest: int, seed: int
) -> Subject:
    """Load random weights of a shape in the catalogue; `longest` as in `open_subject`.

    Raises: CatalogError for a name that the catalogue does not have, or has no shape for; as
    `load_decoder`.
    """
    started = time.monotonic()
    architecture, raw = catalog_shape(alias)
    config = _fitted(config, architecture, longest)
    speculation = config.speculation
    if speculation.draft_model is not None or speculation.eagle_head is not None:
        raise RequestError("random weights have no draft model and no head", param="drafter")
    source = RandomWeights(architecture, kind, select_device(config), seed)
    decoder = build_decoder(source, source.resident_bytes, architecture, config)
    engine = build_engine(decoder, config, frozenset(), f"random {alias} {kind} {seed}")
    return Subject(
        alias,
        f"random {kind}",
        engine.beside(),
        decoder,
        ModelWork.of(architecture, source.linear_bytes, _row_bytes(decoder)),
        _arithmetic(decoder, [kind]),
        time.monotonic() - started,
        source,
        raw,
        engine.speculator,
    )


def _fitted(config: EngineConfig, model: Architecture, longest: int) -> EngineConfig:
    if config.max_model_len is not None:
        return config
    return replace(config, max_model_len=min(longest, model.max_position_embeddings))


def _stored_bytes(weights: WeightMap, linear: str, decoder: LoadedDecoder) -> int:
    """Bytes of a linear's weight in memory, from the file headers; also for a tied head."""
    quantized = weights.find_quantized(linear)
    if quantized is not None:
        return quantized.read_bytes(decoder.dtype.itemsize)
    info = weights.plain.get(f"{linear}.weight") or weights.plain[EMBEDDING]
    is_half = decoder.model.ops.traits.halves_weights and info.dtype == "BF16"
    return prod(info.shape) * (2 if is_half else decoder.dtype.itemsize)


def _arithmetic(decoder: LoadedDecoder, kinds: Iterable[str]) -> Arithmetic:
    """The arithmetic for the first kind of packed weights, or for plain ones if there is none."""
    traits = decoder.model.ops.traits
    return traits.arithmetic(next(iter(kinds), "plain"), decoder.dtype)


def _row_bytes(decoder: LoadedDecoder) -> RowBytes:
    return partial(row_bytes, dtype=decoder.kv_dtype)
