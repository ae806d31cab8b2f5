"""The routes: OpenAI's completions and chats, tokens, health."""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localllm import __version__
from localllm.completion import TextEvent
from localllm.config import SamplingParams
from localllm.engine.request import FinishReason
from localllm.errors import (
    ContextLengthError,
    LocalLLMError,
    RequestError,
    StepMemoryError,
    TemplateError,
)
from localllm.generation_config import GenerationDefaults
from localllm.prompt import Prompt
from localllm.prompt_writer import PromptWriter
from localllm.server.answers import Kind, Writer
from localllm.server.engine_client import (
    EngineClient,
    EngineDownError,
    QueueFullError,
    RequestStream,
)
from localllm.server.guard import Access, Guard, Refusal, read_body
from localllm.server.limits import LIMITS
from localllm.server.metrics import Meter, Metrics
from localllm.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)

logger = logging.getLogger(__name__)
# For a client to take what is sent to it.
_READ_S = 60.0
BodyT = TypeVar("BodyT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the front knows of the model: its name, its prompts, its defaults."""

    name: str
    created_s: int
    prompts: PromptWriter
    defaults: GenerationDefaults


class RefusedError(Exception):
    """A request that gets a refusal for an answer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def create_app(engine: EngineClient, model: ServedModel, access: Access) -> Guard:
    """The application; `engine` is started and stopped by whoever runs it."""
    app = FastAPI(title="localllm", version=__version__, docs_url=None, redoc_url=None)
    server = _Server(engine, model)
    app.add_exception_handler(Exception, _on_defect)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RefusedError, _on_refused)
    posts: dict[str, tuple[Callable[..., Awaitable[Response]], type[BaseModel]]] = {
        "/v1/chat/completions": (server.chat, ChatRequest),
        "/v1/completions": (server.complete, CompletionRequest),
        "/tokenize": (server.tokenize, TokenizeRequest),
        "/detokenize": (server.detokenize, DetokenizeRequest),
    }
    for path, (answer, schema) in posts.items():
        app.add_api_route(
            path,
            _reading(answer, schema),
            methods=["POST"],
            openapi_extra={"requestBody": _described(schema)},
        )
    for path, look in (
        ("/v1/models", server.models),
        ("/v1/models/{name:path}", server.model),
        ("/health", server.health),
        ("/metrics", server.metrics),
    ):
        app.add_api_route(path, look, methods=["GET"], response_model=None)
    return Guard(app, access)


def _reading(
    answer: Callable[..., Awaitable[Response]], schema: type[BodyT]
) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        body = await read_body(request.receive)
        if isinstance(body, Refusal):
            raise RefusedError(body)
        return await answer(await asyncio.to_thread(_parse, schema, body), request)

    return route


def _parse(schema: type[BodyT], body: bytes) -> BodyT:
    """Raises: RefusedError."""
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise RefusedError(_describe_invalid(error)) from error


def _described(schema: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema.model_json_schema()}}
    return {"required": True, "content": content}


class _Server:
    def __init__(self, engine: EngineClient, model: ServedModel) -> None:
        self._engine, self._model = engine, model
        self._metrics = Metrics(model.name)
        self._by_key: Counter[str] = Counter()

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """`POST /v1/chat/completions`"""
        self._check_model(body.model)
        params = self._params(body)
        messages = [message.for_template() for message in body.messages]
        prompt = await self._write(
            lambda: self._model.prompts.chat(messages, think=body.think), "messages"
        )
        return self._answer("chat", body, [prompt], params, request)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """`POST /v1/completions`"""
        self._check_model(body.model)
        params = self._params(body)
        prompts = [
            await self._write(lambda each=each: self._model.prompts.text(each), "prompt")  # type: ignore[misc]
            for each in body.prompt
        ]
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
            messages = [message.for_template() for message in body.messages]
            prompt = await self._write(lambda: self._model.prompts.chat(messages), "messages")
            ids: Sequence[int] = prompt.token_ids
        else:
            try:
                self._model.prompts.check_length(body.prompt or "")
            except ContextLengthError as error:
                raise RefusedError(_refusal_of(error)) from error
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
                raise _invalid(f"token id {token_id} is not one of 0 to {known - 1}", "tokens")
        text = await asyncio.to_thread(self._tokenizer.decode, body.tokens)
        return JSONResponse({"prompt": text})

    async def models(self) -> dict[str, Any]:
        """`GET /v1/models`"""
        return {"object": "list", "data": [self._described()]}

    async def model(self, name: str) -> dict[str, Any]:
        """`GET /v1/models/NAME`"""
        self._check_model(name)
        return self._described()

    async def health(self) -> JSONResponse:
        """`GET /health`"""
        state = self._engine.state
        told = {
            "status": "ok" if state == "ready" else state,
            "restarts": self._engine.num_restarts,
            "load": asdict(self._engine.stats),
        }
        return JSONResponse(told, 200 if state == "ready" else 503)

    async def metrics(self) -> Response:
        """`GET /metrics`"""
        text = self._metrics.text(self._engine.stats, self._engine.num_restarts)
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
            message = f"the model {name!r:.100} is not served; {self._model.name!r} is"
            raise RefusedError(Refusal(404, message, code="model_not_found", param="model"))

    def _params(self, body: Sampling) -> SamplingParams:
        defaults = {"max_tokens": LIMITS.answer_tokens, **self._model.defaults.sampling}
        try:
            return SamplingParams(**{**defaults, **body.given()})
        except RequestError as error:
            raise RefusedError(_refusal_of(error)) from error

    async def _write(self, write: Callable[[], Prompt], param: str) -> Prompt:
        """A prompt, made beside the event loop."""
        try:
            return await asyncio.to_thread(write)
        except LocalLLMError as error:
            raise RefusedError(_refusal_of(error, param)) from error

    def _answer(
        self,
        kind: Kind,
        body: Sampling,
        prompts: list[Prompt],
        params: SamplingParams,
        request: Request,
        echoes: Sequence[str] = (),
    ) -> Response:
        key = request.scope.get("key", "")
        if key and self._by_key[key] + len(prompts) > LIMITS.requests_of_a_key:
            raise RefusedError(_busy("this key has as many requests under way as it may"))
        streams: list[RequestStream] = []
        salt = request.scope.get("salt", b"")
        try:
            for prompt in prompts:
                streams.append(self._engine.submit(prompt, params, salt))
        except (EngineDownError, QueueFullError) as error:
            for stream in streams:
                stream.close()
            raise RefusedError(_refusal_of(error)) from error
        self._by_key[key] += len(prompts)
        writer = Writer(
            kind,
            self._model.name,
            self._tokenizer,
            len(prompts) * params.n,
            has_logprobs=params.logprobs is not None,
        )
        writer.usage.num_prompt = sum(len(prompt.token_ids) for prompt in prompts)

        def finished() -> None:
            for stream in streams:
                stream.close()
            self._by_key[key] -= len(prompts)
            meter.close()

        meter = Meter(self._metrics, writer.usage.num_prompt, len(prompts) * params.n)
        events = _merged(streams, params.n, writer, meter)
        if not body.stream:
            return _Whole(events, writer, echoes, finished)
        stream_of_chunks = _Stream(events, writer, echoes, finished)
        asked = body.stream_options
        stream_of_chunks.wants_usage = asked is not None and asked.include_usage
        return stream_of_chunks


async def _merged(
    streams: Sequence[RequestStream], num_samples: int, writer: Writer, meter: Meter
) -> AsyncIterator[tuple[int, TextEvent]]:
    """Events of all streams as they come, each with the number of its choice; booked.

    Raises: RequestError, EngineDownError.
    """
    # Bounded, so that what a slow client does not take is counted where it comes from.
    arrived: asyncio.Queue[tuple[int, TextEvent] | LocalLLMError | None] = asyncio.Queue(64)

    async def read(number: int, stream: RequestStream) -> None:
        try:
            async for event in stream:
                if event.finish_reason is FinishReason.ERROR:
                    assert event.error is not None
                    raise event.error
                if event.sample == 0 and event.token is not None:
                    cached[number] = event.num_cached_tokens
                await arrived.put((number * num_samples + event.sample, event))
            await arrived.put(None)
        except LocalLLMError as error:
            await arrived.put(error)

    cached = [0] * len(streams)
    tasks = [asyncio.create_task(read(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            found = await arrived.get()
            if isinstance(found, LocalLLMError):
                raise found
            if found is None:
                left -= 1
                continue
            writer.add(*found)
            writer.usage.num_cached = sum(cached)
            meter.add(*found, writer.usage.num_cached)
            yield found
    finally:
        for task in tasks:
            task.cancel()


class _UntilGone(Response):
    """An answer whose work ends when the client goes, whether anything was sent or not."""

    def __init__(
        self,
        events: AsyncIterator[tuple[int, TextEvent]],
        writer: Writer,
        echoes: Sequence[str],
        finished: Callable[[], None],
    ) -> None:
        super().__init__()
        self._events, self._writer, self._echoes = events, writer, echoes
        self._finished = finished

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(scope, receive, send))
        gone = asyncio.create_task(_wait_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._finished()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class _Whole(_UntilGone):
    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for _ in self._events:
                pass
            response = JSONResponse(self._writer.whole(self._echoes))
        except LocalLLMError as error:
            response = _as_response(_refusal_of(error))
        await response(scope, receive, send)


class _Stream(_UntilGone):
    wants_usage = False

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def say(*chunks: dict[str, Any] | str) -> None:
            nonlocal has_begun
            if not has_begun:
                headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
                start = {"type": "http.response.start", "status": 200, "headers": headers}
                await send(start)
                has_begun = True
            lines = (each if isinstance(each, str) else json.dumps(each) for each in chunks)
            body = "".join(f"data: {line}\n\n" for line in lines).encode()
            async with asyncio.timeout(_READ_S):
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.sleep(0)  # else nobody hears that the client has gone

        writer = self._writer
        try:
            async for index, event in self._events:
                if not has_begun:
                    # Not before: a request that is refused gets a status of its own.
                    first = list(writer.first_chunks(self._echoes))
                    await say(*first, *writer.chunks(index, event))
                elif chunks := list(writer.chunks(index, event)):
                    await say(*chunks)
            if self.wants_usage:
                await say(writer.usage_chunk())
        except LocalLLMError as error:
            refusal = _refusal_of(error)
            if not has_begun:
                await _as_response(refusal)(scope, receive, send)
                return
            await say(refusal.content)
        except TimeoutError:
            return  # whoever reads nothing for so long has given up
        await say("[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _refusal_of(error: LocalLLMError, param: str | None = None) -> Refusal:
    message = "; ".join(part for part in (error.message, error.where, error.hint) if part)
    match error:
        case ContextLengthError():
            code = "context_length_exceeded"
            return Refusal(400, message, code=code, param=param or error.param or None)
        case StepMemoryError():
            return Refusal(503, message, "server_error", "out_of_memory")
        case RequestError():
            return Refusal(400, message, param=error.param or param)
        case TemplateError():
            return Refusal(400, message, code="template_error", param=param)
        case QueueFullError():
            return _busy(message)
        case EngineDownError():
            return Refusal(
                503, message, "server_error", "engine_down", headers={"Retry-After": "2"}
            )
    return Refusal(500, message, "server_error")


def _busy(message: str) -> Refusal:
    kind, code = "rate_limit_error", "rate_limit_exceeded"
    return Refusal(429, message, kind, code, headers={"Retry-After": "1"})


def _invalid(message: str, param: str) -> RefusedError:
    return RefusedError(Refusal(400, message, param=param))


def _describe_invalid(error: ValidationError) -> Refusal:
    """The first thing that is wrong with a body, in a line."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    message = f"{place}: {first['msg']}" if place else str(first["msg"])
    return Refusal(400, f"{message:.500}", param=str(first["loc"][0]) if first["loc"] else None)


def _as_response(refusal: Refusal) -> JSONResponse:
    return JSONResponse(refusal.content, refusal.status, refusal.headers)


async def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _as_response(error.refusal)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _as_response(
        Refusal(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    )


async def _on_defect(request: Request, error: Exception) -> Response:
    logger.error("in %s", request.url.path, exc_info=error)
    return _as_response(Refusal(500, "a defect of the server", "server_error"))
