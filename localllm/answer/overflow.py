"""What happens when a conversation no longer fits into the context; the user is always told."""

from typing import Literal, get_args

from localllm.errors import ContextLengthError

OverflowPolicy = Literal["error", "drop-oldest"]
OVERFLOW_POLICIES: tuple[OverflowPolicy, ...] = get_args(OverflowPolicy)

# The context length of a server that does not report it; no conversation fills it.
UNKNOWN_CONTEXT = 1 << 30
# Share of the context from which on the user is warned.
WARNED_SHARE = 0.8
# Share of the context that dropping turns frees for an answer whose length is not limited.
_RESERVED_SHARE = 0.25


def answer_reserve(context_length: int, max_tokens: int | None) -> int:
    """Tokens of the context reserved for the answer when turns are dropped."""
    if max_tokens is not None:
        return min(max_tokens, context_length // 2)
    return max(1, int(context_length * _RESERVED_SHARE))


def with_way_out(
    error: ContextLengthError, longer_context: str, *, fits_alone: bool
) -> ContextLengthError:
    """The same error, with what a conversation can do about it.

    `longer_context`: how to get a longer context; `fits_alone`: whether the question would fit
    without the turns before it.
    """
    if not fits_alone:
        return error
    return ContextLengthError(
        error.message,
        param=error.param,
        where=error.where,
        hint=f"/compact, {longer_context}, or start with --overflow drop-oldest",
    )
