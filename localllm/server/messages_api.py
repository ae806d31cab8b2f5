"""Anthropic's Messages API. Source: Anthropic's API reference, "Messages"."""

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from localllm.server.answering import Answering
from localllm.server.messages_schema import CountRequest, MessagesRequest
from localllm.server.messages_writer import MessagesWriter
from localllm.server.sending import with_changes


class MessagesApi:
    """The routes."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    async def create(self, body: MessagesRequest, request: Request) -> Response:
        """`POST /v1/messages`"""
        question = await self._answering.question(body, "messages", request)
        writer = MessagesWriter(
            self._answering.model.name,
            question.form,
            only_reads=body.max_tokens == 0,
            compares_with=body.compares_with,
        )
        return self._answering.answer(body, question, writer, request)

    async def count(self, body: CountRequest, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`"""
        self._answering.check_model(body.model)
        asked = body.asked()
        prompt = await self._answering.write(asked.conversation, "messages")
        count = len(prompt.token_ids) + len(await self._answering.begun(asked.begun))
        return with_changes(JSONResponse({"input_tokens": count}), [prompt])
