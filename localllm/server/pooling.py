"""What the engine reads of many prompts at once, without an answer: embeddings and scores."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request

from localllm.attach.engine_client import EngineDownError, QueueFullError
from localllm.errors import LocalLLMError
from localllm.schedule.request import FinishReason
from localllm.schedule.sampling_params import Pooling, SamplingParams
from localllm.server.answering import Answering
from localllm.server.choice import Usage
from localllm.server.refusals import RefusedError, busy_key, refusal_of
from localllm.text.prompt import Prompt

# Prompts of one request that are computed at once; others of the engine's requests get their turns.
_AT_ONCE = 16


async def pool(
    answering: Answering, prompts: Sequence[Prompt], pooling: Pooling, request: Request, param: str
) -> list[bytes]:
    """`pooling` of each prompt, float32; `param`: the field of the body that holds the prompts.

    Raises: RefusedError for the first prompt that fails; the others are given up.
    """
    at_once = min(len(prompts), _AT_ONCE)
    key, num_more = request.scope.get("key", ""), at_once - 1  # the request has one place already
    if not answering.places.take(key, num_more):
        raise RefusedError(busy_key())
    request.scope["model"] = answering.model.name
    request.scope["usage"] = Usage(sum(len(prompt.token_ids) for prompt in prompts))
    turns, salt = asyncio.Semaphore(at_once), request.scope.get("salt", b"")
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=pooling)

    async def read(prompt: Prompt) -> bytes:
        async with turns:
            try:
                stream = answering.engine.submit(prompt, params, salt, is_whole=True)
                async for event in stream:
                    if event.finish_reason is FinishReason.ERROR:
                        assert event.error is not None
                        raise event.error
                    if event.pooled is not None:
                        return event.pooled
            except (EngineDownError, QueueFullError, LocalLLMError) as error:
                # The engine knows no other field than a prompt.
                raise RefusedError(replace(refusal_of(error), param=param)) from error
        raise RefusedError(refusal_of(LocalLLMError("the engine ended without a result")))

    tasks = [asyncio.create_task(read(prompt)) for prompt in prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        answering.places.give_back(key, num_more)
