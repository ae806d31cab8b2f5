"""Turns errors into refusals with a fitting status."""

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from localllm.attach.engine_client import EngineDownError, QueueFullError
from localllm.errors import (
    BusyError,
    ContextLengthError,
    LocalLLMError,
    RequestError,
    StepMemoryError,
    TemplateError,
)
from localllm.server.guard import Refusal, busy


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


def invalid(message: str, param: str) -> RefusedError:
    """The refusal of an invalid field, to be raised."""
    return RefusedError(Refusal(400, message, param=param))


def describe_invalid(error: ValidationError) -> Refusal:
    """The refusal of an invalid body: its first error, on one line."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # If a value could be read in several ways, each has an error; this one is the most helpful.
    first = next((each for each in found if each["type"] == "unsupported_modality"), found[0])
    # Without the names of types that a value could have been read as.
    place = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
    said = str(first["msg"]).removeprefix("Value error, ")
    message = f"{place}: {said}" if place else said
    return Refusal(
        400,
        f"{message:.500}",
        code=first["type"] if first["type"] == "unsupported_modality" else None,
        param=str(first["loc"][0]) if first["loc"] else None,
    )


def as_response(refusal: Refusal, path: str) -> JSONResponse:
    """A refusal as the response to a request for `path`."""
    return JSONResponse(refusal.content_at(path), refusal.status, refusal.headers)
