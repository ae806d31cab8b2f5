"""Find files for a prompt: a file, a folder, or a pattern such as `src/*.py`."""

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from localllm.cli.draw.files import user_path
from localllm.cli.draw.output import note, show_controls
from localllm.cli.input.user_input import (
    MAX_INPUT_BYTES,
    SNIFFED_BYTES,
    join_raw,
    looks_binary,
    read_file,
)
from localllm.errors import ContextLengthError, LocalLLMError, RequestError

# No prompt needs more; a user who does want them all can join them first.
MAX_FILES = 1000
MAX_FILE_BYTES = 1 << 20
# Folders that tools create beside a project's own files. (Names that begin with a dot are left out
# too.)
_GENERATED = ("__pycache__", "node_modules", "venv")
_NAMED = 3


@dataclass(slots=True)
class FoundFiles:
    """Texts with their names, and what was left out of a folder or a pattern, by reason."""

    texts: list[tuple[str, str]] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def describe(self) -> str:
        """One line on what was found and what was left out."""
        count, chars = len(self.texts), sum(len(text) for _, text in self.texts)
        parts = [f"{count} file{'s' * (count != 1)}, {chars:,} characters"]
        for reason, names in self.left_out.items():
            shown = ", ".join(names[:_NAMED]) + ", …" * (len(names) > _NAMED)
            parts.append(f"left out, {reason}: {len(names)} ({shown})")
        return "; ".join(parts)


def read_files(names: Sequence[str], *, is_raw: bool = False) -> str:
    """The texts of files, folders and patterns, each under its path unless it is the only one. A
    note on stderr says what was left out of a folder or a pattern. `is_raw`: as they are.

    Raises: RequestError for a name that matches nothing; as `read_file` for a file given by name.
    """
    texts = []
    for name in names:
        found = find_files(name, is_raw=is_raw)
        texts += found.texts
        if is_several(name):
            note(show_controls(f"{name}: {found.describe()}"), dim=not found.left_out)
    is_named = len(names) > 1 or any(map(is_several, names))
    if is_raw:
        return join_raw([f"{path}:\n\n{text}" if is_named else text for path, text in texts])
    return joined(texts, is_named=is_named)


def joined(texts: Sequence[tuple[str, str]], *, is_named: bool) -> str:
    """Join texts with blank lines, each under its path if `is_named`."""
    if not is_named:
        return "\n\n".join(text.strip("\n") for _, text in texts)
    return "\n\n".join(f"{path}:\n\n{text}".strip("\n") for path, text in texts)


def is_several(name: str) -> bool:
    """Whether a name stands for any number of files: a folder or a pattern."""
    path = user_path(name)
    try:
        return path.is_dir() or (glob.has_magic(name) and not path.exists())
    except (OSError, ValueError):  # not a valid path
        return False


def is_pattern(word: str) -> bool:
    """Whether a word that is not a file's name is a pattern: one that matches, or that can hardly
    be anything else, such as `src/*.c`. Neither a question's `?` nor wildcards alone are one.
    """
    if not glob.has_magic(word) or not any(char.isalnum() for char in word):
        return False
    path = user_path(word)
    try:
        is_like_one = "*" in word and ("/" in word or "." in word) and len(word.split()) == 1
        return is_like_one or next(glob.iglob(str(path), recursive=True), None) is not None
    except (OSError, ValueError):  # not a valid path
        return False


def find_files(name: str, *, is_raw: bool = False) -> FoundFiles:
    """The text files that a name stands for; `is_raw`: see `read_file`.

    Raises: see `read_files`.
    """
    path = user_path(name)
    if not is_several(name):
        return FoundFiles([(name, read_file(path, is_raw=is_raw))])
    found, num_bytes = FoundFiles(), 0
    paths = _in_folder(path, found) if path.is_dir() else _matching(str(path))
    for each in paths:
        reason = _reason_to_leave_out(each)
        if reason is not None:
            found.left_out.setdefault(reason, []).append(each.name)
            continue
        if len(found.texts) == MAX_FILES:
            raise RequestError(
                f"{name} has more than {MAX_FILES:,} text files", param="file", hint="a part of it"
            )
        num_bytes += each.stat().st_size
        if num_bytes > MAX_INPUT_BYTES:
            raise ContextLengthError(
                f"{name} has over {MAX_INPUT_BYTES >> 20} MiB of text, more than any context holds",
                hint="a part of it",
            )
        found.texts.append((str(each), read_file(each, is_raw=is_raw)))
    if not found.texts:
        what = found.describe() if found.left_out else ""
        raise RequestError(f"{name!r:.200} matches no text file", param="file", where=what)
    return found


def _matching(pattern: str) -> list[Path]:
    paths = map(Path, sorted(glob.glob(pattern, recursive=True)))
    return [path for path in paths if not path.is_dir()]


def _in_folder(folder: Path, found: FoundFiles) -> Iterator[Path]:
    """Files below `folder`, except hidden and generated ones; links to folders are not followed."""
    for root, folders, names in os.walk(folder):
        kept = [name for name in folders if not _is_aside(name)]
        hidden = [name for name in (*folders, *names) if _is_aside(name)]
        if hidden:
            found.left_out.setdefault("hidden or generated", []).extend(sorted(hidden))
        folders[:] = sorted(kept)
        yield from (Path(root) / name for name in sorted(names) if not _is_aside(name))


def _is_aside(name: str) -> bool:
    return name.startswith(".") or name in _GENERATED


def _reason_to_leave_out(path: Path) -> str | None:
    try:
        if not path.is_file():
            return "not a file"
        if path.stat().st_size > MAX_FILE_BYTES:
            return f"over {MAX_FILE_BYTES >> 20} MiB"
        with path.open("rb") as file:
            return "binary" if looks_binary(file.read(SNIFFED_BYTES)) else None
    except (OSError, LocalLLMError):
        return "not readable"
