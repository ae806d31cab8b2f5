"""Loads a model from a checkpoint: weights, engine, and what drafts for it."""

import logging
import time
from pathlib import Path

from localllm.answer.loaded_model import LoadedModel
from localllm.answer.text_engine import TextEngine
from localllm.engine.config import EngineConfig
from localllm.engine.listener import LOGGED, Listener
from localllm.engine.loading import LoadedDecoder, load_draft, load_engine
from localllm.errors import LocalLLMError, RequestError
from localllm.files.file_times import note_use
from localllm.files.json_file import read_json_object
from localllm.hub.catalog import BUILT_IN_MODELS, resolve_model
from localllm.hub.checkpoint import Checkpoint, open_checkpoint
from localllm.hub.download import DownloadProgress, fetch_model, find_snapshot, is_whole
from localllm.model.assistant import find_assistant
from localllm.model.eagle import find_eagle
from localllm.model.families.table import drafter_kind
from localllm.model.found_head import FoundHead
from localllm.model.weight_files import find_weight_files

logger = logging.getLogger(__name__)

# What the names of models end in that draft for the model of the name before it, as Gemma 4's do.
_ASSISTANT = "-assistant"


def open_model(
    name: str | None = None,
    config: EngineConfig | None = None,
    listener: Listener = LOGGED,
    progress: DownloadProgress | None = None,
) -> LoadedModel:
    """Open a checkpoint and load it into an engine; `listener` is told how memory is divided,
    except for a built-in model, which takes next to none.

    Raises: as `open_checkpoint` and `load_checkpoint`.
    """
    return load_checkpoint(open_checkpoint(name, config, progress), listener)


def load_checkpoint(found: Checkpoint, listener: Listener = LOGGED) -> LoadedModel:
    """Load an opened checkpoint into an engine; see `open_model` and `load_text_engine`."""
    started = time.monotonic()
    engine = load_text_engine(found, listener)
    taken_s = found.open_s + time.monotonic() - started
    return LoadedModel(found.name, engine, found.defaults, taken_s)


def load_text_engine(found: Checkpoint, listener: Listener = LOGGED) -> TextEngine:
    """The engine of an opened checkpoint; `listener`: see `open_model`.

    Raises: CheckpointError, GpuMemoryError, BackendError; for a draft model and an EAGLE head, as
    `open_checkpoint`.
    """
    told = Listener(doing=listener.doing) if found.name in BUILT_IN_MODELS else listener
    draft, head = open_draft(found, listener), find_other_head(found)
    config, end_ids = found.engine_config, found.eos_token_ids
    engine = load_engine(found.folder, found.architecture, config, end_ids, told, draft, head)
    return TextEngine(engine, found.tokenizer)


def open_draft(found: Checkpoint, listener: Listener = LOGGED) -> LoadedDecoder | None:
    """Load the draft model that the configuration names; None if it names none, or an assistant.

    Raises: as `load_checkpoint`; RequestError if the two vocabularies differ.
    """
    name = found.engine_config.speculation.draft_model
    if name is None or _is_assistant(_fetched(name)[1]):
        return None
    draft = open_checkpoint(name, found.engine_config)
    if (
        draft.architecture.vocab_size != found.architecture.vocab_size
        or draft.tokenizer.vocabulary() != found.tokenizer.vocabulary()
    ):
        raise RequestError(
            f"{draft.name} cannot draft for {found.name}: their vocabularies differ",
            param="spec",
            hint="a smaller model of the same family, or --spec ngram, which needs no model",
        )
    told = Listener(doing=listener.doing)
    return load_draft(draft.folder, draft.architecture, draft.engine_config, told)


def find_other_head(found: Checkpoint) -> FoundHead | None:
    """The EAGLE head or the assistant that the configuration names; if it names neither and wants a
    head, the model's assistant, if that is here already.

    Raises: CatalogError, DownloadError, RequestError; as `find_eagle` and `find_assistant`.
    """
    speculation, heads = found.engine_config.speculation, list[FoundHead]()
    if speculation.eagle_head is not None:
        own, folder = _fetched(speculation.eagle_head)
        files = find_weight_files(found.folder)
        heads.append(find_eagle(own, folder, found.name, found.architecture, files))
    if speculation.draft_model is not None:
        own, folder = _fetched(speculation.draft_model)
        if _is_assistant(folder):
            heads.append(find_assistant(own, folder, found.name, found.architecture))
    if len(heads) > 1:
        raise RequestError("--spec takes an EAGLE head or an assistant, not both", param="spec")
    if not heads and speculation.has("head"):
        return _find_assistant_beside(found)
    return next(iter(heads), None)


def _find_assistant_beside(found: Checkpoint) -> FoundHead | None:
    """The assistant of a model, which has the model's name with an ending, if it is here already.
    One that is another model's or lacks tensors is an error only where the configuration needs a
    head.
    """
    source = resolve_model(found.name)
    beside: Path | None
    if source.folder is not None:
        folder = source.folder.resolve()
        name = f"{folder.name}{_ASSISTANT}"
        beside = folder.with_name(name)
    else:
        name = f"{source.repo}{_ASSISTANT}"
        beside = find_snapshot(name, None)
        beside = beside if beside is not None and is_whole(beside) else None
    if beside is None or not (beside / "config.json").is_file():
        return None
    try:
        if not _is_assistant(beside):
            return None
        own = find_assistant(name, beside, found.name, found.architecture)
    except LocalLLMError as error:
        if found.engine_config.speculation.needs("head"):
            raise
        logger.warning("the model's assistant is not used: %s", error)
        return None
    note_use(beside)
    return own


def _fetched(name: str) -> tuple[str, Path]:
    """The name that others are told of a head or model that drafts, and its folder."""
    source = resolve_model(name)
    folder = fetch_model(source)
    note_use(folder)
    return source.name, folder


def _is_assistant(folder: Path) -> bool:
    return drafter_kind(read_json_object(folder / "config.json")) == "draft"
