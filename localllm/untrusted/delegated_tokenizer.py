"""A tokenizer whose work with strangers' texts is done in another process."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from localllm.errors import BusyError, RequestError, TemplateError
from localllm.process.frames import Message, prompt_from_wire
from localllm.text.prompt import ChatMessage, Prompt, ThinkLevel
from localllm.text.tokenizer import Tokenizer
from localllm.untrusted.worker import StoppedError, WaitedError

# For a text or conversation of no length, and what each byte adds: a loaded machine encodes a
# megabyte in a second.
_JOB_S, _BYTES_PER_S = 3.0, 250_000
_HINT = "a shorter text; or the model's tokenizer or chat template is at fault"


class Elsewhere(Protocol):
    """Where the work is done."""

    def warm(self) -> None:
        """Get ready, without waiting for it."""

    def ask(self, message: Mapping[str, Any], seconds: float) -> Message:
        """Have a job done. Raises: LocalLLMError, StoppedError."""


class DelegatedTokenizer(Tokenizer):
    """See Tokenizer. Tokens become text here, texts become tokens elsewhere."""

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
        """See Tokenizer."""
        self._elsewhere.warm()

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special: bool = False
    ) -> list[int]:
        """See Tokenizer. Raises: also RequestError for a text that takes too long or too much."""
        asked = {
            "text": text,
            "add_special_tokens": add_special_tokens,
            "parse_special": parse_special,
        }
        ids: list[int] = self._have_done("encode", asked)["ids"]
        return ids

    def count_at_least(self, text: str, limit: int) -> int:
        """See Tokenizer."""
        return int(self._have_done("count", {"text": text, "limit": limit})["count"])

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        think: ThinkLevel | None = None,
        parse_special: bool = False,
        **variables: Any,
    ) -> Prompt:
        """See Tokenizer."""
        asked = {
            "messages": list(map(dict, messages)),
            "tools": None if tools is None else list(map(dict, tools)),
            "think": think,
            "parse_special": parse_special,
            "variables": variables,
        }
        return prompt_from_wire(self._have_done("chat", asked)["prompt"])

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        think: ThinkLevel | None = None,
        **variables: Any,
    ) -> str:
        """See Tokenizer."""
        asked = {
            "messages": list(map(dict, messages)),
            "tools": None if tools is None else list(map(dict, tools)),
            "think": think,
            "variables": variables,
        }
        return str(self._have_done("render", asked)["text"])

    def _have_done(self, job: str, asked: Mapping[str, Any]) -> Message:
        is_chat = job in ("chat", "render")
        try:
            told = json.dumps(asked, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"the conversation cannot be written as JSON: {error!s:.100}",
                param="messages" if is_chat else "prompt",
            ) from error
        seconds = _JOB_S + len(told) / _BYTES_PER_S
        message = {"job": job, "asked": told, "num_bytes": len(told)}
        try:
            return self._elsewhere.ask(message, seconds)
        except WaitedError as error:
            raise BusyError("other prompts are being read", hint="ask again in a moment") from error
        except StoppedError as error:
            if is_chat:
                what = "the chat template was stopped"
                raise TemplateError(what, where=str(error), hint=_HINT) from error
            what = "the text could not be encoded"
            raise RequestError(what, param="prompt", where=str(error), hint=_HINT) from error
