"""Limits on what a client may ask for. One table: routes, engine and `localllm limits` read it."""

import resource
from dataclasses import dataclass, fields

from localllm.schedule.sampling_params import (
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROBS,
    MAX_NUM_SAMPLES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
)
from localllm.text.grammar import (
    MAX_GRAMMAR_BYTES,
    MAX_GRAMMAR_QUEUE_SECONDS,
    MAX_GRAMMAR_SECONDS,
    MAX_RULES,
    MAX_SCHEMA_DEPTH,
    MAX_SCHEMA_OBJECTS,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes, counts and seconds. Prompt tokens are limited by the model's context."""

    body_bytes: int = 8 << 20
    header_bytes: int = 16 << 10
    # For a request's headers to arrive, and for a client to read some of what is sent to it.
    idle_seconds: int = 30
    # For all of a body to arrive; the bytes that all bodies may hold, and those of one key; the
    # values of a body's JSON, and the names in its objects.
    body_seconds: int = 30
    bodies_bytes: int = 128 << 20
    bodies_bytes_of_a_key: int = 32 << 20
    json_values: int = 1 << 18
    json_names: int = 1 << 15
    argument_levels: int = 128
    # Or fewer, if the system allows a process fewer open files.
    connections: int = 1024
    messages: int = 2048
    content_parts: int = 256
    prompts: int = 64
    embeddings: int = 2048
    samples: int = MAX_NUM_SAMPLES
    stop_strings: int = MAX_STOP_STRINGS
    stop_chars: int = MAX_STOP_CHARS
    logit_bias_entries: int = MAX_LOGIT_BIAS_ENTRIES
    logprobs: int = MAX_LOGPROBS
    # Of an answer without a limit of its own; the rest of the context may be less.
    answer_tokens: int = 16384
    tools: int = 128
    template_options: int = 32
    choices: int = 1000
    grammar_bytes: int = MAX_GRAMMAR_BYTES
    grammar_rules: int = MAX_RULES
    schema_levels: int = MAX_SCHEMA_DEPTH
    schema_objects: int = MAX_SCHEMA_OBJECTS
    grammar_seconds: int = MAX_GRAMMAR_SECONDS
    grammar_queue_seconds: int = MAX_GRAMMAR_QUEUE_SECONDS
    requests: int = 256
    requests_of_a_key: int = 64
    # Of answers that are kept for later requests: all of them, and since one was used last.
    kept_bytes: int = 256 << 20
    kept_days: int = 30

    def connections_here(self) -> int:
        """As many connections as the system's limit on open files allows, at most `connections`.

        Raises the limit of this process as far as allowed.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = self.connections + _OTHER_FILES
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            return max(_LEAST_CONNECTIONS, min(self.connections, soft - _OTHER_FILES))
        return self.connections

    def rows(self) -> list[tuple[str, int]]:
        """Names and values, for display."""
        return [(each.name.replace("_", " "), getattr(self, each.name)) for each in fields(self)]


# Open files besides connections: some ten, and room for bursts of connections that are closed at
# once.
_OTHER_FILES, _LEAST_CONNECTIONS = 48, 8

LIMITS = Limits()
