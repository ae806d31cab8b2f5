"""What drafts for a model besides n-grams, found and checked before any weight is read."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localllm.drafting.speculation_config import SpeculationConfig
from localllm.errors import LocalLLMError, RequestError
from localllm.files.file_times import note_use
from localllm.files.json_file import read_json_object
from localllm.hub.catalog import ModelSource, resolve_model
from localllm.hub.checkpoint import (
    Checkpoint,
    FetchedModel,
    NamedDrafters,
    read_checkpoint,
    read_model,
)
from localllm.hub.download import find_here
from localllm.model.architecture import Architecture
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

    Raises: as `find_head_apart`; CheckpointError, and RequestError if a draft model has another
    vocabulary.
    """
    started = time.monotonic()
    head = find_head_apart(
        found.drafters,
        found.name,
        found.architecture,
        find_weight_files(found.folder),
        found.engine_config.speculation,
    )
    own, model = found.drafters.draft, None
    if own is not None and not is_assistant(own.folder):
        model = _read_draft_model(own, found)
    return Drafters(model, head, time.monotonic() - started)


def find_head_apart(
    named: NamedDrafters,
    name: str,
    architecture: Architecture,
    files: Sequence[Path],
    speculation: SpeculationConfig,
) -> FoundHead | None:
    """The EAGLE head or the assistant of the model `name`, whose weights are in `files`: the named
    one, or the model's assistant beside it, if a head is wanted and that is here already.

    Raises: as `find_eagle` and `find_assistant`; RequestError if both are named.
    """
    heads = list[FoundHead]()
    if named.eagle is not None:
        own = named.eagle
        heads.append(find_eagle(own.source.name, own.folder, name, architecture, files))
    if named.draft is not None and is_assistant(named.draft.folder):
        own = named.draft
        heads.append(find_assistant(own.source.name, own.folder, name, architecture))
    if len(heads) > 1:
        raise RequestError("--spec takes an EAGLE head or an assistant, not both", param="spec")
    if not heads and speculation.has("head"):
        return _find_assistant_beside(name, architecture, speculation)
    return next(iter(heads), None)


def _read_draft_model(own: FetchedModel, found: Checkpoint) -> Checkpoint:
    """A smaller model for a model. Raises: RequestError if their vocabularies differ."""
    draft = read_checkpoint(read_model(own, found.engine_config))
    if (
        draft.architecture.vocab_size != found.architecture.vocab_size
        or draft.tokenizer.vocabulary() != found.tokenizer.vocabulary()
    ):
        raise vocabularies_differ(draft.name, found.name)
    return draft


def vocabularies_differ(draft: str, target: str) -> RequestError:
    """The error for a draft model whose tokens are not those of its target."""
    return RequestError(
        f"{draft} cannot draft for {target}: their vocabularies differ",
        param="spec",
        hint="a smaller model of the same family, or --spec ngram, which needs no model",
    )


def _find_assistant_beside(
    name: str, architecture: Architecture, speculation: SpeculationConfig
) -> FoundHead | None:
    """The assistant of the model `name`, which has that name with an ending, if it is here already.
    One that is another model's or lacks tensors is an error only where the configuration needs a
    head.
    """
    source = resolve_model(name)
    beside: Path | None
    if source.file is not None:  # its file says nothing of other folders
        return None
    if source.folder is not None:
        folder = source.folder.resolve()
        own_name = f"{folder.name}{_ASSISTANT}"
        beside = folder.with_name(own_name)
    else:
        own_name = f"{source.repo}{_ASSISTANT}"
        beside = find_here(ModelSource(own_name, repo=own_name))
    if beside is None or not (beside / "config.json").is_file():
        return None
    try:
        if not is_assistant(beside):
            return None
        own = find_assistant(own_name, beside, name, architecture)
    except LocalLLMError as error:
        if speculation.needs("head"):
            raise
        logger.warning("the model's assistant is not used: %s", error)
        return None
    note_use(beside)
    return own


def is_assistant(folder: Path) -> bool:
    """Whether a folder holds an assistant, not a model."""
    return drafter_kind(read_json_object(folder / "config.json")) == "draft"
