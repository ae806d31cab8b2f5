"""The Python API: `LLM(model).generate(...)`, `.chat(...)`, `.stream(...)`."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from os import PathLike, fspath
from typing import Any

from localllm.answer.answers_bar import answers_bar
from localllm.answer.completion import Completion
from localllm.answer.loaded_model import LoadedModel
from localllm.answer.opening import open_model
from localllm.engine.config import EngineConfig
from localllm.errors import RequestError, brief
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.prompt import Asked, Conversation, Text

TextOrIds = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
# Tokens of an answer where nobody says how many: of a continued text, which may never end by
# itself, and of an answer in a conversation, which may begin with thoughts.
DEFAULT_TEXT_TOKENS, DEFAULT_CHAT_TOKENS = 256, 2048
# Fields that are not the user's.
_OWN = ("given", "pooling")


class LLM:
    """A loaded model. `model` is an alias, `org/name`, a folder, or None for the built-in one.

    Options are the fields of EngineConfig; an unknown one is refused by name. Use an LLM from one
    thread at a time. `close`, or the end of a `with`, saves what `cache_disk_bytes` keeps.

    Everything that asks takes SamplingParams, or their fields as keywords, which override the
    model's own defaults. An answer without `max_tokens` ends after 256 tokens of text, or 2,048
    tokens in a conversation. `progress`: whether a bar shows on stderr; None: if it is a terminal.
    """

    def __init__(self, model: str | PathLike[str] | None = None, **options: Any) -> None:
        _check_names("LLM", options, EngineConfig)
        config = EngineConfig(**options)
        self.model: LoadedModel = open_model(None if model is None else fspath(model), config)

    def close(self) -> None:
        """End all requests, and save the cached prefixes."""
        self.model.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def sampling_params(self, **given: Any) -> SamplingParams:
        """The model's own defaults, overridden by `given`. Raises: RequestError."""
        _check_names("sampling_params", given, SamplingParams)
        return self.model.sampling_params(**given)

    def generate(
        self,
        prompts: TextOrIds | Iterable[TextOrIds],
        params: SamplingParams | None = None,
        *,
        progress: bool | None = None,
        **given: Any,
    ) -> list[Completion]:
        """Complete prompts (texts or token ids) together; one completion each, in order.

        A refused prompt has `error` set. Raises: RequestError for parameters.
        """
        params = self._params("generate", params, given, DEFAULT_TEXT_TOKENS)
        several: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        if several and _is_integer(several[0]):
            several = [several]
        return self._complete([Text(each) for each in several], params, progress)

    def chat(
        self,
        messages: str | Mapping[str, Any] | Messages | Sequence[str | Messages],
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        progress: bool | None = None,
        **given: Any,
    ) -> list[Completion]:
        """Answer one conversation, or several together; one completion each, in order.

        A string, and a single message, is a conversation. Raises: RequestError for parameters.
        """
        params = self._params("chat", params, given, DEFAULT_CHAT_TOKENS)
        is_one = isinstance(messages, (str, Mapping))
        several: list[Any] = [messages] if is_one else list(messages)
        if several and not is_one and isinstance(several[0], Mapping):
            several = [several]
        return self._complete([_conversation(each, tools) for each in several], params, progress)

    def stream(
        self,
        prompt: TextOrIds | Mapping[str, Any] | Messages,
        params: SamplingParams | None = None,
        **given: Any,
    ) -> Iterator[str]:
        """Pieces of the answer to a prompt or a conversation, as they come.

        Closing the iterator stops the work. Raises: RequestError.
        """
        is_said = isinstance(prompt, Mapping) or (
            len(prompt) > 0 and isinstance(prompt[0], Mapping)
        )
        limit = DEFAULT_CHAT_TOKENS if is_said else DEFAULT_TEXT_TOKENS
        params = self._params("stream", params, given or {"n": 1}, limit)
        asked = _conversation(prompt, None) if is_said else Text(prompt)  # type: ignore[arg-type]
        return self._pieces(asked, params)

    def _pieces(self, asked: Asked, params: SamplingParams) -> Iterator[str]:
        _, events = self.model.ask(asked, params)
        try:
            for event in events:
                if event.error is not None:
                    raise event.error
                if event.text:
                    yield event.text
        finally:
            events.close()

    def _complete(
        self, asked: Sequence[Asked], params: SamplingParams, progress: bool | None
    ) -> list[Completion]:
        with answers_bar(is_shown=progress) as watch:
            return self.model.complete(asked, params, watch)

    def _params(
        self, method: str, params: SamplingParams | None, given: dict[str, Any], limit: int
    ) -> SamplingParams:
        """What the user gave, with a limit. Raises: RequestError."""
        if params is None:
            _check_names(method, given, SamplingParams)
            params = self.model.sampling_params(**given)
        elif not isinstance(params, SamplingParams):
            raise RequestError(
                f"{method}: params must be SamplingParams, found {brief(params)}",
                param="params",
                hint=f"llm.{method}(..., max_tokens=100), or SamplingParams(max_tokens=100)",
            )
        elif given and given != {"n": 1}:
            raise RequestError(
                f"{method}: give either params or {', '.join(given)}, not both",
                param="params",
                hint="SamplingParams with all of them",
            )
        return params if params.max_tokens is not None else replace(params, max_tokens=limit)


def _check_names(method: str, given: Mapping[str, Any], kind: type) -> None:
    """Raises: RequestError for a name that is no field of `kind`, with those that are."""
    known = [field.name for field in fields(kind) if field.name not in _OWN]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise RequestError(
                f"{method}: there is no {name!r:.60}"
                + (f"; did you mean {near[0]}?" if near else ""),
                param=name,
                where=f"known: {', '.join(known)}",
                hint=f"llm.{method}(..., {near[0]}=...)"
                if near and method != "LLM"
                else "one of these",
            )


def _conversation(said: Any, tools: Sequence[Mapping[str, Any]] | None) -> Conversation:
    """A string is one message of the user's, and one message a conversation."""
    if isinstance(said, str):
        said = {"role": "user", "content": said}
    return Conversation([said] if isinstance(said, Mapping) else said, tools)


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__")  # numpy's integers too
