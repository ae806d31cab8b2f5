"""A server within this process that computes nothing: it keeps the prompts that its engine gets."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from checkpoints import byte_tokenizer

from localllm.answer.completion import TextEvent
from localllm.attach.messages import Stats
from localllm.chat.response_store import Quota
from localllm.hub.generation_config import GenerationDefaults
from localllm.schedule.request import FinishReason
from localllm.server.answering import ServedModel
from localllm.server.app import create_app
from localllm.server.guard import Access
from localllm.server.kept_responses import KeptResponses
from localllm.text.context import Context
from localllm.text.prompt_writer import PromptWriter
from localllm.text.tokenizer import Tokenizer

TEMPLATES = sorted((Path(__file__).parents[3] / "shared/data/chat_templates").glob("*.jinja"))
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<u>", "pad_token": "<p>"}


class _Stream:
    replica = ""

    def __init__(self, thinking: str) -> None:
        self._thinking = thinking

    async def __aiter__(self) -> AsyncIterator[TextEvent]:
        yield TextEvent(0, "Fine.", self._thinking, None, FinishReason.STOP, None, 0, 0, 0.0)

    def close(self) -> None:
        """Nothing runs."""


class _Engine:
    state, stats, num_restarts, replicas = "ready", Stats(), 0, Mapping[str, Any]

    def __init__(self, thinking: str) -> None:
        self.asked: list[Any] = []
        self._thinking = thinking

    def submit(self, prompt: Any, *more: Any, **named: Any) -> _Stream:
        """Keep the prompt, and answer at once."""
        self.asked.append(prompt)
        return _Stream(self._thinking)


class PromptServer:
    """A model with a chat template, behind the whole application."""

    def __init__(self, template: str, thinking: str = "") -> None:
        self.tokenizer = Tokenizer(byte_tokenizer, SPECIAL_TOKENS, {"default": template})
        self._engine = _Engine(thinking)
        writer = PromptWriter(self.tokenizer, Context(1 << 20, ""))
        model = ServedModel("pocket", 1, writer, GenerationDefaults({}, ()))
        kept = KeptResponses(Path("unused"), Quota(0, 0.0))
        self._app = create_app(self._engine, model, Access(), kept)  # type: ignore[arg-type]

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """The response to a body."""

        async def ask() -> httpx.Response:
            way = httpx.ASGITransport(app=self._app)  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=way, base_url="http://127.0.0.1") as client:
                return await client.post(path, json=body)

        return asyncio.run(ask())

    @property
    def prompt(self) -> str:
        """The text of the last prompt that the engine got."""
        ids = list(self._engine.asked[-1].token_ids)
        return str(self.tokenizer._backend.decode(ids, skip_special_tokens=False))
