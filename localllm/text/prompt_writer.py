"""Writes texts and conversations as prompts, with a model's tokenizer, template and context."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index

from localllm.errors import ContextLengthError, RequestError
from localllm.text.context import Context
from localllm.text.prompt import Asked, Conversation, Prompt, Text
from localllm.text.tokenizer import Tokenizer

# Enough for everything before a token that its text may depend on.
NUM_CONTEXT_TOKENS = 8
# A token of common text has a few characters; a text this much longer is not encoded whole.
_CHARS_A_TOKEN = 64


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """Writes prompts for a model with this tokenizer and context."""

    tokenizer: Tokenizer
    context: Context

    def write(self, asked: Asked) -> Prompt:
        """The prompt that the model reads. A text begins with the tokenizer's own start token.

        Raises: RequestError, TemplateError; ContextLengthError early, for a text that is far too
        long to be encoded whole.
        """
        text = _text_of(asked)
        if text is not None:
            self.check_length(text)
        return self._encode(asked)

    def count(self, asked: Asked, limit: int | None = None) -> int:
        """Prompt tokens; see Answerer.count."""
        text = _text_of(asked)
        if limit is not None and text is not None:
            at_least = self._count_if_long(text, limit)
            if at_least > limit:
                return at_least
        return len(self._encode(asked).token_ids)

    def check_length(self, text: str) -> None:
        """Raises: ContextLengthError for a text that is far too long to be encoded whole."""
        limit = self.context.length
        num_tokens = self._count_if_long(text, limit)
        if num_tokens > limit:
            raise ContextLengthError(
                f"the prompt has over {num_tokens:,} tokens, the context {limit:,}",
                param="prompt",
                hint=f"a shorter prompt, or {self.context.longer}",
            )

    def _count_if_long(self, text: str, limit: int) -> int:
        """A lower bound on a long text's tokens, counted up to `limit`; 0 for one that is short
        enough to encode whole.
        """
        if len(text) <= _CHARS_A_TOKEN * limit:
            return 0
        return self.tokenizer.count_at_least(text, limit)

    def _encode(self, asked: Asked) -> Prompt:
        if isinstance(asked, Prompt):
            return asked
        if isinstance(asked, Text):
            return self._encode_text(asked)
        if not self.tokenizer.has_chat_template:
            return self._encode_text(Text(asked.text, asked.parse_special))
        return self.tokenizer.encode_chat(asked)

    def _encode_text(self, asked: Text) -> Prompt:
        if isinstance(asked.content, str):
            ids = self.tokenizer.encode(
                asked.content,
                add_special_tokens=asked.add_special,
                parse_special=asked.parse_special,
            )
        else:
            ids = _checked(asked.content)
        return Prompt(ids, num_context=min(len(ids), NUM_CONTEXT_TOKENS))


def _text_of(asked: Asked) -> str | None:
    if isinstance(asked, Conversation):
        return "\n\n".join([asked.text, *_arguments_of(asked)])
    return asked.content if isinstance(asked, Text) and isinstance(asked.content, str) else None


def _arguments_of(asked: Conversation) -> Iterator[str]:
    """The arguments of earlier calls, as text."""
    for message in asked.messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping):
                found = function.get("arguments")
                yield found if isinstance(found, str) else json.dumps(found, default=str)


def _checked(token_ids: Sequence[int]) -> list[int]:
    try:
        return [index(token_id) for token_id in token_ids]
    except TypeError as error:
        message = f"a prompt must be a text or a list of token ids ({error})"
        raise RequestError(message, param="prompt") from error
