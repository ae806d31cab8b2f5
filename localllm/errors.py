"""All exceptions of localllm, and the table of exit codes."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of all commands; a test compares docs/exit-codes.md with this table."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    MODEL = 3
    NETWORK = 4
    DISK = 5
    MEMORY = 6
    CHECKPOINT = 7
    CONTEXT = 8
    LENGTH = 9
    QUALITY = 10
    SIGINT = 130
    CLOSED_PIPE = 141
    SIGTERM = 143

    @property
    def meaning(self) -> str:
        """The meaning in a few words, as in the documentation."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.OK: "ok",
    ExitCode.FAILURE: "other failure",
    ExitCode.USAGE: "wrong usage: a flag, a value, a path, or input that is not text",
    ExitCode.MODEL: "model unknown, gated or not authorised",
    ExitCode.NETWORK: "network failure, or offline and not downloaded",
    ExitCode.DISK: "disk full, no permission, or a file that is damaged on every attempt",
    ExitCode.MEMORY: "no usable GPU, or not enough memory",
    ExitCode.CHECKPOINT: "checkpoint, config or chat template that is broken or not supported",
    ExitCode.CONTEXT: "prompt longer than the context",
    ExitCode.LENGTH: "answer cut by the token limit, with `--fail-on-length` or a required format",
    ExitCode.QUALITY: "quality below the requested threshold",
    ExitCode.SIGINT: "Ctrl-C",
    ExitCode.CLOSED_PIPE: "the reader of stdout has gone (as after `| head -1`)",
    ExitCode.SIGTERM: "terminated",
}


class LocalLLMError(Exception):
    """An error caused by a user, a file or a client.

    `message` says what happened, `where` adds the place or the reason, `hint` is the next step;
    the command line prints them as three lines.
    """

    exit_code = ExitCode.FAILURE

    def __init__(
        self,
        message: str,
        *,
        where: str = "",
        hint: str = "",
        exit_code: ExitCode | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint
        if exit_code is not None:
            self.exit_code = exit_code

    def __str__(self) -> str:
        parts = (self.message, self.where, f"try: {self.hint}" if self.hint else "")
        return "\n  ".join(part for part in parts if part)


class CatalogError(LocalLLMError):
    """An unknown model name, or an unreadable catalogue."""

    exit_code = ExitCode.MODEL


class DownloadError(LocalLLMError):
    """A repository cannot be downloaded; the exit code says why (3, 4 or 5)."""

    exit_code = ExitCode.NETWORK


class CheckpointError(LocalLLMError):
    """A file of a model is missing, broken or contradicts another one."""

    exit_code = ExitCode.CHECKPOINT


class UnsupportedModelError(CheckpointError):
    """The checkpoint is sound, but its kind is not supported."""


class TemplateError(CheckpointError):
    """A chat template cannot be rendered, or rejects the conversation."""


class DiskError(LocalLLMError):
    """A path cannot be written: no space is left, or another process is using it."""

    exit_code = ExitCode.DISK


class GpuMemoryError(LocalLLMError):
    """The weights and the smallest KV cache do not fit."""

    exit_code = ExitCode.MEMORY


class BackendError(LocalLLMError):
    """The requested device or kernels are not available here."""

    exit_code = ExitCode.MEMORY


class DeviceError(LocalLLMError):
    """The GPU reported an error, and this process can compute nothing more on it."""


class RequestError(LocalLLMError):
    """One request is malformed; `param` names the field."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, *, param: str = "", where: str = "", hint: str = "") -> None:
        super().__init__(message, where=where, hint=hint)
        self.param = param


class BusyError(RequestError):
    """A resource that the request needs is in use by others for now."""

    exit_code = ExitCode.FAILURE


class StepMemoryError(RequestError):
    """Memory ran out while one request was computed."""

    exit_code = ExitCode.MEMORY


class ContextLengthError(RequestError):
    """The prompt is longer than the context."""

    exit_code = ExitCode.CONTEXT


def brief(value: object) -> str:
    """A value for an error message, kept short even if the input is hostile."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print much larger ones
    if isinstance(value, memoryview):
        value = value[:40].tolist()
    try:
        return repr(value)[:80]
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"
