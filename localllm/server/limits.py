"""What a client may ask for at most. One table: routes, engine and `localllm limits` read it."""

from dataclasses import dataclass, fields

from localllm.config import (
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROBS,
    MAX_NUM_SAMPLES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes, counts and seconds. Prompt tokens are limited by the model's context."""

    body_bytes: int = 8 << 20
    messages: int = 2048
    content_parts: int = 64
    prompts: int = 64
    samples: int = MAX_NUM_SAMPLES
    stop_strings: int = MAX_STOP_STRINGS
    stop_chars: int = MAX_STOP_CHARS
    logit_bias_entries: int = MAX_LOGIT_BIAS_ENTRIES
    logprobs: int = MAX_LOGPROBS
    # Of an answer whose length nobody has limited; the rest of the context may be less.
    answer_tokens: int = 16384
    requests: int = 256
    requests_of_a_key: int = 64

    def rows(self) -> list[tuple[str, int]]:
        """Names and values, for people."""
        return [(each.name.replace("_", " "), getattr(self, each.name)) for each in fields(self)]


LIMITS = Limits()
