"""Loads a model from a checkpoint: weights, engine, and what drafts for it."""

import time

from localllm.answer.drafters import Drafters, find_drafters
from localllm.answer.loaded_model import ON_DISK, LoadedModel
from localllm.answer.text_engine import TextEngine
from localllm.engine.config import EngineConfig
from localllm.engine.loaded_decoder import LoadedDecoder, load_draft
from localllm.engine.loading import load_engine
from localllm.hub.catalog import BUILT_IN_MODELS
from localllm.hub.checkpoint import Checkpoint, open_checkpoint
from localllm.hub.download import DownloadProgress
from localllm.operators.listener import LOGGED, Listener


def open_model(
    name: str | None = None,
    config: EngineConfig | None = None,
    listener: Listener = LOGGED,
    progress: DownloadProgress | None = None,
) -> LoadedModel:
    """Open a checkpoint and load it into an engine; `listener` is told how memory is divided,
    except for a built-in model, which takes next to none.

    Raises: as `open_checkpoint`, `find_drafters` and `load_checkpoint`.
    """
    found = open_checkpoint(name, config, progress)
    return load_checkpoint(found, find_drafters(found), listener)


def load_checkpoint(
    found: Checkpoint, drafters: Drafters, listener: Listener = LOGGED
) -> LoadedModel:
    """Load an opened checkpoint into an engine; see `open_model` and `load_text_engine`."""
    started = time.monotonic()
    engine = load_text_engine(found, drafters, listener)
    taken_s = found.open_s + drafters.open_s + time.monotonic() - started
    elsewhere = ON_DISK if found.engine_config.cache_disk_bytes else ""
    return LoadedModel(found.name, engine, found.defaults, taken_s, elsewhere)


def load_text_engine(
    found: Checkpoint, drafters: Drafters, listener: Listener = LOGGED
) -> TextEngine:
    """The engine of an opened checkpoint, with what drafts for it; `listener`: see `open_model`.

    Raises: CheckpointError, GpuMemoryError, BackendError.
    """
    told = Listener(doing=listener.doing) if found.name in BUILT_IN_MODELS else listener
    draft = load_draft_model(drafters, listener)
    config, end_ids, head = found.engine_config, found.eos_token_ids, drafters.head
    engine = load_engine(found.folder, found.architecture, config, end_ids, told, draft, head)
    return TextEngine(engine, found.tokenizer)


def load_draft_model(drafters: Drafters, listener: Listener = LOGGED) -> LoadedDecoder | None:
    """Load the draft model; None if there is none. Raises: as `load_text_engine`."""
    if drafters.model is None:
        return None
    found, told = drafters.model, Listener(doing=listener.doing)
    return load_draft(found.folder, found.architecture, found.engine_config, told)
