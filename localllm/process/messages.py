"""Messages that every process of localllm may send."""

from dataclasses import dataclass

from localllm.errors import LocalLLMError


@dataclass(frozen=True, slots=True)
class Failed:
    """A request could not be carried out."""

    error: LocalLLMError
