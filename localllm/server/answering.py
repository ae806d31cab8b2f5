"""From a request that was read to the engine and back: what all APIs of the server share."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from localllm.attach.engine_client import EngineDownError, QueueFullError
from localllm.engine.sampling_params import SamplingParams
from localllm.errors import LocalLLMError, RequestError
from localllm.hub.generation_config import GenerationDefaults
from localllm.server.choice import AnswerWriter
from localllm.server.engines import AnswerStream, Engines
from localllm.server.guard import Refusal
from localllm.server.limits import LIMITS
from localllm.server.metrics import Meter, Metrics
from localllm.server.refusals import RefusedError, busy, invalid, refusal_of
from localllm.server.schema import ToolDefinition
from localllm.server.sending import StreamedAnswer, WholeAnswer, WithHeader, merged
from localllm.text.grammar import Grammar
from localllm.text.prompt import Asked, ChatMessage, Conversation, Prompt, ThinkLevel
from localllm.text.prompt_writer import PromptWriter
from localllm.text.tokenizer import Tokenizer
from localllm.text.tool_calls import Tool, ToolFormat, find_tool_format, tool_grammar

# The header that names the replica which answers.
_REPLICA = b"x-localllm-replica"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the front end knows about the model: its name, its prompts, its defaults."""

    name: str
    created_s: int
    prompts: PromptWriter
    defaults: GenerationDefaults


class Asks(Protocol):
    """A body that asks for answers."""

    @property
    def model(self) -> str | None:
        """The model that is asked."""

    @property
    def stream(self) -> bool | None:
        """Whether the answer is sent as it comes."""

    @property
    def grammar_field(self) -> str:
        """The field that asks for the answer's format."""

    def given(self) -> dict[str, object]:
        """The fields of SamplingParams that were sent. Raises: RequestError."""


class Converses(Protocol):
    """A body with a conversation."""

    @property
    def think(self) -> ThinkLevel | None:
        """How much the model should think, if the request says so."""

    @property
    def callable_tools(self) -> list[ToolDefinition]:
        """The tools that this answer may call."""

    def for_template(self) -> list[ChatMessage]:
        """The messages as chat templates read them."""


class AsksChat(Asks, Converses, Protocol):
    """A body that asks for the answer to a conversation."""

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""

    @property
    def are_calls_parallel(self) -> bool:
        """Whether there may be several."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the engine is asked: prompts, and how to answer each; `form`: how tools are called."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    form: ToolFormat | None = None

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_choices(self) -> int:
        """Answers to all prompts."""
        return len(self.prompts) * self.params.n


class Answering:
    """One model, and the engine that answers for it."""

    def __init__(self, engine: Engines, model: ServedModel) -> None:
        self.engine, self.model = engine, model
        self.metrics = Metrics(model.name)
        self._by_key: Counter[str] = Counter()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.model.prompts.tokenizer

    def check_model(self, name: str | None) -> None:
        """Raises: RefusedError for another model than the one that is served."""
        if name not in (None, self.model.name):
            message = f"the model {name!r:.100} is not served here, only {self.model.name!r}"
            raise RefusedError(Refusal(404, message, code="model_not_found", param="model"))

    async def question(self, body: AsksChat, param: str) -> Question:
        """What to ask for the answer to a conversation; `param`: the field with its messages.

        Raises: RefusedError.
        """
        self.check_model(body.model)
        params = self.params(body)
        form = None
        if body.callable_tools:  # the grammar first: it checks the size of the tools' schemas
            form = self._tool_format().for_tools(_tools(body))
            params = replace(params, grammar=self._tool_grammar(body, form, params.grammar))
        prompt = await self.write(conversation_of(body), param)
        if form is not None:
            prompt = replace(prompt, marks=form.marks)
        return Question([prompt], params, form)

    def params(self, body: Asks) -> SamplingParams:
        """How to answer, by the body and the model's defaults. Raises: RefusedError."""
        defaults = {"max_tokens": LIMITS.answer_tokens, **self.model.defaults.sampling}
        try:
            return SamplingParams(**{**defaults, **body.given()})
        except RequestError as error:
            refusal = refusal_of(error)
            if refusal.param == "grammar":
                refusal = replace(refusal, param=body.grammar_field)
            raise RefusedError(refusal) from error

    def _tool_format(self) -> ToolFormat:
        form = find_tool_format(self.tokenizer.tool_template or "")
        if form is None:
            raise invalid(
                f"{self.model.name} cannot call tools: its chat template has no known call format",
                "tools",
            )
        return form

    def _tool_grammar(self, body: AsksChat, form: ToolFormat, answer: Grammar | None) -> Grammar:
        """The grammar of calls, or of the answer that is asked for otherwise."""
        if answer is not None and answer.kind != "json_schema":
            raise invalid("with tools, an answer can only be text or JSON", body.grammar_field)
        try:
            for tool in body.callable_tools:
                Grammar.of_schema(tool.function.parameters or {})
            return tool_grammar(
                form,
                _tools(body),
                "required" if body.must_call else "auto",
                self.tokenizer.as_lark,
                are_parallel=body.are_calls_parallel,
                answer=answer,
            )
        except RequestError as error:
            raise invalid(error.message, "tools") from error

    async def write(self, asked: Asked, param: str) -> Prompt:
        """Write a prompt in a thread, so that nothing waits for it. Raises: RefusedError."""
        try:
            return await asyncio.to_thread(self.model.prompts.write, asked)
        except LocalLLMError as error:
            raise RefusedError(refusal_of(error, param)) from error

    def answer(
        self, body: Asks, asked: Question, writer: AnswerWriter, request: Request
    ) -> Response:
        """The response to `request`. Raises: RefusedError if the engine takes no request."""
        key = request.scope.get("key", "")
        prompts, params = asked.prompts, asked.params
        if key and self._by_key[key] + len(prompts) > LIMITS.requests_of_a_key:
            raise RefusedError(busy("this key has too many requests at once"))
        streams: list[AnswerStream] = []
        salt = request.scope.get("salt", b"")
        try:
            for prompt in prompts:
                streams.append(self.engine.submit(prompt, params, salt, is_whole=not body.stream))
        except (EngineDownError, QueueFullError) as error:
            for stream in streams:
                stream.close()
            raise RefusedError(refusal_of(error)) from error
        self._by_key[key] += len(prompts)
        writer.usage.num_prompt = asked.num_prompt

        def finished() -> None:
            for stream in streams:
                stream.close()
                self.metrics.answered(stream.replica)
            self._by_key[key] -= len(prompts)
            meter.close()

        def header() -> tuple[bytes, bytes] | None:
            replica = streams[0].replica
            return (_REPLICA, replica.encode()) if replica else None

        meter = Meter(self.metrics, asked.num_prompt, asked.num_choices)
        events = merged(streams, params.n, writer, meter)
        field = "tools" if asked.form is not None else body.grammar_field
        kind: Callable[..., Response] = StreamedAnswer if body.stream else WholeAnswer
        return WithHeader(kind(events, writer, finished, field), header)


def conversation_of(body: Converses) -> Conversation:
    """The conversation that a body holds."""
    tools = [tool.model_dump(exclude_none=True) for tool in body.callable_tools]
    return Conversation(body.for_template(), tools or None, body.think)


def _tools(body: AsksChat) -> list[Tool]:
    return [
        Tool(each.function.name, each.function.parameters or {}) for each in body.callable_tools
    ]
