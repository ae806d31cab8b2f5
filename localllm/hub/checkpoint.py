"""Finds a model by name, and reads and checks its small files before anything is loaded."""

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from localllm.engine.config import EngineConfig
from localllm.files.file_times import note_use
from localllm.hub.catalog import BUILT_IN_MODEL, BUILT_IN_MODELS, ModelSource, resolve_model
from localllm.hub.download import DownloadProgress, fetch_model
from localllm.hub.generation_config import GenerationDefaults, read_generation_config
from localllm.hub.reranker_files import Reranker, find_reranker
from localllm.model.architecture import Architecture
from localllm.model.families.table import read_architecture
from localllm.process.memory import return_freed
from localllm.text.tokenizer import Tokenizer
from localllm.untrusted.tokenizers import open_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """The folder of a model, a head or an assistant, none of whose files is read yet; `fetch_s`:
    seconds to find it.
    """

    source: ModelSource
    folder: Path
    fetch_s: float


@dataclass(frozen=True, slots=True)
class NamedDrafters:
    """What a configuration names to draft for a model: an EAGLE head, and a draft model or an
    assistant; None for what it does not name.
    """

    eagle: FetchedModel | None = None
    draft: FetchedModel | None = None

    @property
    def fetch_s(self) -> float:
        """Seconds to find them."""
        return sum(each.fetch_s for each in (self.eagle, self.draft) if each is not None)


_NO_DRAFTERS = NamedDrafters()


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's folder with its config read.

    `engine_config` is the requested config, completed with what the model itself decides;
    `drafters`: what it names to draft; `fallback_template` is for a folder without a template;
    `open_s`: seconds to find all of them.
    """

    name: str
    folder: Path
    architecture: Architecture
    engine_config: EngineConfig
    drafters: NamedDrafters
    fallback_template: str | None
    open_s: float


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder with its small files read and checked; the weights are not touched yet.

    `reranker`: how it scores pairs of texts, if it was made for that; `engine_config` and
    `drafters`: see FoundModel; `open_s`: seconds for all of that.
    """

    name: str
    folder: Path
    architecture: Architecture
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    eos_token_ids: frozenset[int]
    engine_config: EngineConfig
    drafters: NamedDrafters
    reranker: Reranker | None
    open_s: float


def find_model(
    name: str | None = None,
    config: EngineConfig | None = None,
    progress: DownloadProgress | None = None,
) -> FoundModel:
    """Find a model and what `config` names to draft for it, and fetch them if necessary; None is
    the built-in one. `progress` is told about downloads.

    Raises: CatalogError, DownloadError; CheckpointError, UnsupportedModelError for its config.
    """
    config = config or EngineConfig()
    # First, since the model takes longer to fetch: a wrong name is known before.
    eagle, draft = (
        None if drafter is None else fetch_named(drafter, progress)
        for drafter in (config.speculation.eagle_head, config.speculation.draft_model)
    )
    drafters = NamedDrafters(eagle, draft)
    return read_model(fetch_named(name or BUILT_IN_MODEL, progress), config, drafters)


def fetch_named(name: str, progress: DownloadProgress | None = None) -> FetchedModel:
    """Find what has that name, and fetch it if necessary; see `find_model`.

    Raises: CatalogError, DownloadError; CheckpointError as `fetch_model`.
    """
    started = time.monotonic()
    source = resolve_model(name)
    folder = fetch_model(source, progress=progress)
    note_use(folder)
    return FetchedModel(source, folder, time.monotonic() - started)


def read_model(
    fetched: FetchedModel, config: EngineConfig, drafters: NamedDrafters = _NO_DRAFTERS
) -> FoundModel:
    """Read a model's config. Raises: CheckpointError, UnsupportedModelError."""
    started, source = time.monotonic(), fetched.source
    if source.name in BUILT_IN_MODELS and config.dtype == "auto":
        # So that the exactness contract holds by default; see docs/architecture/exactness.md.
        config = replace(config, dtype="float32")
    return FoundModel(
        name=source.name,
        folder=fetched.folder,
        architecture=read_architecture(fetched.folder),
        engine_config=config,
        drafters=drafters,
        fallback_template=source.chat_template,
        open_s=fetched.fetch_s + drafters.fetch_s + time.monotonic() - started,
    )


def open_checkpoint(
    name: str | None = None,
    config: EngineConfig | None = None,
    progress: DownloadProgress | None = None,
    *,
    is_warm: bool = False,
) -> Checkpoint:
    """Find and check a model; see `find_model` and `read_checkpoint`.

    Raises: CatalogError, DownloadError, CheckpointError, UnsupportedModelError.
    """
    return read_checkpoint(find_model(name, config, progress), is_warm=is_warm)


def read_checkpoint(found: FoundModel, *, is_warm: bool = False) -> Checkpoint:
    """Read and check the other small files of a model; `is_warm`: see `open_tokenizer`.

    Raises: CheckpointError.
    """
    started = time.monotonic()
    folder = found.folder
    defaults = read_generation_config(folder)
    tokenizer = open_tokenizer(folder, found.fallback_template, is_warm=is_warm)
    return_freed()  # to read a vocabulary takes three times as much as it needs afterwards
    # Every place that names an end token counts; they need not agree.
    eos = {*defaults.eos_token_ids, *found.architecture.eos_token_ids}
    if tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    return Checkpoint(
        name=found.name,
        folder=folder,
        architecture=found.architecture,
        tokenizer=tokenizer,
        defaults=defaults,
        eos_token_ids=_ends_of(found.architecture, tokenizer, eos),
        engine_config=found.engine_config,
        drafters=found.drafters,
        reranker=find_reranker(found.name, folder, found.architecture, tokenizer),
        open_s=found.open_s + time.monotonic() - started,
    )


def _ends_of(architecture: Architecture, tokenizer: Tokenizer, named: set[int]) -> frozenset[int]:
    """The end tokens that the model has: its head may be larger than the tokenizer (padding), or
    smaller (tokens of pictures, or added for training and never used).
    """
    num_rows = architecture.vocab_size
    unknown = sorted(i for i in named if i >= num_rows)
    if unknown:
        logger.warning(
            "not end tokens: %s, since the model has tokens 0 to %d%s",
            ", ".join(map(str, unknown[:8])),
            num_rows - 1,
            "" if len(named) > len(unknown) else "; its answers end at their limit",
        )
    if logger.isEnabledFor(logging.INFO):  # counting takes a tenth of a second
        num_more = tokenizer.num_token_ids - num_rows
        if num_more > 0:
            logger.info(
                "%d tokens of the tokenizer are not the model's: no prompt may hold one", num_more
            )
    return frozenset(named - set(unknown))
