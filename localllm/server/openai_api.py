"""OpenAI's completions, chats and models; and texts as tokens, under vLLM's paths."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from localllm.errors import ContextLengthError, RequestError
from localllm.schedule.sampling_params import SamplingParams
from localllm.server.answering import Answering, Question
from localllm.server.openai_writer import Echo, Kind, OpenAIWriter
from localllm.server.refusals import invalid, refusing
from localllm.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)
from localllm.server.sending import with_changes
from localllm.text.fill_in import FillIn
from localllm.text.prompt import Conversation, Prompt, Text


class OpenAIApi:
    """The routes."""

    def __init__(self, answering: Answering) -> None:
        self._answering, self._model = answering, answering.model

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """`POST /v1/chat/completions`"""
        question = await self._answering.question(body, "messages", request)
        return self._answer("chat", body, question, request)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """`POST /v1/completions`"""
        self._answering.check_model(body.model)
        params = self._answering.params(body)
        if body.suffix:
            return await self._fill_in(body, params, request)
        parses, adds = body.parse_special is not False, body.add_special_tokens is not False
        texts = (Text(each, parse_special=parses, add_special=adds) for each in body.prompt)
        prompts = [await self._answering.write(text, "prompt") for text in texts]
        form = self._fill_in_format
        if form is not None and any(form.is_used_in(each.token_ids) for each in prompts):
            params = _with_stops(params, form)
        return self._answer("text", body, Question(prompts, params), request)

    def _echoes(self, body: CompletionRequest, prompts: Sequence[Prompt]) -> list[Echo]:
        """The prompts as their answers begin with them."""
        tokenizer = self._answering.tokenizer
        return [
            Echo(
                asked
                if isinstance(asked, str)
                else tokenizer.decode(asked, tokenizer.special_text),
                prompt.token_ids,
            )
            for asked, prompt in zip(body.prompt, prompts, strict=True)
        ]

    async def _fill_in(
        self, body: CompletionRequest, params: SamplingParams, request: Request
    ) -> Response:
        """Complete what stands between a prompt and the suffix. Raises: RefusedError."""
        if self._fill_in_format is None:
            name = self._model.name
            raise invalid(f"{name} cannot fill in: its vocabulary has no tokens for it", "suffix")
        form = self._fill_in_format
        check, tokenizer = self._model.prompts.check_length, self._answering.tokenizer
        encode = partial(tokenizer.encode, add_special_tokens=False)

        def write(text: str) -> Prompt:
            for part in (text, body.suffix or ""):
                check(part)
            return Prompt(form.write(text, body.suffix or "", encode))

        with refusing(RequestError, "prompt"):
            texts = [each for each in body.prompt if isinstance(each, str)]
            prompts = [await asyncio.to_thread(write, each) for each in texts]
        return self._answer("text", body, Question(prompts, _with_stops(params, form)), request)

    @cached_property
    def _fill_in_format(self) -> FillIn | None:
        return FillIn.of(self._answering.tokenizer.vocabulary())

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        """`POST /tokenize`"""
        self._answering.check_model(body.model)
        written: list[Prompt] = []
        if body.messages is not None:
            prompt = await self._answering.write(
                Conversation([each.for_template() for each in body.messages]), "messages"
            )
            ids: Sequence[int] = prompt.token_ids
            written = [prompt]
        else:
            with refusing(ContextLengthError):
                self._model.prompts.check_length(body.prompt or "")
            ids = await asyncio.to_thread(
                self._answering.tokenizer.encode,
                body.prompt or "",
                add_special_tokens=body.add_special_tokens,
            )
        context = self._model.prompts.context.length
        told = {"count": len(ids), "max_model_len": context, "tokens": list(ids)}
        return with_changes(JSONResponse(told), written)

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Response:
        """`POST /detokenize`"""
        self._answering.check_model(body.model)
        known = self._answering.tokenizer.num_token_ids
        for token_id in body.tokens:
            if token_id >= known:
                raise invalid(f"token id {token_id} is not within 0 to {known - 1}", "tokens")
        text = await asyncio.to_thread(self._answering.tokenizer.decode, body.tokens)
        return JSONResponse({"prompt": text})

    async def models(self, request: Request) -> dict[str, Any]:
        """`GET /v1/models`, which Anthropic's API has too."""
        described = self._described(request)
        if _is_of_anthropic(request):
            ends = {"first_id": described["id"], "last_id": described["id"], "has_more": False}
            return {"data": [described], **ends}
        return {"object": "list", "data": [described]}

    async def model(self, name: str, request: Request) -> dict[str, Any]:
        """`GET /v1/models/NAME`"""
        self._answering.check_model(name)
        return self._described(request)

    def _described(self, request: Request) -> dict[str, Any]:
        name, created_s = self._model.name, self._model.created_s
        context_length = self._model.prompts.context.length
        if _is_of_anthropic(request):
            created_at = datetime.fromtimestamp(created_s, UTC).isoformat()
            return {
                "type": "model",
                "id": name,
                "display_name": name,
                "created_at": created_at,
                "max_input_tokens": context_length,
            }
        return {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "localllm",
            "max_model_len": context_length,
        }

    def _answer(
        self,
        kind: Kind,
        body: Sampling,
        question: Question,
        request: Request,
    ) -> Response:
        asked = body.stream_options
        echoes = list[Echo]()
        if isinstance(body, CompletionRequest) and body.echo:
            echoes = self._echoes(body, question.prompts)
        writer = OpenAIWriter(
            kind,
            self._model.name,
            self._answering.tokenizer,
            question.num_choices,
            has_logprobs=question.params.logprobs is not None,
            wants_usage=asked is not None and bool(asked.include_usage),
            tools=question.form,
            echoes=echoes,
            only_reads=body.max_tokens == 0,
        )
        return self._answering.answer(body, question, writer, request)


def _with_stops(params: SamplingParams, form: FillIn) -> SamplingParams:
    """With the tokens that end what was filled in."""
    return replace(params, stop_token_ids=(*params.stop_token_ids, *form.stop_ids))


def _is_of_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers
