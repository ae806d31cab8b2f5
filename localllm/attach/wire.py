"""What an engine is told and says, as values of the messages in `frames`."""

from dataclasses import asdict
from typing import Any

from localllm.answer.completion import TextEvent, TokenInfo
from localllm.engine.config import EngineConfig
from localllm.engine.request import FinishReason, TokenLogprobs
from localllm.engine.sampling_params import SamplingParams
from localllm.engine.speculation_config import SpeculationConfig
from localllm.errors import LocalLLMError, RequestError
from localllm.process.frames import Message, error_from_wire, error_to_wire
from localllm.text.grammar import Grammar


def config_to_wire(config: EngineConfig) -> Message:
    """See `config_from_wire`."""
    return asdict(config)


def config_from_wire(raw: Message) -> EngineConfig:
    """The configuration that `config_to_wire` was given."""
    return EngineConfig(**{**raw, "speculation": SpeculationConfig(**raw["speculation"])})


def params_to_wire(params: SamplingParams) -> Message:
    """See `params_from_wire`."""
    return asdict(params) | {"logit_bias": dict(params.logit_bias)}


def params_from_wire(raw: Message) -> SamplingParams:
    """The parameters that `params_to_wire` was given."""
    grammar = raw["grammar"]
    return SamplingParams(**{**raw, "grammar": None if grammar is None else Grammar(**grammar)})


def event_to_wire(event: TextEvent, request_id: int) -> list[Any]:
    """An event under the front's number of its request."""
    token = event.token
    logprobs = None if token is None or token.logprobs is None else token.logprobs
    return [
        request_id,
        event.sample,
        event.text,
        event.thinking,
        None if token is None else [token.token_id, token.is_draft],
        None if logprobs is None else [logprobs.logprob, [list(pair) for pair in logprobs.top]],
        event.finish_reason,
        None if event.error is None else error_to_wire(event.error),
        event.num_cached_tokens,
        event.num_drafted_tokens,
        event.time_s,
        event.stop_string,
    ]


def event_from_wire(raw: list[Any]) -> TextEvent:
    """The event that `event_to_wire` was given."""
    request_id, sample, text, thinking, token, logprobs, reason, error, *rest = raw
    cached, drafted, at, stop = rest
    values = None
    if logprobs is not None:
        values = TokenLogprobs(logprobs[0], tuple((pair[0], pair[1]) for pair in logprobs[1]))
    found = None if error is None else error_from_wire(error)
    return TextEvent(
        request_id=request_id,
        sample=sample,
        text=text,
        thinking=thinking,
        token=None if token is None else TokenInfo(token[0], values, token[1]),
        finish_reason=None if reason is None else FinishReason(reason),
        error=found if isinstance(found, RequestError) or found is None else _as_request(found),
        num_cached_tokens=cached,
        num_drafted_tokens=drafted,
        time_s=at,
        stop_string=stop,
    )


def _as_request(error: LocalLLMError) -> RequestError:
    return RequestError(error.message, where=error.where, hint=error.hint)
