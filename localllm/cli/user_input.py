"""Prompts from stdin, files and arguments: bytes from anywhere to one clean text."""

import sys
from pathlib import Path

from localllm.cli.output import is_terminal, note, show_controls
from localllm.errors import ContextLengthError, ExitCode, LocalLLMError, RequestError

MAX_INPUT_BYTES = 64 << 20
SNIFFED_BYTES = 8192
# Of the sniffed bytes; text has hardly any control characters, programs and pictures a third.
MAX_BINARY_SHARE = 0.1
_TEXT_CONTROLS = frozenset("\t\n\r\f\b\x1b")


def gather_prompt(prompt: str | None, files: str = "") -> str | None:
    """Stdin (if piped), the text of files and the prompt argument, in this order, a blank line
    between.

    None where all of them are absent or empty.

    Raises: RequestError for binary input; ContextLengthError over 64 MiB.
    """
    # As other programs have it, "-" is stdin, which is read anyway.
    parts = [_read_stdin(), files, "" if prompt in (None, "-") else prompt]
    present = [part for part in parts if part.strip()]
    if len(present) == 1 and present[0] == prompt:
        return prompt  # to the letter: nothing was joined to it
    return "\n\n".join(part.strip("\n") for part in present) or None


def decode_text(data: bytes, name: str) -> str:
    """UTF-8 without byte-order mark, line ends as `\\n`; bad bytes replaced with one warning.

    Raises: RequestError for what looks binary.
    """
    if looks_binary(data[:SNIFFED_BYTES]):
        raise RequestError(f"{name} looks binary, not like text", hint="convert it to text first")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("utf-8-sig", errors="replace")
        note(f"warning: {show_controls(name)} is not valid UTF-8; bad bytes are replaced")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_stdin() -> str:
    if sys.stdin is None or is_terminal(sys.stdin):
        return ""
    return _decode_bounded(sys.stdin.buffer.read(MAX_INPUT_BYTES + 1), "stdin")


def read_file(path: Path) -> str:
    """The text of a file.

    Raises: RequestError for a binary or missing one; ContextLengthError over 64 MiB; LocalLLMError
    (5) for one that may not be read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_INPUT_BYTES + 1)
    except (FileNotFoundError, IsADirectoryError, ValueError) as error:
        raise RequestError(f"{str(path)!r:.200} is not a file", param="file") from error
    except PermissionError as error:
        raise LocalLLMError(
            f"{path} may not be read", hint="check its permissions", exit_code=ExitCode.DISK
        ) from error
    except OSError as error:  # a name that is too long, a file in the place of a folder
        raise RequestError(
            f"{str(path)!r:.200} cannot be read: {error.strerror}", param="file"
        ) from error
    return _decode_bounded(data, path.name)


def _decode_bounded(data: bytes, name: str) -> str:
    text = decode_text(data[:SNIFFED_BYTES] if len(data) > MAX_INPUT_BYTES else data, name)
    if len(data) > MAX_INPUT_BYTES:
        raise ContextLengthError(
            f"{name} has over {MAX_INPUT_BYTES >> 20} MiB, more than any context holds",
            hint="a shorter text",
        )
    return text


def looks_binary(head: bytes) -> bool:
    """Whether the first bytes of a file, at most SNIFFED_BYTES, are not those of a text."""
    text = head.decode("utf-8", errors="replace")
    # The cut may have gone through a character.
    text = text.rstrip("\ufffd") if len(head) == SNIFFED_BYTES else text
    odd = sum(1 for c in text if c == "\ufffd" or (ord(c) < 32 and c not in _TEXT_CONTROLS))
    return odd > max(3, MAX_BINARY_SHARE * len(text))
