"""Read prompts from stdin, files and arguments as one clean text."""

import sys
from collections.abc import Sequence
from pathlib import Path

from localllm.cli.draw.output import is_terminal, note, show_controls
from localllm.errors import ContextLengthError, ExitCode, LocalLLMError, RequestError

MAX_INPUT_BYTES = 64 << 20
SNIFFED_BYTES = 8192
# Share of the sniffed text; text has hardly any control characters, programs and images about a
# third.
MAX_BINARY_SHARE = 0.1
_TEXT_CONTROLS = frozenset("\t\n\r\f\b\x1b")


def gather_prompt(
    prompt: str | None, files: str = "", *, reads_stdin: bool = True, is_raw: bool = False
) -> str | None:
    """Join stdin (if piped, and `reads_stdin`), the text of files and the prompt argument, in this
    order, with blank lines between them; None if all are absent or empty. `is_raw`: every
    character stays, also a `\\r` and the newline at the end.

    Raises: RequestError for binary input; ContextLengthError over 64 MiB.
    """
    # As in other programs, "-" means stdin, which is read anyway.
    piped = _read_stdin(is_raw=is_raw) if reads_stdin else ""
    parts = [piped, files, "" if prompt in (None, "-") else prompt]
    if is_raw:
        return join_raw(parts) or None
    present = [part for part in parts if part.strip()]
    if len(present) == 1 and present[0] == prompt:
        return prompt  # verbatim: nothing was joined to it
    return "\n\n".join(part.strip("\n") for part in present) or None


def join_raw(parts: Sequence[str | None]) -> str:
    """Join texts as they are, with a blank line between them."""
    present = [part for part in parts if part]
    return "".join(
        part + ("\n" if part.endswith("\n") else "\n\n") * (i + 1 < len(present))
        for i, part in enumerate(present)
    )


def decode_text(data: bytes, name: str, *, is_raw: bool = False) -> str:
    """Decode UTF-8, drop a byte-order mark and turn line ends into `\\n`, unless `is_raw`; invalid
    bytes are replaced, with one warning.

    Raises: RequestError if the data looks binary.
    """
    if looks_binary(data[:SNIFFED_BYTES]):
        raise RequestError(f"{name} looks binary, not like text", hint="convert it to text first")
    encoding = "utf-8" if is_raw else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        text = data.decode(encoding, errors="replace")
        note(f"warning: {show_controls(name)} is not valid UTF-8; invalid bytes are replaced")
    return text if is_raw else text.replace("\r\n", "\n").replace("\r", "\n")


def _read_stdin(*, is_raw: bool) -> str:
    if sys.stdin is None or is_terminal(sys.stdin):
        return ""
    data = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    return _decode_bounded(data, "stdin", is_raw=is_raw)


def read_file(path: Path, *, is_raw: bool = False) -> str:
    """The text of a file; `is_raw`: see `decode_text`.

    Raises: RequestError for a binary or missing one; ContextLengthError over 64 MiB; LocalLLMError
    (exit code 5) without permission to read it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_INPUT_BYTES + 1)
    except (FileNotFoundError, IsADirectoryError, ValueError) as error:
        raise RequestError(f"{str(path)!r:.200} is not a file", param="file") from error
    except PermissionError as error:
        raise LocalLLMError(
            f"no permission to read {path}", hint="check its permissions", exit_code=ExitCode.DISK
        ) from error
    except OSError as error:  # a name that is too long, a file in place of a folder
        raise RequestError(
            f"{str(path)!r:.200} cannot be read: {error.strerror}", param="file"
        ) from error
    return _decode_bounded(data, path.name, is_raw=is_raw)


def _decode_bounded(data: bytes, name: str, *, is_raw: bool) -> str:
    head = data[:SNIFFED_BYTES] if len(data) > MAX_INPUT_BYTES else data
    text = decode_text(head, name, is_raw=is_raw)
    if len(data) > MAX_INPUT_BYTES:
        raise ContextLengthError(
            f"{name} has over {MAX_INPUT_BYTES >> 20} MiB, more than any context holds",
            hint="a shorter text",
        )
    return text


def looks_binary(head: bytes) -> bool:
    """Whether the first bytes of a file, at most SNIFFED_BYTES, do not look like text."""
    text = head.decode("utf-8", errors="replace")
    # The cut may have split a character.
    text = text.rstrip("\ufffd") if len(head) == SNIFFED_BYTES else text
    odd = sum(1 for c in text if c == "\ufffd" or (ord(c) < 32 and c not in _TEXT_CONTROLS))
    return odd > max(3, MAX_BINARY_SHARE * len(text))
