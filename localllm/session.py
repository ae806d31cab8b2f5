"""The seam between faces and engine: a model opened by name, conversations, many prompts at once.

`chat`, the server and the Python API all come through here. The engine below knows only token ids,
the faces above only text.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localllm.catalog import BUILT_IN_MODEL, BUILT_IN_MODELS, resolve_model
from localllm.completion import Completion, Sample
from localllm.config import EngineConfig, ModelConfig, SamplingParams
from localllm.download import DownloadProgress, fetch_model
from localllm.engine.loading import LoadedDecoder, Report, load_draft, load_engine
from localllm.engine.request import FinishReason
from localllm.errors import CheckpointError, RequestError, TemplateError
from localllm.file_times import note_use
from localllm.generation_config import GenerationDefaults, read_generation_config
from localllm.model.architectures import ArchSpec, read_model_config
from localllm.prompt import Prompt
from localllm.prompt_writer import PromptWriter
from localllm.text_engine import EventStream, TextEngine
from localllm.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to answer."""

    name: str
    text_engine: TextEngine
    defaults: GenerationDefaults
    load_s: float

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own."""
        return self.text_engine.tokenizer

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer have together."""
        return self.text_engine.engine.context_length

    def sampling_params(self, **given: Any) -> SamplingParams:
        """The model's defaults (`generation_config.json`) with what is given over them.

        Raises: RequestError for a value out of range.
        """
        return SamplingParams(**{**self.defaults.sampling, **given})

    @property
    def prompts(self) -> PromptWriter:
        """Writes prompts for it."""
        engine = self.text_engine.engine
        return PromptWriter(self.tokenizer, self.context_length, engine.way_to_longer_context)

    def stream(self, prompt: Prompt, params: SamplingParams) -> tuple[Completion, EventStream]:
        """Start one request: its growing completion, and the events that make it grow.

        Closing the iterator aborts the request. Raises: RequestError.
        """
        samples = [Sample() for _ in range(params.n)]
        completion = Completion(len(prompt.token_ids), time.monotonic(), samples)
        request_id = self.text_engine.submit(prompt, params)
        events = self.text_engine.events(request_id)
        events.on_event.append(completion.add)
        return completion, events

    def complete(
        self, prompts: Sequence[Callable[[], Prompt]], params: SamplingParams
    ) -> list[Completion]:
        """Run many prompts together, in one batch as far as it goes.

        Each prompt is a call that encodes it. One that is refused, by that call or by the engine,
        gives a completion with `error` set; the others go on.
        """
        completions: list[Completion] = []
        streams: list[EventStream] = []
        try:
            for encode in prompts:
                try:
                    completion, events = self.stream(encode(), params)
                    streams.append(events)
                except (RequestError, TemplateError) as error:
                    refused = Sample(finish_reason=FinishReason.ERROR, error=error)
                    samples = [replace(refused) for _ in range(params.n)]
                    completion = Completion(0, time.monotonic(), samples)
                completions.append(completion)
            for events in streams:
                deque(events, maxlen=0)
        finally:
            for events in streams:
                events.close()
        return completions

    def close(self) -> None:
        """End what is under way, and save what is kept of prompts."""
        self.text_engine.engine.finish()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder whose small files are read and checked; the weights are not touched yet.

    `engine_config` is what was asked for, with what the model itself decides filled in; `open_s` is
    what all that took.
    """

    name: str
    folder: Path
    model_config: ModelConfig
    spec: ArchSpec
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    eos_token_ids: frozenset[int]
    engine_config: EngineConfig
    open_s: float


def open_checkpoint(
    name: str | None = None,
    config: EngineConfig | None = None,
    progress: DownloadProgress | None = None,
) -> Checkpoint:
    """Find, fetch if need be, and check a model; None is the built-in one. `progress` is told of a
    download.

    Raises: CatalogError, DownloadError, CheckpointError, UnsupportedModelError.
    """
    started = time.monotonic()
    config = config or EngineConfig()
    source = resolve_model(name or BUILT_IN_MODEL)
    if source.name in BUILT_IN_MODELS and config.dtype == "auto":
        # So that the exactness contract holds as it comes; see docs/architecture.md.
        config = replace(config, dtype="float32")
    folder = fetch_model(source, progress=progress)
    note_use(folder)
    model_config, spec = read_model_config(folder)
    defaults = read_generation_config(folder)
    tokenizer = Tokenizer.from_folder(folder, source.chat_template)
    # Every place that names an end token counts; they need not agree.
    eos = {*defaults.eos_token_ids, *model_config.eos_token_ids}
    if tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    _check_vocabulary(folder, tokenizer, model_config.vocab_size, eos)
    return Checkpoint(
        name=source.name,
        folder=folder,
        model_config=model_config,
        spec=spec,
        tokenizer=tokenizer,
        defaults=defaults,
        eos_token_ids=frozenset(eos),
        engine_config=config,
        open_s=time.monotonic() - started,
    )


def open_model(
    name: str | None = None,
    config: EngineConfig | None = None,
    report: Report = logger.info,
    progress: DownloadProgress | None = None,
) -> LoadedModel:
    """Open a checkpoint and load it into an engine; `report` is told how memory is divided, but
    not of what is built in, which takes next to none.

    Raises: as `open_checkpoint` and `load_checkpoint`.
    """
    return load_checkpoint(open_checkpoint(name, config, progress), report)


def load_checkpoint(found: Checkpoint, report: Report = logger.info) -> LoadedModel:
    """Load what was opened into an engine; `report`: see `open_model`.

    Raises: CheckpointError, GpuMemoryError, BackendError; for a model that drafts, as
    `open_checkpoint`.
    """
    started = time.monotonic()
    engine = load_engine(
        found.folder,
        found.model_config,
        found.spec,
        found.engine_config,
        found.eos_token_ids,
        logger.info if found.name in BUILT_IN_MODELS else report,
        open_draft(found),
    )
    return LoadedModel(
        name=found.name,
        text_engine=TextEngine(engine, found.tokenizer),
        defaults=found.defaults,
        load_s=found.open_s + time.monotonic() - started,
    )


def open_draft(found: Checkpoint) -> LoadedDecoder | None:
    """Load the model that drafts for another, where its configuration names one.

    Raises: as `load_checkpoint`; RequestError where their vocabularies differ.
    """
    name = found.engine_config.speculation.draft_model
    if name is None:
        return None
    draft = open_checkpoint(name, found.engine_config)
    if (
        draft.model_config.vocab_size != found.model_config.vocab_size
        or draft.tokenizer.vocabulary() != found.tokenizer.vocabulary()
    ):
        raise RequestError(
            f"{draft.name} cannot draft for {found.name}: they have other vocabularies",
            param="spec",
            hint="a smaller model of the same family, or --spec ngram, which needs none",
        )
    return load_draft(draft.folder, draft.model_config, draft.spec, draft.engine_config)


def _check_vocabulary(folder: Path, tokenizer: Tokenizer, vocab_size: int, eos: set[int]) -> None:
    """The head may be larger than the tokenizer (padding), never smaller."""
    if tokenizer.num_token_ids > vocab_size:
        raise CheckpointError(
            f"the tokenizer has token ids up to {tokenizer.num_token_ids - 1}, "
            f"the model's head only {vocab_size} rows",
            where=str(folder),
            hint="tokenizer.json and config.json are of different models or revisions",
        )
    for token_id in sorted(eos):
        if token_id >= vocab_size:
            raise CheckpointError(
                f"end token {token_id} is none of the model's 0 to {vocab_size - 1}",
                where=str(folder / "generation_config.json"),
                hint="the config files are of different models or revisions",
            )
