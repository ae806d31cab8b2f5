"""A model that is ready to answer: conversations, many prompts at once, a stream of each."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localllm.answer.completion import Completion, Sample
from localllm.answer.text_engine import Answering, EventStream
from localllm.engine.request import FinishReason
from localllm.engine.sampling_params import SamplingParams
from localllm.errors import RequestError, TemplateError
from localllm.hub.generation_config import GenerationDefaults
from localllm.text.prompt import Prompt
from localllm.text.prompt_writer import PromptWriter
from localllm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to answer."""

    name: str
    text_engine: Answering
    defaults: GenerationDefaults
    load_s: float

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own."""
        return self.text_engine.tokenizer

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer have together."""
        return self.text_engine.context_length

    def sampling_params(self, **given: Any) -> SamplingParams:
        """The model's defaults (`generation_config.json`) with what is given over them.

        Raises: RequestError for a value out of range.
        """
        return SamplingParams(**{**self.defaults.sampling, **given})

    @property
    def prompts(self) -> PromptWriter:
        """Writes prompts for it."""
        engine = self.text_engine
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
        self.text_engine.finish()
