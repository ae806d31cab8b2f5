"""A worker's jobs with a model's tokenizer and chat template; see DelegatedTokenizer."""

import json
from pathlib import Path
from typing import Any

from localllm.text.tokenizer import Tokenizer
from localllm.untrusted.messages import (
    ChatPrompt,
    CountTokens,
    EncodeChat,
    EncodeText,
    Jobs,
    OpenTexts,
    RenderChat,
    Rendered,
    TextResult,
    TokenCount,
    TokenIds,
    Work,
    bytes_to_text,
    text_to_bytes,
)


def open_text_jobs(opening: OpenTexts) -> Jobs:
    """A function that does the jobs, with the tokenizer of a folder. Raises: CheckpointError."""
    tokenizer = Tokenizer.from_folder(Path(opening.folder), opening.fallback_template)
    return lambda work: run_text_job(tokenizer, work)


def run_text_job(tokenizer: Tokenizer, work: Work) -> TextResult:
    """Encode, count or render, as DelegatedTokenizer asks.

    Raises: RequestError, TemplateError; ValueError or TypeError for work it would not ask for.
    """
    match work:
        case EncodeText(text, add_special_tokens, parse_special):
            ids = tokenizer.encode(
                bytes_to_text(text),
                add_special_tokens=add_special_tokens,
                parse_special=parse_special,
            )
            return TokenIds(tuple(ids))
        case CountTokens(text, limit):
            return TokenCount(tokenizer.count_at_least(bytes_to_text(text), limit))
        case EncodeChat(conversation, think, parse_special):
            messages, tools, variables = _read(conversation)
            prompt = tokenizer.encode_chat(
                messages, tools, think=think, parse_special=parse_special, **variables
            )
            return ChatPrompt(prompt)
        case RenderChat(conversation, think):
            messages, tools, variables = _read(conversation)
            rendered = tokenizer.render_chat(messages, tools, think=think, **variables)
            return Rendered(text_to_bytes(rendered))
    raise ValueError(f"not a text: {type(work).__name__}")


def _read(conversation: bytes) -> Any:
    """The conversation's messages, its tools and the template's variables."""
    return json.loads(bytes_to_text(conversation))
