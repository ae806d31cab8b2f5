"""Error replies, in the terms of OpenAI and Anthropic, and which one an error is told by."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from localllm.attach.engine_client import EngineDownError, QueueFullError
from localllm.errors import (
    BusyError,
    ContextLengthError,
    LocalLLMError,
    RequestError,
    StepMemoryError,
    TemplateError,
)
from localllm.server.limits import LIMITS


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error reply, in OpenAI's terms."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def content(self) -> dict[str, Any]:
        """The body of the reply."""
        told = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": told}

    def content_at(self, path: str) -> dict[str, Any]:
        """The body of the reply to a request for `path`: Anthropic's API has errors of its own.

        Source: Anthropic's API reference, "Errors".
        """
        if not is_anthropic(path):
            return self.content
        kind = "invalid_request_error" if self.status < 500 else "api_error"
        message = self.message
        if self.code == "context_length_exceeded":
            message = (
                f"prompt is too long: {message}"  # by which agents know that it is time to cut
            )
        told = {"type": _ANTHROPIC_KINDS.get(self.status, kind), "message": message}
        return {"type": "error", "error": told}


_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def busy(message: str) -> Refusal:
    """The refusal for too many requests at once."""
    kind, code = "rate_limit_error", "rate_limit_exceeded"
    return Refusal(429, message, kind, code, headers={"Retry-After": "1"})


def busy_key() -> Refusal:
    """The refusal of a key that has as many requests as it may have."""
    return busy("this key has too many requests at once")


def too_large() -> Refusal:
    """The refusal of a body that is too large."""
    return Refusal(413, f"the body is larger than {LIMITS.body_bytes:,} bytes")


class RefusedError(Exception):
    """The request is answered with a refusal."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def refusal_of(error: LocalLLMError, param: str | None = None) -> Refusal:
    """The refusal for an error, with a fitting status."""
    message = "; ".join(part for part in (error.message, error.where, error.hint) if part)
    match error:
        case ContextLengthError():
            code = "context_length_exceeded"
            return Refusal(400, message, code=code, param=param or error.param or None)
        case BusyError():
            later = {"Retry-After": "2"}
            return Refusal(503, message, "server_error", "overloaded", headers=later)
        case StepMemoryError():
            return Refusal(503, message, "server_error", "out_of_memory")
        case RequestError():
            return Refusal(400, message, param=error.param or param)
        case TemplateError():
            return Refusal(400, message, code="template_error", param=param)
        case QueueFullError():
            return busy(message)
        case EngineDownError():
            return Refusal(
                503, message, "server_error", "engine_down", headers={"Retry-After": "2"}
            )
    return Refusal(500, message, "server_error")


@contextmanager
def refusing(kind: type[LocalLLMError] = LocalLLMError, param: str | None = None) -> Iterator[None]:
    """Errors of that kind within it refuse the request; `param`: the field at fault."""
    try:
        yield
    except kind as error:
        raise RefusedError(refusal_of(error, param)) from error


def invalid(message: str, param: str) -> RefusedError:
    """The refusal of an invalid field, to be raised."""
    return RefusedError(Refusal(400, message, param=param))


# Errors that say that a value is of another kind; of a value that may be of several, those that say
# more are of the kind that it is.
_OTHER_KIND = ("_type", "literal_error", "none_required", "is_instance_of", "model_attributes_type")


def describe_invalid(error: ValidationError, body: bytes) -> Refusal:
    """The refusal of an invalid body: its first error, on one line."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        told = None
    placed = [(_place(each["loc"], told, each["type"]), each) for each in found]
    place, first = placed[0]
    # If a value could be read in several ways, each has errors, behind one another.
    alike = [each for each in placed if each[0][: len(place)] == place]
    place, first = max(alike, key=lambda each: _fits(*each))
    said = str(first["msg"]).removeprefix("Value error, ")
    at = ".".join(place)
    message = f"{at}: {said}" if at else said
    return Refusal(
        400,
        f"{message:.500}",
        code=first["type"] if first["type"] == "unsupported_modality" else None,
        param=place[0] if place else None,
    )


def _fits(place: tuple[str, ...], error: ErrorDetails) -> tuple[bool, bool, int]:
    """How well an error tells what is wrong; of equal ones, the first."""
    kind = error["type"]
    return kind == "unsupported_modality", not kind.endswith(_OTHER_KIND), len(place)


def _place(loc: tuple[int | str, ...], told: Any, kind: str) -> tuple[str, ...]:
    """Where in the body an error is, without the names of the ways to read a value."""
    place = list[str]()
    for number, part in enumerate(loc):
        is_missing = kind == "missing" and number == len(loc) - 1
        is_name = isinstance(told, dict) and part in told
        is_index = isinstance(told, list) and isinstance(part, int) and part < len(told)
        if is_name or is_index:
            told = told[part]
        if is_name or is_index or is_missing:
            place.append(str(part))
    return tuple(place)


def as_response(refusal: Refusal, path: str) -> JSONResponse:
    """A refusal as the response to a request for `path`."""
    return JSONResponse(refusal.content_at(path), refusal.status, refusal.headers)
