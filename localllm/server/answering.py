"""From a request that was read to the engine and back: what all APIs of the server share."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from localllm.answer.completion import TextEvent
from localllm.attach.engine_client import EngineDownError, QueueFullError
from localllm.errors import RequestError
from localllm.hub.checkpoint import Checkpoint
from localllm.hub.generation_config import GenerationDefaults
from localllm.hub.reranker_files import Reranker
from localllm.schedule.sampling_params import SamplingParams
from localllm.server.chat_asked import ChatAsked, ToolUse
from localllm.server.choice import AnswerWriter
from localllm.server.earlier_prompts import Compared, Digest, EarlierPrompts, compare
from localllm.server.engines import AnswerStream, Engines
from localllm.server.limits import LIMITS
from localllm.server.metrics import Meter, Metrics
from localllm.server.places import Places
from localllm.server.refusals import (
    Refusal,
    RefusedError,
    busy_key,
    invalid,
    refusal_of,
    refusing,
)
from localllm.server.sending import (
    StreamedAnswer,
    WholeAnswer,
    WithHeader,
    merged,
    with_changes,
)
from localllm.server.served_name import ServedName
from localllm.server.volatile_lines import Rule, move_volatile_lines
from localllm.text.grammar import Grammar
from localllm.text.message_places import end_of_message
from localllm.text.prompt import Asked, Conversation, Prompt
from localllm.text.prompt_writer import PromptWriter
from localllm.text.tokenizer import Tokenizer
from localllm.text.tool_calls import ToolFormat, find_tool_format, tool_grammar

# The header that names the replica which answers.
_REPLICA = b"x-localllm-replica"
# That says how many lines of the prompt were moved behind the conversation.
_MOVED = b"x-localllm-moved-lines"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the front end knows about the model: its name, its prompts, its defaults. `pools`: texts
    can be embedded; `reranker`: how it scores pairs of texts, if it does; `has_any_name`: it
    answers whatever model is asked for.
    """

    name: str
    created_s: int
    prompts: PromptWriter
    defaults: GenerationDefaults
    pools: bool = False
    reranker: Reranker | None = None
    has_any_name: bool = False

    @classmethod
    def of(cls, found: Checkpoint, name: ServedName, prompts: PromptWriter) -> "ServedModel":
        """A checkpoint that is served as `name` from now on."""
        pools = found.engine_config.pools
        reranker = found.reranker if pools else None
        now_s = int(time.time())
        return cls(name.text, now_s, prompts, found.defaults, pools, reranker, name.is_any)


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


class AsksChat(Asks, Protocol):
    """A body that asks for the answer to a conversation."""

    def asked(self) -> ChatAsked:
        """The conversation that it holds."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the engine is asked: prompts, and how to answer each; `form`: how tools are called.

    Of a conversation also its digest, its prompt beside an earlier one, if there is one, and how
    many lines of it were moved.
    """

    prompts: Sequence[Prompt]
    params: SamplingParams
    form: ToolFormat | None = None
    digest: Digest | None = None
    compared: Compared | None = None
    num_moved: int = 0

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_choices(self) -> int:
        """Answers to all prompts."""
        return len(self.prompts) * self.params.n


@dataclass(frozen=True, slots=True)
class PromptHabits:
    """What is done to conversations: lines that match a rule of `volatile` are moved to their end;
    with `pins`, the cache keeps their system prompts for longer than other tokens.
    """

    volatile: Sequence[Rule] = ()
    pins: bool = False


NO_HABITS = PromptHabits()


class Answering:
    """One model, and the engine that answers for it."""

    def __init__(
        self, engine: Engines, model: ServedModel, habits: PromptHabits, places: Places
    ) -> None:
        self.engine, self.model, self._habits, self.places = engine, model, habits, places
        self.metrics = Metrics(model.name)
        self._earlier = EarlierPrompts()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.model.prompts.tokenizer

    def check_model(self, name: str | None) -> None:
        """Raises: RefusedError for another model than the one that is served."""
        if name not in (None, self.model.name) and not self.model.has_any_name:
            message = (
                f"the model {name!r:.100} is not served here, only {self.model.name!r}; localllm "
                "serve --any-model-name answers to every name"
            )
            raise RefusedError(Refusal(404, message, code="model_not_found", param="model"))

    async def question(self, body: AsksChat, param: str, request: Request) -> Question:
        """What to ask for the answer to a conversation; `param`: the field with its messages.

        Raises: RefusedError.
        """
        self.check_model(body.model)
        params = self.params(body)
        said = await asyncio.to_thread(body.asked)
        tools, form = said.tools, None
        if callable_tools := tools.callable:
            # The grammar first: it checks the size of the tools' schemas.
            reads_lone = params.grammar is None  # otherwise JSON is the form that is asked for
            form = self._tool_format().for_tools(callable_tools, reads_lone=reads_lone)
            form = replace(form, is_forced=tools.must_call)
            grammar = self._tool_grammar(tools, form, params.grammar, body.grammar_field)
            params = replace(params, grammar=grammar)

        def prepare() -> tuple[Conversation, int, Digest]:
            asked = said.conversation
            moved = move_volatile_lines(asked.messages, self._habits.volatile)
            asked = replace(asked, messages=moved.messages)
            return asked, moved.num_lines, Digest.of(asked.messages, asked.tools)

        asked, num_moved, digest = await asyncio.to_thread(prepare)
        prompt = await self.write(asked, param)
        if form is not None:
            prompt = replace(prompt, marks=form.marks)
        owner = request.scope.get("salt", b"")
        named = said.compares_with
        earlier = (
            self._earlier.nearest(owner, digest)
            if named is None
            else self._earlier.find(owner, named)
        )

        def look() -> tuple[int, Compared | None]:
            kept = self._tokens_to_keep(asked, prompt, said.num_to_keep)
            if earlier is None:
                return kept, None
            ids = prompt.token_ids
            return kept, compare(earlier, digest, self.tokenizer.decode, ids, asked.messages)

        num_to_keep, compared = await asyncio.to_thread(look)
        prompt = replace(prompt, num_to_keep=num_to_keep)
        if said.begun:
            prompt = prompt.begun(await self.begun(said.begun))
        return Question([prompt], params, form, digest, compared, num_moved)

    def _tokens_to_keep(self, asked: Conversation, prompt: Prompt, num_messages: int) -> int:
        """The tokens of the first `num_messages` messages, and of system prompts if all of them are
        pinned.
        """
        messages = asked.messages
        if self._habits.pins:
            others = (i for i, each in enumerate(messages) if each["role"] != "system")
            num_messages = max(num_messages, next(others, len(messages)))
        if num_messages in (0, len(messages)):
            return len(prompt.token_ids) if num_messages else 0
        decode, borders = self.tokenizer.decode, prompt.borders
        return end_of_message(decode, prompt.token_ids, borders, messages, num_messages - 1)

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

    def _tool_grammar(
        self, tools: ToolUse, form: ToolFormat, answer: Grammar | None, field: str
    ) -> Grammar:
        """The grammar of calls, or of the answer that `field` asks for otherwise."""
        if answer is not None and answer.kind != "json_schema":
            raise invalid("with tools, an answer can only be text or JSON", field)
        try:
            for tool in tools.callable:
                Grammar.of_schema(tool.parameters)
            return tool_grammar(
                form,
                tools.callable,
                "required" if tools.must_call else "auto",
                self.tokenizer.as_lark,
                are_parallel=tools.makes_several,
                answer=answer,
            )
        except RequestError as error:
            raise invalid(error.message, "tools") from error

    async def write(self, asked: Asked, param: str) -> Prompt:
        """Write a prompt in a thread, so that nothing waits for it. Raises: RefusedError."""
        with refusing(param=param):
            return await asyncio.to_thread(self.model.prompts.write, asked)

    async def begun(self, text: str) -> Sequence[int]:
        """The tokens of the answer that the client began. Raises: RefusedError."""
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        with refusing(RequestError, "messages"):
            self.model.prompts.check_length(text)
            return await asyncio.to_thread(encode, text)

    def answer(
        self, body: Asks, asked: Question, writer: AnswerWriter, request: Request
    ) -> Response:
        """The response to `request`. Raises: RefusedError if the engine takes no request."""
        key = request.scope.get("key", "")
        prompts, params = asked.prompts, asked.params
        num_more = len(prompts) - 1  # the request has one place already
        if not self.places.take(key, num_more):
            raise RefusedError(busy_key())
        streams: list[AnswerStream] = []
        salt = request.scope.get("salt", b"")
        try:
            for prompt in prompts:
                streams.append(self.engine.submit(prompt, params, salt, is_whole=not body.stream))
        except (EngineDownError, QueueFullError) as error:
            for stream in streams:
                stream.close()
            self.places.give_back(key, num_more)
            raise RefusedError(refusal_of(error)) from error
        request.scope["model"], request.scope["usage"] = self.model.name, writer.usage
        writer.usage.num_prompt = asked.num_prompt
        writer.usage.compared, writer.usage.num_moved = asked.compared, asked.num_moved
        said: list[int] = []

        def finished() -> None:
            if asked.digest is not None:
                # The newest token of an answer has no keys and values yet.
                ids = [*prompts[0].token_ids, *said[:-1]]
                self._earlier.remember(salt, writer.name, asked.digest, ids)
            for stream in streams:
                stream.close()
                self.metrics.answered(stream.replica)
            self.places.give_back(key, num_more)
            meter.close()

        def header() -> tuple[bytes, bytes] | None:
            replica = streams[0].replica
            return (_REPLICA, replica.encode()) if replica else None

        meter = Meter(self.metrics, asked.num_prompt, asked.num_choices)
        events = _noting(merged(streams, params.n, writer, meter), said)
        field = "tools" if asked.form is not None else body.grammar_field
        kind: Callable[..., Response] = StreamedAnswer if body.stream else WholeAnswer
        response: Response = WithHeader(kind(events, writer, finished, field), header)
        response = with_changes(response, prompts)
        if asked.num_moved:
            told = (_MOVED, str(asked.num_moved).encode())
            response = WithHeader(response, lambda: told)
        return response


async def _noting(
    events: AsyncIterator[tuple[int, TextEvent]], said: list[int]
) -> AsyncIterator[tuple[int, TextEvent]]:
    """The same events; `said` gets the tokens of the first answer."""
    async for index, event in events:
        if index == 0 and event.token is not None:
            said.append(event.token.token_id)
        yield index, event
