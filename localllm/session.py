"""The seam between faces and engine: a model opened by name, conversations, many prompts at once.

`chat`, the server and the Python API all come through here. The engine below knows only token ids,
the faces above only text.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any

from localllm.catalog import BUILT_IN_MODEL, resolve_model
from localllm.completion import Completion, Sample
from localllm.config import EngineConfig, SamplingParams
from localllm.download import fetch_model
from localllm.engine.loading import load_engine, read_model_config
from localllm.engine.request import FinishReason
from localllm.errors import CheckpointError, RequestError, TemplateError
from localllm.generation_config import GenerationDefaults, read_generation_config
from localllm.text_engine import EventStream, TextEngine
from localllm.tokenizer import Message, Tokenizer


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

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt that is completed as it stands."""
        if isinstance(prompt, str):
            return self.text_engine.encode(prompt, add_special_tokens=True)
        try:
            return [index(token_id) for token_id in prompt]
        except TypeError as error:
            raise RequestError(
                f"a prompt is a text or whole numbers ({error})", param="prompt"
            ) from error

    def chat_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation; a model without a template reads the messages' text."""
        if not self.tokenizer.has_chat_template:
            text = "\n\n".join(str(message.get("content") or "") for message in messages)
            return self.prompt_ids(text)
        text = self.tokenizer.render_chat(messages, tools, **variables)
        return self.text_engine.encode(text, add_special_tokens=False)

    def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> tuple[Completion, EventStream]:
        """Start one request: its growing completion, and the events that make it grow.

        Closing the iterator aborts the request. Raises: RequestError.
        """
        samples = [Sample() for _ in range(params.n)]
        completion = Completion(len(prompt_token_ids), time.monotonic(), samples)
        request_id = self.text_engine.submit(prompt_token_ids, params)
        events = self.text_engine.events(request_id)
        events.on_event.append(completion.add)
        return completion, events

    def complete(
        self, prompts: Sequence[Callable[[], list[int]]], params: SamplingParams
    ) -> list[Completion]:
        """Run many prompts together, in one batch as far as it goes.

        Each prompt is a call that gives its token ids. One that is refused, by that call or by
        the engine, gives a completion with `error` set; the others go on.
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


class ChatSession:
    """A conversation: the messages so far, and replies that are added to them."""

    def __init__(self, model: LoadedModel, system: str | None = None) -> None:
        self.model = model
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def reply(self, text: str, params: SamplingParams) -> tuple[Completion, EventStream]:
        """Ask `text`. The answer joins the history as far as it was read, also when interrupted.

        A model without a chat template completes `text` alone. Raises: RequestError.
        """
        asked = {"role": "user", "content": text}
        history = [*self.messages, asked] if self.model.tokenizer.has_chat_template else [asked]
        completion, events = self.model.stream(self.model.chat_ids(history), params)

        def remember() -> None:
            if completion.error is None:
                self.messages += [asked, {"role": "assistant", "content": completion.text}]

        events.on_close.append(remember)
        return completion, events


def open_model(name: str | None = None, config: EngineConfig | None = None) -> LoadedModel:
    """Find, fetch if need be, check and load a model; None is the built-in one.

    Raises: CatalogError, DownloadError, CheckpointError, GpuMemoryError, BackendError.
    """
    started = time.monotonic()
    config = config or EngineConfig()
    source = resolve_model(name or BUILT_IN_MODEL)
    if source.name == BUILT_IN_MODEL and config.dtype == "auto":
        # So that the exactness contract holds as it comes; see docs/architecture.md.
        config = replace(config, dtype="float32")
    folder = fetch_model(source)
    model_config, spec = read_model_config(folder)
    defaults = read_generation_config(folder)
    tokenizer = Tokenizer.from_folder(folder)
    # Every place that names an end token counts; they need not agree.
    eos = {*defaults.eos_token_ids, *model_config.eos_token_ids}
    if tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    _check_vocabulary(folder, tokenizer, model_config.vocab_size, eos)
    engine = load_engine(folder, model_config, spec, config, frozenset(eos))
    return LoadedModel(
        name=source.name,
        text_engine=TextEngine(engine, tokenizer),
        defaults=defaults,
        load_s=time.monotonic() - started,
    )


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
