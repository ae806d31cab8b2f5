"""OpenAI's embeddings. Source: OpenAI's API reference, "Create embeddings"."""

import asyncio
import base64
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import Field, PlainValidator, WithJsonSchema
from starlette.responses import Response

from localllm.attach.engine_client import EngineDownError, QueueFullError
from localllm.engine.request import FinishReason
from localllm.engine.sampling_params import SamplingParams
from localllm.errors import LocalLLMError
from localllm.server.answering import Answering
from localllm.server.limits import LIMITS
from localllm.server.refusals import RefusedError, invalid, refusal_of
from localllm.server.schema import PROMPT_SCHEMA, Name, WholeBody, read_prompts
from localllm.text.prompt import Prompt, Text

# Prompts of one request that are computed at once; others of the engine's requests get their turns.
_AT_ONCE = 16

Inputs = Annotated[
    list[str | list[int]],
    PlainValidator(lambda value: read_prompts(value, LIMITS.embeddings)),
    WithJsonSchema(
        {
            "anyOf": [
                *PROMPT_SCHEMA["anyOf"],
                {"type": "array", "items": PROMPT_SCHEMA, "maxItems": LIMITS.embeddings},
            ]
        }
    ),
]


class EmbeddingsRequest(WholeBody):
    """`POST /v1/embeddings`"""

    model: Name | None = None
    input: Inputs
    dimensions: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    encoding_format: Literal["float", "base64"] | None = None


class EmbeddingsApi:
    """The route."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    async def create(self, body: EmbeddingsRequest, request: Request) -> Response:
        """`POST /v1/embeddings`: of each text the last hidden state, of length 1."""
        self._answering.check_model(body.model)
        if not self._answering.makes_embeddings:
            raise invalid("this server makes no embeddings; --embeddings lets it", "input")
        prompts = [await self._answering.write(Text(each), "input") for each in body.input]
        turns, salt = asyncio.Semaphore(_AT_ONCE), request.scope.get("salt", b"")

        async def embed(prompt: Prompt) -> bytes:
            async with turns:
                return await self._embed(prompt, salt)

        tasks = [asyncio.create_task(embed(prompt)) for prompt in prompts]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        width = len(found[0]) // 4
        if body.dimensions is not None and body.dimensions > width:
            raise invalid(f"embeddings of this model have {width:,} dimensions", "dimensions")
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        data = [
            {"object": "embedding", "index": place, "embedding": _written(each, body)}
            for place, each in enumerate(found)
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        name = self._answering.model.name
        return JSONResponse({"object": "list", "data": data, "model": name, "usage": usage})

    async def _embed(self, prompt: Prompt, salt: bytes) -> bytes:
        """Raises: RefusedError."""
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, embeds=True)
        try:
            stream = self._answering.engine.submit(prompt, params, salt, is_whole=True)
            async for event in stream:
                if event.finish_reason is FinishReason.ERROR:
                    assert event.error is not None
                    raise event.error
                if event.embedding is not None:
                    return event.embedding
        except (EngineDownError, QueueFullError, LocalLLMError) as error:
            raise RefusedError(refusal_of(error, "input")) from error
        raise RefusedError(refusal_of(LocalLLMError("the engine ended without an embedding")))


def _written(embedding: bytes, body: EmbeddingsRequest) -> Any:
    """The first dimensions, of length 1, in the format that is asked for."""
    values = _normalised(array("f", embedding)[: body.dimensions])
    if body.encoding_format == "base64":
        return base64.b64encode(array("f", values).tobytes()).decode()
    return list(values)


def _normalised(values: Sequence[float]) -> list[float]:
    length = sum(value * value for value in values) ** 0.5
    return [value / length for value in values] if length else list(values)
