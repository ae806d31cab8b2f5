"""Texts and conversations as prompts of a model: its tokenizer, its template, its context."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from localllm.errors import ContextLengthError, RequestError
from localllm.text.prompt import ChatMessage, Prompt, ThinkLevel
from localllm.text.tokenizer import Tokenizer

# Enough for whatever a token's text may depend on before it.
NUM_CONTEXT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """Writes prompts for a model with `tokenizer`.

    `context_length`: tokens of prompt and answer; `longer_context`: what a user can do for more.
    """

    tokenizer: Tokenizer
    context_length: int
    longer_context: str

    def text(self, prompt: str | Sequence[int], *, parse_special: bool = False) -> Prompt:
        """A prompt that is completed as it stands, with the tokenizer's own start token.

        Special-token text in it is plain text unless `parse_special`. Raises: RequestError.
        """
        if isinstance(prompt, str):
            self.check_length(prompt)
            ids = self.tokenizer.encode(
                prompt, add_special_tokens=True, parse_special=parse_special
            )
        else:
            try:
                ids = [index(token_id) for token_id in prompt]
            except TypeError as error:
                raise RequestError(
                    f"a prompt is a text or whole numbers ({error})", param="prompt"
                ) from error
        return Prompt(ids, num_context=min(len(ids), NUM_CONTEXT_TOKENS))

    def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        think: ThinkLevel | None = None,
        parse_special: bool = False,
        **variables: Any,
    ) -> Prompt:
        """A conversation; a model without a template completes the messages' text.

        Raises: TemplateError, RequestError.
        """
        text = "\n\n".join(str(message.get("content") or "") for message in messages)
        if not self.tokenizer.has_chat_template:
            return self.text(text, parse_special=parse_special)
        self.check_length(text)
        return self.tokenizer.encode_chat(
            messages, tools, think=think, parse_special=parse_special, **variables
        )

    def check_length(self, text: str) -> None:
        """Raises: ContextLengthError early, for a text that is far too long to be encoded whole."""
        limit = self.context_length
        if len(text) > 64 * limit:
            num_tokens = self.tokenizer.count_at_least(text, limit)
            if num_tokens > limit:
                raise ContextLengthError(
                    f"the prompt has over {num_tokens:,} tokens, the context {limit:,}",
                    param="prompt",
                    hint=f"a shorter prompt, or {self.longer_context}",
                )
