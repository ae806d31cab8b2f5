"""Documents in the order in which they match a question.

Sources: the API references of Cohere ("Rerank") and Jina ("Reranker"), whose bodies are alike.
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import Field, PlainValidator, WithJsonSchema
from starlette.responses import Response

from localllm.hub.reranker_files import Reranker
from localllm.server.answering import Answering
from localllm.server.body import Name, WholeBody
from localllm.server.limits import LIMITS
from localllm.server.pooling import pool
from localllm.server.refusals import invalid, refusing
from localllm.text.prompt import Prompt


def _read_documents(value: object) -> list[str]:
    """Checked by hand, so that a wrong one among thousands makes one error."""
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of texts")
    if len(value) > LIMITS.embeddings:
        raise ValueError(f"at most {LIMITS.embeddings} documents")
    return [_read_document(each) for each in value]


def _read_document(value: object) -> str:
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError("a document must be a text, or an object with one as text")
    return text


_DOCUMENT = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    ]
}
Documents = Annotated[
    list[str],
    PlainValidator(_read_documents),
    WithJsonSchema(
        {"type": "array", "items": _DOCUMENT, "minItems": 1, "maxItems": LIMITS.embeddings}
    ),
]


class RerankRequest(WholeBody):
    """`POST /v1/rerank`"""

    model: Name | None = None
    query: str
    documents: Documents
    top_n: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    instruction: str | None = None


async def rank(answering: Answering, body: RerankRequest, request: Request) -> Response:
    """`POST /v1/rerank`: the documents' places in `documents`, the best one first."""
    answering.check_model(body.model)
    reranker = answering.model.reranker
    if reranker is None:
        raise invalid(f"{answering.model.name} is not a reranker; Qwen3-Reranker is one", "model")
    with refusing(param="documents"):
        prompts = await asyncio.to_thread(_write, answering, reranker, body)
    pooled = await pool(answering, prompts, reranker.pooling, request, "documents")
    scores = [reranker.relevance(each) for each in pooled]
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return JSONResponse(
        {
            "id": f"rerank-{secrets.token_hex(12)}",
            "model": answering.model.name,
            "results": _results(scores, body),
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def _write(answering: Answering, reranker: Reranker, body: RerankRequest) -> list[Prompt]:
    """Raises: LocalLLMError."""
    pairs, most = reranker.pairs, body.max_tokens_per_doc
    texts = body.documents
    if most is not None:
        texts = [pairs.cut(each, most) for each in texts]
    for text in texts:
        answering.model.prompts.check_length(body.query + text)
    return [Prompt(pairs.write(body.query, text, body.instruction)) for text in texts]


def _results(scores: Sequence[float], body: RerankRequest) -> list[dict[str, Any]]:
    # Equal scores keep the order in which their documents came.
    best = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n]
    results: list[dict[str, Any]] = []
    for place in best:
        found: dict[str, Any] = {"index": place, "relevance_score": scores[place]}
        if body.return_documents:
            found["document"] = {"text": body.documents[place]}
        results.append(found)
    return results
