"""The application: every route of the server, behind its guard."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from localllm.errors import RequestError
from localllm.server.answering import NO_HABITS, Answering, PromptHabits, ServedModel
from localllm.server.body import WholeBody
from localllm.server.body_reader import BodyReader, Closing, count_names, count_values
from localllm.server.conversations_api import (
    ConversationsApi,
    NameBody,
    NewBody,
    SavedBody,
)
from localllm.server.embeddings_api import EmbeddingsRequest, embed
from localllm.server.engines import Engines, Health
from localllm.server.guard import Access, App, Guard, wants_page
from localllm.server.kept_responses import KeptResponses
from localllm.server.limits import LIMITS
from localllm.server.messages_api import MessagesApi
from localllm.server.messages_schema import CountRequest, MessagesRequest
from localllm.server.openai_api import OpenAIApi
from localllm.server.page import PAGE_PATHS, page_file, page_response
from localllm.server.places import Places
from localllm.server.refusals import (
    Refusal,
    RefusedError,
    as_response,
    describe_invalid,
    refusing,
)
from localllm.server.rerank_api import RerankRequest, rank
from localllm.server.responses_api import ResponsesApi
from localllm.server.responses_schema import InputRequest, ResponseRequest
from localllm.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from localllm.server.sending import WithHeader, warning_of
from localllm.server.wrong_paths import not_found
from localllm.user.places import sessions_file
from localllm.user.version import __version__

logger = logging.getLogger(__name__)
BodyT = TypeVar("BodyT", bound=WholeBody)


def create_app(
    engine: Engines,
    model: ServedModel,
    access: Access,
    kept: KeptResponses,
    habits: PromptHabits = NO_HABITS,
    page_token: str | None = None,
) -> App:
    """The application; the caller starts and stops `engine`. `page_token`: for conversations on the
    page; None: it has none.
    """
    app = FastAPI(
        title="localllm",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the guard takes them away
    )
    places = Places()
    answering = Answering(engine, model, habits, places)
    openai, messages = OpenAIApi(answering), MessagesApi(answering)
    responses, looks = ResponsesApi(answering, kept), _Looks(answering)
    conversations = ConversationsApi(sessions_file(), page_token)
    app.add_exception_handler(Exception, _on_defect)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RefusedError, _on_refused)
    posts: dict[str, tuple[Callable[..., Awaitable[Response]], type[WholeBody]]] = {
        "/v1/chat/completions": (openai.chat, ChatRequest),
        "/v1/completions": (openai.complete, CompletionRequest),
        "/v1/messages": (messages.create, MessagesRequest),
        "/v1/messages/count_tokens": (messages.count, CountRequest),
        "/v1/responses": (responses.create, ResponseRequest),
        "/v1/responses/input_tokens": (responses.count, InputRequest),
        "/v1/embeddings": (partial(embed, answering), EmbeddingsRequest),
        "/v1/rerank": (partial(rank, answering), RerankRequest),
        "/page/conversations": (conversations.create, NewBody),
        "/page/conversations/{number}": (conversations.save, SavedBody),
        "/page/conversations/{number}/name": (conversations.rename, NameBody),
        "/tokenize": (openai.tokenize, TokenizeRequest),
        "/detokenize": (openai.detokenize, DetokenizeRequest),
    }
    parts: dict[str, Any] = {}
    bodies = BodyReader()
    for path, (answer, schema) in posts.items():
        app.add_api_route(
            path,
            _reading(answer, schema, bodies),
            methods=["POST"],
            openapi_extra={"requestBody": _described(schema, parts)},
        )
    for path, look in (
        ("/v1/models", openai.models),
        ("/v1/models/{name:path}", openai.model),
        ("/v1/responses/{name}", responses.get),
        ("/v1/responses/{name}/input_items", responses.items),
        ("/page/conversations", conversations.rows),
        ("/page/conversations/{number}", conversations.get),
        ("/page/model", looks.model),
        ("/page/token", conversations.check),
        ("/", looks.index),
        ("/health", looks.health),
        ("/metrics", looks.metrics),
    ):
        # Agents ask for / with HEAD, to see whether there is a server.
        app.add_api_route(path, look, methods=["GET", "HEAD"], response_model=None)
    for path in PAGE_PATHS:
        app.add_api_route(path, page_file, response_model=None, include_in_schema=False)
    for path, remove in (
        ("/v1/responses/{name}", responses.remove),
        ("/page/conversations/{number}", conversations.remove),
    ):
        app.add_api_route(path, remove, methods=["DELETE"], response_model=None)
    _add_parts(app, parts)
    return Closing(Guard(app, access, places))


def _reading(
    answer: Callable[..., Awaitable[Response]], schema: type[BodyT], bodies: BodyReader
) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        body = await bodies.read(request.receive, request.scope.get("key", ""))
        if isinstance(body, Refusal):
            raise RefusedError(body)
        asked, unknown = await asyncio.to_thread(_parse, schema, body)
        with refusing(RequestError):  # found late, as by a decoder that fails on some tokens
            response = await answer(asked, request)
        if unknown:
            return WithHeader(response, lambda: warning_of(unknown))
        return response

    return route


def _parse(schema: type[BodyT], body: bytes) -> tuple[BodyT, list[str]]:
    """The body, and its unknown fields. Raises: RefusedError."""
    # Parsing blocks everything else: 50 ms for a text of 8 MB, seconds for as many values as fit.
    if count_values(body) > LIMITS.json_values:
        message = f"the body has over {LIMITS.json_values:,} values"
        raise RefusedError(Refusal(413, message))
    if count_names(body) > LIMITS.json_names:
        message = f"the objects of the body have over {LIMITS.json_names:,} names"
        raise RefusedError(Refusal(413, message))
    try:
        asked = schema.model_validate_json(body)
    except ValidationError as error:
        raise RefusedError(describe_invalid(error, body)) from error
    return asked, asked.unknown


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


class _Looks:
    """What a person or a program sees of the server."""

    def __init__(self, answering: Answering) -> None:
        self._engine, self._model = answering.engine, answering.model
        self._metrics = answering.metrics

    async def index(self, request: Request) -> Response:
        """`GET /`: the page for a browser, and a few lines for anything else."""
        if wants_page(request.headers.get("accept", "")):
            return page_response()
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

    async def model(self) -> dict[str, Any]:
        """`GET /page/model`: what the page's settings depend on."""
        context_length = self._model.prompts.context.length
        return {
            "id": self._model.name,
            "context_length": context_length,
            "most_tokens": min(LIMITS.answer_tokens, context_length),
            "thinks": self._model.prompts.tokenizer.can_think,
        }

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


async def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return as_response(error.refusal, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, headers = str(error.detail), dict(error.headers or {})
    path = request.scope["path"]
    if error.status_code == 404:
        routes = [each.path for each in request.app.routes if "{" not in each.path]
        message = not_found(path, routes)
    elif error.status_code == 405:
        message = f"{request.method:.20} is not for {path:.100}, only {headers.get('Allow', '')}"
    refusal = Refusal(error.status_code, message, headers=headers)
    return as_response(refusal, request.url.path)


async def _on_defect(request: Request, error: Exception) -> Response:
    logger.error("internal error in %s", request.url.path, exc_info=error)
    refusal = Refusal(500, "internal server error", "server_error")
    return as_response(refusal, request.url.path)


def _health(engine: Health) -> dict[str, Any]:
    return {
        "status": "ok" if engine.state == "ready" else engine.state,
        "restarts": engine.num_restarts,
        "load": asdict(engine.stats),
    }
