"""A worker's jobs with a model's tokenizer and chat template; see DelegatedTokenizer."""

import json
from pathlib import Path

from localllm.text.prompt import Conversation
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
        case EncodeChat(told):
            return ChatPrompt(tokenizer.encode_chat(_read(told)))
        case RenderChat(told):
            return Rendered(text_to_bytes(tokenizer.render_chat(_read(told))))
    raise ValueError(f"not a text: {type(work).__name__}")


def _read(told: bytes) -> Conversation:
    """Raises: ValueError, TypeError."""
    return Conversation(**json.loads(bytes_to_text(told)))
