"""OpenAI's Responses API. Source: OpenAI's API reference, "Responses"."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from localllm.chat.response_store import StoredResponse
from localllm.server.answering import Answering
from localllm.server.kept_responses import KeptResponses
from localllm.server.refusals import Refusal, RefusedError, refusing
from localllm.server.responses_schema import InputRequest, ResponseRequest
from localllm.server.responses_writer import ResponsesWriter
from localllm.server.sending import with_changes


class ResponsesApi:
    """The routes."""

    def __init__(self, answering: Answering, kept: KeptResponses) -> None:
        self._answering, self._kept = answering, kept

    async def create(self, body: ResponseRequest, request: Request) -> Response:
        """`POST /v1/responses`"""
        await self._continue(body, request)
        question = await self._answering.question(body, "input", request)
        keep = partial(self._keep, body, request.scope.get("salt", b""))
        writer = ResponsesWriter(body, self._answering.model.name, question.form, keep)
        return self._answering.answer(body, question, writer, request)

    async def count(self, body: InputRequest, request: Request) -> Response:
        """`POST /v1/responses/input_tokens`"""
        self._answering.check_model(body.model)
        await self._continue(body, request)
        prompt = await self._answering.write(body.asked().conversation, "input")
        counted = {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}
        return with_changes(JSONResponse(counted), [prompt])

    async def get(self, name: str, request: Request) -> Response:
        """`GET /v1/responses/NAME`"""
        return JSONResponse((await self._stored(name, request)).response)

    async def items(self, name: str, request: Request) -> Response:
        """`GET /v1/responses/NAME/input_items`, the newest first, all at once."""
        asked = (await self._stored(name, request)).input
        items = [{"id": f"{name}_{place}", **item} for place, item in enumerate(asked)][::-1]
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": items, **ends})

    async def remove(self, name: str, request: Request) -> Response:
        """`DELETE /v1/responses/NAME`"""
        with refusing():
            is_gone = await self._kept.remove(request.scope.get("salt", b""), name)
        if not is_gone:
            raise _not_found(name, None)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def _continue(self, body: InputRequest, request: Request) -> None:
        """Read what the body goes on from, if it does. Raises: RefusedError if that is gone."""
        name = body.previous_response_id
        if name is None:
            return
        with refusing(param="previous_response_id"):
            earlier = await self._kept.conversation(request.scope.get("salt", b""), name)
        if earlier is None:
            if await self._kept.get(request.scope.get("salt", b""), name) is not None:
                message = f"an answer before {name!r:.100} was deleted, or is too long ago"
                raise RefusedError(_gone(message))
            raise _not_found(name, "previous_response_id")
        body.continue_from(
            item for stored in earlier for item in (*stored.input, *stored.response["output"])
        )

    async def _stored(self, name: str, request: Request) -> StoredResponse:
        """Raises: RefusedError."""
        with refusing():
            stored = await self._kept.get(request.scope.get("salt", b""), name)
        if stored is None:
            raise _not_found(name, None)
        return stored

    def _keep(self, body: ResponseRequest, owner: bytes, response: Mapping[str, Any]) -> None:
        if body.store is False:
            return
        items = [item.as_stored() for item in body.items]
        stored = StoredResponse(response["id"], body.previous_response_id, items, dict(response))
        self._kept.put(owner, stored)


def _gone(message: str) -> Refusal:
    return Refusal(400, message, code="previous_response_not_found", param="previous_response_id")


def _not_found(name: str, param: str | None) -> RefusedError:
    message = f"there is no response {name!r:.100} here: it was not stored, or is too long ago"
    code = "previous_response_not_found" if param else None
    return RefusedError(Refusal(404 if param is None else 400, message, code=code, param=param))
