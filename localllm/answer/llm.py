"""The Python API: `LLM(model).generate(...)`, `.chat(...)`, `.stream(...)`."""

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from localllm.answer.completion import Completion
from localllm.answer.loaded_model import LoadedModel
from localllm.answer.opening import open_model
from localllm.engine.config import EngineConfig
from localllm.engine.sampling_params import SamplingParams
from localllm.errors import RequestError
from localllm.text.prompt import Conversation, Text

TextOrIds = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A loaded model. `model` is an alias, `org/name`, a folder, or None for the built-in one.

    Options are the fields of EngineConfig; an unknown one is refused by name. Use an LLM from one
    thread at a time. `close`, or the end of a `with`, saves what `cache_disk_bytes` keeps.
    """

    def __init__(self, model: str | PathLike[str] | None = None, **options: Any) -> None:
        try:
            config = EngineConfig(**options)
        except TypeError as error:
            raise RequestError(f"LLM: {error}", hint="the fields of EngineConfig") from error
        self.model: LoadedModel = open_model(None if model is None else fspath(model), config)

    def close(self) -> None:
        """End all requests, and save the cached prefixes."""
        self.model.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def sampling_params(self, **given: Any) -> SamplingParams:
        """The model's own defaults, overridden by `given`."""
        return self.model.sampling_params(**given)

    def generate(
        self, prompts: TextOrIds | Sequence[TextOrIds], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Complete prompts (texts or token ids) together; one completion each, in order.

        Without `params`, the model's defaults apply. A refused prompt has `error` set.
        """
        params = params or self.sampling_params()
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and _is_integer(prompts[0]))
        several: Sequence[Any] = [prompts] if is_one else prompts
        return self.model.complete([Text(each) for each in several], params)

    def chat(
        self,
        messages: str | Messages | Sequence[Messages],
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Completion]:
        """Answer one conversation, or several together; one completion each, in order. A string is
        a conversation of one message.
        """
        params = params or self.sampling_params()
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        several: Sequence[Any] = [messages] if is_one else messages
        return self.model.complete([Conversation(each, tools) for each in several], params)

    def stream(
        self, prompt: TextOrIds | Messages, params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Pieces of the answer to a prompt or a conversation, as they come.

        Closing the iterator stops the work. Raises: RequestError.
        """
        params = params or self.sampling_params(n=1)
        is_conversation = len(prompt) > 0 and isinstance(prompt[0], Mapping)
        asked = Conversation(prompt) if is_conversation else Text(prompt)  # type: ignore[arg-type]
        _, events = self.model.ask(asked, params)
        try:
            for event in events:
                if event.error is not None:
                    raise event.error
                if event.text:
                    yield event.text
        finally:
            events.close()


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__")  # numpy's integers too
