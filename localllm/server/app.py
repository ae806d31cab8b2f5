"""The routes: OpenAI's completions, chats and models; tokens, health and metrics."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from localllm import __version__
from localllm.attach.engine_client import EngineDownError, QueueFullError
from localllm.engine.sampling_params import SamplingParams
from localllm.errors import (
    ContextLengthError,
    LocalLLMError,
    RequestError,
)
from localllm.hub.generation_config import GenerationDefaults
from localllm.server.answers import Kind, Writer
from localllm.server.bodies import Bodies, Closing, count_values
from localllm.server.engines import AnswerStream, Engines, Health
from localllm.server.guard import Access, App, Guard, Refusal
from localllm.server.limits import LIMITS
from localllm.server.metrics import Meter, Metrics
from localllm.server.refusals import (
    RefusedError,
    as_response,
    busy,
    describe_invalid,
    invalid,
    refusal_of,
)
from localllm.server.responses import (
    StreamedAnswer,
    WholeAnswer,
    WithHeader,
    merged,
    warning_of,
)
from localllm.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
    WholeBody,
)
from localllm.text.grammar import Grammar
from localllm.text.prompt import Asked, Conversation, Prompt, Text
from localllm.text.prompt_writer import PromptWriter
from localllm.text.tool_calls import Tool, ToolFormat, find_tool_format, tool_grammar

logger = logging.getLogger(__name__)
# The header that names the replica which answers.
_REPLICA = b"x-localllm-replica"
BodyT = TypeVar("BodyT", bound=WholeBody)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the front end knows about the model: its name, its prompts, its defaults."""

    name: str
    created_s: int
    prompts: PromptWriter
    defaults: GenerationDefaults


def create_app(engine: Engines, model: ServedModel, access: Access) -> App:
    """The application; the caller starts and stops `engine`."""
    app = FastAPI(title="localllm", version=__version__, docs_url=None, redoc_url=None)
    server = _Server(engine, model)
    app.add_exception_handler(Exception, _on_defect)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RefusedError, _on_refused)
    posts: dict[str, tuple[Callable[..., Awaitable[Response]], type[WholeBody]]] = {
        "/v1/chat/completions": (server.chat, ChatRequest),
        "/v1/completions": (server.complete, CompletionRequest),
        "/tokenize": (server.tokenize, TokenizeRequest),
        "/detokenize": (server.detokenize, DetokenizeRequest),
    }
    parts: dict[str, Any] = {}
    bodies = Bodies()
    for path, (answer, schema) in posts.items():
        app.add_api_route(
            path,
            _reading(answer, schema, bodies),
            methods=["POST"],
            openapi_extra={"requestBody": _described(schema, parts)},
        )
    for path, look in (
        ("/v1/models", server.models),
        ("/v1/models/{name:path}", server.model),
        ("/", server.index),
        ("/health", server.health),
        ("/metrics", server.metrics),
    ):
        app.add_api_route(path, look, methods=["GET"], response_model=None)
    _add_parts(app, parts)
    return Closing(Guard(app, access))


def _reading(
    answer: Callable[..., Awaitable[Response]], schema: type[BodyT], bodies: Bodies
) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        body = await bodies.read(request.receive)
        if isinstance(body, Refusal):
            raise RefusedError(body)
        asked = await asyncio.to_thread(_parse, schema, body)
        response = await answer(asked, request)
        if asked.unknown:
            return WithHeader(response, lambda: warning_of(asked.unknown))
        return response

    return route


def _parse(schema: type[BodyT], body: bytes) -> BodyT:
    """Raises: RefusedError."""
    # Parsing blocks everything else: 50 ms for a text of 8 MB, seconds for as many values as fit.
    if count_values(body) > LIMITS.json_values:
        message = f"the body has over {LIMITS.json_values:,} values"
        raise RefusedError(Refusal(413, message))
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise RefusedError(describe_invalid(error)) from error


def _described(schema: type[BaseModel], parts: dict[str, Any]) -> dict[str, Any]:
    """A body for the OpenAPI document; `parts` gets the schemas that it refers to."""
    described = schema.model_json_schema(ref_template="#/components/schemas/{model}")
    parts.update(described.pop("$defs", {}))
    return {"required": True, "content": {"application/json": {"schema": described}}}


def _add_parts(app: FastAPI, parts: dict[str, Any]) -> None:
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        document.setdefault("components", {}).setdefault("schemas", {}).update(parts)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


class _Server:
    def __init__(self, engine: Engines, model: ServedModel) -> None:
        self._engine, self._model = engine, model
        self._metrics = Metrics(model.name)
        self._by_key: Counter[str] = Counter()

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """`POST /v1/chat/completions`"""
        self._check_model(body.model)
        params = self._params(body)
        form = None
        if body.callable_tools:  # the grammar first: it checks the size of the tools' schemas
            form = self._tool_format().for_tools(_tools(body))
            params = replace(params, grammar=self._tool_grammar(body, form, params.grammar))
        tools = [tool.model_dump(exclude_none=True) for tool in body.callable_tools]
        prompt = await self._write(
            Conversation(
                [message.for_template() for message in body.messages], tools or None, body.think
            ),
            "messages",
        )
        if form is not None:
            prompt = replace(prompt, marks=form.marks)
        return self._answer("chat", body, [prompt], params, request, form=form)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """`POST /v1/completions`"""
        self._check_model(body.model)
        params = self._params(body)
        prompts = [await self._write(Text(each), "prompt") for each in body.prompt]
        echoes: list[str] = []
        if body.echo:
            for each in body.prompt:
                text = each if isinstance(each, str) else self._tokenizer.decode(each)
                echoes += [text] * params.n
        return self._answer("text", body, prompts, params, request, echoes)

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        """`POST /tokenize`"""
        self._check_model(body.model)
        if body.messages is not None:
            prompt = await self._write(
                Conversation([each.for_template() for each in body.messages]), "messages"
            )
            ids: Sequence[int] = prompt.token_ids
        else:
            try:
                self._model.prompts.check_length(body.prompt or "")
            except ContextLengthError as error:
                raise RefusedError(refusal_of(error)) from error
            ids = await asyncio.to_thread(
                self._tokenizer.encode,
                body.prompt or "",
                add_special_tokens=body.add_special_tokens,
            )
        context = self._model.prompts.context_length
        return JSONResponse({"count": len(ids), "max_model_len": context, "tokens": list(ids)})

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Response:
        """`POST /detokenize`"""
        self._check_model(body.model)
        known = self._tokenizer.num_token_ids
        for token_id in body.tokens:
            if token_id >= known:
                raise invalid(f"token id {token_id} is not within 0 to {known - 1}", "tokens")
        text = await asyncio.to_thread(self._tokenizer.decode, body.tokens)
        return JSONResponse({"prompt": text})

    async def models(self) -> dict[str, Any]:
        """`GET /v1/models`"""
        return {"object": "list", "data": [self._described()]}

    async def model(self, name: str) -> dict[str, Any]:
        """`GET /v1/models/NAME`"""
        self._check_model(name)
        return self._described()

    async def index(self, request: Request) -> Response:
        """`GET /`, for people who open the address in a browser."""
        base = str(request.base_url)
        lines = [
            f"localllm {__version__} serves {self._model.name} through OpenAI's API.",
            "",
            f"base URL     {base}v1",
            f"models       {base}v1/models",
            f"health       {base}health",
            f"metrics      {base}metrics",
            f"schema       {base}openapi.json",
        ]
        return Response("\n".join(lines) + "\n", media_type="text/plain; charset=utf-8")

    async def health(self) -> JSONResponse:
        """`GET /health`"""
        told = _health(self._engine)
        if self._engine.replicas:
            told["replicas"] = {name: _health(each) for name, each in self._engine.replicas.items()}
        return JSONResponse(told, 200 if self._engine.state in ("ready", "compiling") else 503)

    async def metrics(self) -> Response:
        """`GET /metrics`"""
        text = self._metrics.text(self._engine)
        return Response(text, media_type="text/plain; version=0.0.4")

    @property
    def _tokenizer(self) -> Any:
        return self._model.prompts.tokenizer

    def _described(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created_s,
            "owned_by": "localllm",
            "max_model_len": self._model.prompts.context_length,
        }

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model.name):
            message = f"the model {name!r:.100} is not served here, only {self._model.name!r}"
            raise RefusedError(Refusal(404, message, code="model_not_found", param="model"))

    def _params(self, body: Sampling) -> SamplingParams:
        defaults = {"max_tokens": LIMITS.answer_tokens, **self._model.defaults.sampling}
        try:
            return SamplingParams(**{**defaults, **body.given()})
        except RequestError as error:
            refusal = refusal_of(error)
            if refusal.param == "grammar":
                refusal = replace(refusal, param=body.grammar_field)
            raise RefusedError(refusal) from error

    def _tool_format(self) -> ToolFormat:
        form = find_tool_format(self._tokenizer.tool_template or "")
        if form is None:
            raise invalid(
                f"{self._model.name} cannot call tools: its chat template has no known call format",
                "tools",
            )
        return form

    def _tool_grammar(self, body: ChatRequest, form: ToolFormat, answer: Grammar | None) -> Grammar:
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
                self._tokenizer.as_lark,
                are_parallel=body.parallel_tool_calls is not False,
                answer=answer,
            )
        except RequestError as error:
            raise invalid(error.message, "tools") from error

    async def _write(self, asked: Asked, param: str) -> Prompt:
        """Write a prompt in a thread, so that the event loop is not blocked."""
        try:
            return await asyncio.to_thread(self._model.prompts.write, asked)
        except LocalLLMError as error:
            raise RefusedError(refusal_of(error, param)) from error

    def _answer(
        self,
        kind: Kind,
        body: Sampling,
        prompts: list[Prompt],
        params: SamplingParams,
        request: Request,
        echoes: Sequence[str] = (),
        form: ToolFormat | None = None,
    ) -> Response:
        key = request.scope.get("key", "")
        if key and self._by_key[key] + len(prompts) > LIMITS.requests_of_a_key:
            raise RefusedError(busy("this key has too many requests at once"))
        streams: list[AnswerStream] = []
        salt = request.scope.get("salt", b"")
        try:
            for prompt in prompts:
                streams.append(self._engine.submit(prompt, params, salt, is_whole=not body.stream))
        except (EngineDownError, QueueFullError) as error:
            for stream in streams:
                stream.close()
            raise RefusedError(refusal_of(error)) from error
        self._by_key[key] += len(prompts)
        writer = Writer(
            kind,
            self._model.name,
            self._tokenizer,
            len(prompts) * params.n,
            has_logprobs=params.logprobs is not None,
            tools=form,
        )
        writer.usage.num_prompt = sum(len(prompt.token_ids) for prompt in prompts)

        def finished() -> None:
            for stream in streams:
                stream.close()
                self._metrics.answered(stream.replica)
            self._by_key[key] -= len(prompts)
            meter.close()

        meter = Meter(self._metrics, writer.usage.num_prompt, len(prompts) * params.n)
        events = merged(streams, params.n, writer, meter)
        field = "tools" if form is not None else body.grammar_field

        def header() -> tuple[bytes, bytes] | None:
            replica = streams[0].replica
            return (_REPLICA, replica.encode()) if replica else None

        if not body.stream:
            return WithHeader(WholeAnswer(events, writer, echoes, finished, field), header)
        streamed = StreamedAnswer(events, writer, echoes, finished, field)
        asked = body.stream_options
        streamed.wants_usage = asked is not None and asked.include_usage
        return WithHeader(streamed, header)


async def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return as_response(error.refusal)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return as_response(
        Refusal(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    )


async def _on_defect(request: Request, error: Exception) -> Response:
    logger.error("internal error in %s", request.url.path, exc_info=error)
    return as_response(Refusal(500, "internal server error", "server_error"))


def _health(engine: Health) -> dict[str, Any]:
    return {
        "status": "ok" if engine.state == "ready" else engine.state,
        "restarts": engine.num_restarts,
        "load": asdict(engine.stats),
    }


def _tools(body: ChatRequest) -> list[Tool]:
    return [
        Tool(each.function.name, each.function.parameters or {}) for each in body.callable_tools
    ]
