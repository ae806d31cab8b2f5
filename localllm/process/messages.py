"""Messages that every process of localllm may send."""

from dataclasses import dataclass

from localllm.errors import LocalLLMError


@dataclass(frozen=True, slots=True)
class Failed:
    """What was asked for is not to be had."""

    error: LocalLLMError
