"""Conversations as files: `/export`, `/load FILE`, and `localllm sessions export` and `import`."""

from pathlib import Path

from localllm.chat.transcript import Transcript
from localllm.cli.draw.files import write_new_file
from localllm.errors import RequestError


def export_transcript(transcript: Transcript, path: Path) -> None:
    """Write a conversation to a new `.md` or `.json` file. Raises: RequestError, DiskError."""
    if path.suffix not in (".md", ".json"):
        raise RequestError(
            "the path must end in .md or .json", param="path", hint="a name such as chat.md"
        )
    is_json = path.suffix == ".json"
    write_new_file(path, transcript.to_json() if is_json else transcript.to_markdown())


def read_transcript(path: Path) -> Transcript:
    """The conversation in a `.json` file. Raises: RequestError."""
    try:
        return Transcript.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{path.name} is not a conversation: {error!s:.200}",
            param="path",
            hint="a .json file written by /export",
        ) from error
