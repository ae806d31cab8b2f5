"""A tokenizer that has untrusted text processed in another process."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Protocol, TypeVar

from tokenizers import Tokenizer as Backend

from localllm.errors import BusyError, RequestError, TemplateError
from localllm.text.prompt import Conversation, Prompt
from localllm.text.tokenizer import Tokenizer
from localllm.untrusted.messages import (
    ChatPrompt,
    CountTokens,
    EncodeChat,
    EncodeText,
    RenderChat,
    Rendered,
    Result,
    TextJob,
    TokenCount,
    TokenIds,
    bytes_to_text,
    text_to_bytes,
)
from localllm.untrusted.worker import StoppedError, WaitedError

# Seconds for an empty text or conversation, and the bytes that add another second: a busy machine
# encodes a megabyte in a second.
_JOB_S, _BYTES_PER_S = 3.0, 250_000
R = TypeVar("R", TokenIds, TokenCount, ChatPrompt, Rendered)
_HINT = "a shorter text; otherwise the model's tokenizer or chat template is at fault"


class Elsewhere(Protocol):
    """A way to have the work done outside this process."""

    def warm(self) -> None:
        """Start getting ready, without waiting for it."""

    def ask(self, job: TextJob, seconds: float) -> Result:
        """Run a job. Raises: LocalLLMError, StoppedError."""


class DelegatedTokenizer(Tokenizer):
    """Tokens are decoded here; text is encoded elsewhere."""

    def __init__(
        self,
        load_backend: Callable[[], Backend],
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        elsewhere: Elsewhere,
    ) -> None:
        super().__init__(load_backend, special_tokens, chat_templates)
        self._elsewhere = elsewhere

    def warm(self) -> None:
        self._elsewhere.warm()

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special: bool = False
    ) -> list[int]:
        """Raises: also RequestError if encoding takes too much time or memory."""
        job = EncodeText(text_to_bytes(text), add_special_tokens, parse_special)
        return list(self._have_done(job, TokenIds).token_ids)

    def count_at_least(self, text: str, limit: int) -> int:
        return self._have_done(CountTokens(text_to_bytes(text), limit), TokenCount).count

    def encode_chat(self, asked: Conversation) -> Prompt:
        return self._have_done(EncodeChat(_as_bytes(asked)), ChatPrompt).prompt

    def render_chat(self, asked: Conversation) -> str:
        return bytes_to_text(self._have_done(RenderChat(_as_bytes(asked)), Rendered).text)

    def _have_done(self, job: TextJob, expected: type[R]) -> R:
        try:
            result = self._elsewhere.ask(job, _JOB_S + job.num_bytes / _BYTES_PER_S)
            if not isinstance(result, expected):
                raise StoppedError("its process sent an unexpected reply")
        except WaitedError as error:
            raise BusyError("busy reading other prompts", hint="ask again in a moment") from error
        except StoppedError as error:
            if isinstance(job, EncodeChat | RenderChat):
                what = "the chat template was stopped"
                raise TemplateError(what, where=str(error), hint=_HINT) from error
            what = "the text could not be encoded"
            raise RequestError(what, param="prompt", where=str(error), hint=_HINT) from error
        return result


def _as_bytes(asked: Conversation) -> bytes:
    told = {each.name: getattr(asked, each.name) for each in fields(asked)}
    told["messages"] = list(map(dict, asked.messages))
    told["tools"] = None if asked.tools is None else list(map(dict, asked.tools))
    told["variables"] = dict(asked.variables)
    try:
        return text_to_bytes(json.dumps(told, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"the conversation cannot be written as JSON: {error!s:.100}", param="messages"
        ) from error
