"""A model with its engine and tokenizer: many prompts at once, with a stream of events for each."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.answer.answerer import Answerer
from localllm.answer.answers_bar import Watch
from localllm.answer.completion import Completion, Sample
from localllm.answer.event_stream import EventStream
from localllm.answer.text_engine import TextSource, said_in
from localllm.errors import RequestError, TemplateError
from localllm.hub.generation_config import GenerationDefaults
from localllm.schedule.request import FinishReason
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.context import Context
from localllm.text.prompt import Asked
from localllm.text.prompt_writer import PromptWriter
from localllm.text.thinking import Split
from localllm.text.tokenizer import Tokenizer

ON_DISK = "disk (--cache-disk)"


@dataclass(frozen=True, slots=True)
class LoadedModel(Answerer):
    """A model with its engine, in this process or in another one."""

    name: str = field()  # otherwise the property of Answerer would be its default
    text_engine: TextSource
    defaults: GenerationDefaults
    load_s: float = field()
    cached_elsewhere: str = ""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.text_engine.tokenizer

    @property
    def context(self) -> Context:
        return self.text_engine.context

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer.has_chat_template

    @property
    def can_think(self) -> bool:
        return self.tokenizer.can_think

    @property
    def prompts(self) -> PromptWriter:
        """A writer of prompts for this model."""
        return PromptWriter(self.tokenizer, self.context)

    def sampling_params(self, **given: Any) -> SamplingParams:
        """The defaults are those of `generation_config.json`."""
        return SamplingParams(**{**self.defaults.sampling, **given})

    def ask(
        self, asked: Asked, params: SamplingParams, said: Sequence[int] = ()
    ) -> tuple[Completion, EventStream]:
        prompt = self.prompts.write(asked)
        if said:
            prompt = prompt.begun(said)
        completion = Completion(
            len(prompt.token_ids),
            time.monotonic(),
            [Sample() for _ in range(params.n)],
            prompt=prompt,
            said=said_in(prompt, self.tokenizer) if prompt.num_said else Split(),
        )
        events = EventStream(self.text_engine, self.text_engine.submit(prompt, params))
        events.on_event.append(completion.add)
        return completion, events

    def complete(
        self,
        asked: Sequence[Asked],
        params: SamplingParams,
        watch: Watch = lambda done, total, num_tokens: None,
    ) -> list[Completion]:
        """Run many requests together, in one batch as far as possible.

        `watch` is told how far they are. A refused request gives a completion with `error` set; the
        others continue.
        """
        completions: list[Completion] = []
        streams: list[EventStream] = []
        try:
            for each in asked:
                try:
                    completion, events = self.ask(each, params)
                    streams.append(events)
                except (RequestError, TemplateError) as error:
                    refused = Sample(finish_reason=FinishReason.ERROR, error=error)
                    samples = [replace(refused) for _ in range(params.n)]
                    completion = Completion(0, time.monotonic(), samples)
                completions.append(completion)
            for done, events in enumerate(streams):
                for num_tokens, _ in enumerate(events, 1):
                    watch(done, len(streams), num_tokens)
        finally:
            for events in streams:
                events.close()
        return completions

    def count(self, asked: Asked, limit: int | None = None) -> int:
        return self.prompts.count(asked, limit)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids)

    def work_ahead(self) -> bool:
        return self.text_engine.work_ahead()

    def close(self) -> None:
        self.text_engine.finish()
