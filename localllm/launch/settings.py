"""What points a program at a server: its command, variables, and files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_PORT = 8000


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server: `url` without a path; `key`: empty if it needs none."""

    url: str
    model: str
    context_length: int
    key: str = ""

    @property
    def shown_key(self) -> str:
        """A key for programs that want one whether the server does or not."""
        return self.key or "localllm"


@dataclass(frozen=True, slots=True)
class FileChange:
    """What a file is to hold. `is_own`: it is localllm's; all others are not written without a
    question. `text`: None if the file as it is cannot be added to; `addition`: what is new in it.
    """

    path: Path
    text: str | None
    addition: str
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """How a program is started."""

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[FileChange] = ()
