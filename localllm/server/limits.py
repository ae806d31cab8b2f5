"""What a client may ask for at most. One table: routes, engine and `localllm limits` read it."""

from dataclasses import dataclass, fields

from localllm.config import (
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROBS,
    MAX_NUM_SAMPLES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
)
from localllm.grammar import MAX_GRAMMAR_BYTES, MAX_RULES, MAX_SCHEMA_DEPTH, MAX_SCHEMA_OBJECTS
from localllm.untrusted.grammar_trials import TRIAL_S


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes, counts and seconds. Prompt tokens are limited by the model's context."""

    body_bytes: int = 8 << 20
    header_bytes: int = 16 << 10
    # For a request to arrive in, and for a client to take what is sent to it.
    idle_seconds: int = 30
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
    tools: int = 64
    choices: int = 1000
    grammar_bytes: int = MAX_GRAMMAR_BYTES
    grammar_rules: int = MAX_RULES
    schema_levels: int = MAX_SCHEMA_DEPTH
    schema_objects: int = MAX_SCHEMA_OBJECTS
    grammar_seconds: float = TRIAL_S
    grammar_queue_seconds: int = 5
    requests: int = 256
    requests_of_a_key: int = 64

    def rows(self) -> list[tuple[str, float]]:
        """Names and values, for people."""
        return [(each.name.replace("_", " "), getattr(self, each.name)) for each in fields(self)]


LIMITS = Limits()
