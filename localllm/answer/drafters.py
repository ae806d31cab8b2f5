"""What drafts for a model besides n-grams, found and checked before any weight is read."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import LocalLLMError, RequestError
from localllm.files.file_times import note_use
from localllm.files.json_file import read_json_object
from localllm.hub.catalog import resolve_model
from localllm.hub.checkpoint import (
    Checkpoint,
    FetchedModel,
    fetch_named,
    read_checkpoint,
    read_model,
)
from localllm.hub.download import find_snapshot, is_whole
from localllm.model.assistant import find_assistant
from localllm.model.eagle import find_eagle
from localllm.model.families.table import drafter_kind
from localllm.model.found_head import FoundHead
from localllm.model.weight_files import find_weight_files

logger = logging.getLogger(__name__)

# What the names of models end in that draft for the model of the name before it, as Gemma 4's do.
_ASSISTANT = "-assistant"


@dataclass(frozen=True, slots=True)
class Drafters:
    """A draft model, and an EAGLE head or an assistant; None for what there is not. A head in the
    model's own files is not among them. `open_s`: seconds to find and check them.
    """

    model: Checkpoint | None
    head: FoundHead | None
    open_s: float


def find_drafters(found: Checkpoint) -> Drafters:
    """What the configuration of a model names; if it names neither head nor assistant and wants a
    head, the model's assistant, if that is here already.

    Raises: as `open_checkpoint`, `find_eagle` and `find_assistant`; RequestError if a draft model
    has another vocabulary.
    """
    started = time.monotonic()
    speculation, model, heads = found.engine_config.speculation, None, list[FoundHead]()
    if speculation.eagle_head is not None:
        own = fetch_named(speculation.eagle_head)
        files = find_weight_files(found.folder)
        name, architecture = own.source.name, found.architecture
        heads.append(find_eagle(name, own.folder, found.name, architecture, files))
    if speculation.draft_model is not None:
        own = fetch_named(speculation.draft_model)
        if _is_assistant(own.folder):
            name = own.source.name
            heads.append(find_assistant(name, own.folder, found.name, found.architecture))
        else:
            model = _draft_model(own, found)
    if len(heads) > 1:
        raise RequestError("--spec takes an EAGLE head or an assistant, not both", param="spec")
    head = next(iter(heads), None)
    if head is None and speculation.has("head"):
        head = _find_assistant_beside(found)
    return Drafters(model, head, time.monotonic() - started)


def _draft_model(own: FetchedModel, found: Checkpoint) -> Checkpoint:
    """A smaller model for a model. Raises: RequestError if their vocabularies differ."""
    draft = read_checkpoint(read_model(own, found.engine_config))
    if (
        draft.architecture.vocab_size != found.architecture.vocab_size
        or draft.tokenizer.vocabulary() != found.tokenizer.vocabulary()
    ):
        raise RequestError(
            f"{draft.name} cannot draft for {found.name}: their vocabularies differ",
            param="spec",
            hint="a smaller model of the same family, or --spec ngram, which needs no model",
        )
    return draft


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


def _is_assistant(folder: Path) -> bool:
    return drafter_kind(read_json_object(folder / "config.json")) == "draft"
