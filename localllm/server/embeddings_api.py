"""OpenAI's embeddings. Source: OpenAI's API reference, "Create embeddings"."""

import base64
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import Field, PlainValidator, WithJsonSchema
from starlette.responses import Response

from localllm.schedule.sampling_params import Pooling
from localllm.server.answering import Answering
from localllm.server.body import Name, WholeBody
from localllm.server.limits import LIMITS
from localllm.server.pooling import pool
from localllm.server.refusals import invalid
from localllm.server.schema import PROMPT_SCHEMA, read_prompts
from localllm.text.prompt import Text

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


async def embed(answering: Answering, body: EmbeddingsRequest, request: Request) -> Response:
    """`POST /v1/embeddings`: of each text the last hidden state, of length 1."""
    answering.check_model(body.model)
    if not answering.model.pools:
        raise invalid("this server makes no embeddings; --embeddings lets it", "input")
    prompts = [await answering.write(Text(each), "input") for each in body.input]
    found = await pool(answering, prompts, Pooling("embedding"), request, "input")
    width = len(found[0]) // 4
    if body.dimensions is not None and body.dimensions > width:
        raise invalid(f"embeddings of this model have {width:,} dimensions", "dimensions")
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    data = [
        {"object": "embedding", "index": place, "embedding": _written(each, body)}
        for place, each in enumerate(found)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    name = answering.model.name
    return JSONResponse({"object": "list", "data": data, "model": name, "usage": usage})


def _written(embedding: bytes, body: EmbeddingsRequest) -> Any:
    """The first dimensions, of length 1, in the format that is asked for."""
    values = _normalised(array("f", embedding)[: body.dimensions])
    if body.encoding_format == "base64":
        return base64.b64encode(array("f", values).tobytes()).decode()
    return list(values)


def _normalised(values: Sequence[float]) -> list[float]:
    length = sum(value * value for value in values) ** 0.5
    return [value / length for value in values] if length else list(values)
