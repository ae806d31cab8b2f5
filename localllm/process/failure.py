"""An error in the form that is sent to another process."""

from dataclasses import dataclass
from typing import Annotated

from localllm import errors
from localllm.errors import ExitCode, LocalLLMError, RequestError
from localllm.process.limits import AtMost, Within

# Of each of its texts: the message of a template, for example, is as long as its author likes.
_MAX_CHARS = 1 << 16
_KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, LocalLLMError)
}
_Told = Annotated[str, AtMost(_MAX_CHARS)]


@dataclass(frozen=True, slots=True)
class Failure:
    """What is sent of an error; `kind` is the name of its class."""

    kind: Annotated[str, AtMost(64)]
    message: _Told
    where: _Told
    hint: _Told
    param: _Told
    code: Annotated[int, Within(0, 255)]

    @classmethod
    def of(cls, error: LocalLLMError) -> "Failure":
        """An error whose class is not in `errors` is sent as the nearest base class that is."""
        kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in _KINDS)
        return cls(
            kind=kind,
            message=_told(error.message),
            where=_told(error.where),
            hint=_told(error.hint),
            param=_told(error.param) if isinstance(error, RequestError) else "",
            code=int(error.exit_code),
        )

    def error(self) -> LocalLLMError:
        """The error that this was made from. Raises: ValueError if there is no such error."""
        kind = _KINDS.get(self.kind)
        if kind is None:
            raise ValueError(f"not a kind of error: {self.kind!r}")
        error = kind(self.message, where=self.where, hint=self.hint)
        error.exit_code = ExitCode(self.code)
        if isinstance(error, RequestError):
            error.param = self.param
        return error


def _told(text: str) -> str:
    return text[:_MAX_CHARS].encode(errors="replace").decode()
