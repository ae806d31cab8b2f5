"""Opens a folder's tokenizer; unless it is the built-in one, a separate process does its work."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from filecmp import cmp
from importlib.metadata import version
from pathlib import Path

from localllm.errors import CheckpointError
from localllm.files.json_file import MAX_JSON_BYTES
from localllm.files.model_file import has_file, read_model_file
from localllm.files.private_files import private_folder, write_private
from localllm.text import added_tokens, template_files
from localllm.text.template_files import read_chat_templates
from localllm.text.tokenizer import Tokenizer
from localllm.text.tokenizer_files import (
    FILE,
    FILES,
    MAX_TOKENIZER_BYTES,
    load_backend,
    read_special_texts,
)
from localllm.untrusted.delegated_tokenizer import DelegatedTokenizer
from localllm.untrusted.messages import OpenTexts
from localllm.untrusted.worker import StoppedError
from localllm.untrusted.worker_pool import WorkerPool
from localllm.user.places import cache_folder
from localllm.user.version import __version__

_BUILT_IN_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# What would change the ids or the templates of these.
_OTHERS = (added_tokens.SPECIAL_MAP, added_tokens.ADDED, template_files.FOLDER)
_BUILT_IN = Path(__file__).parents[1] / "pocket"


def open_tokenizer(
    folder: Path, fallback_template: str | None = None, *, is_warm: bool = False
) -> Tokenizer:
    """The tokenizer of a model's folder. The built-in one works in this process; any other works in
    a process of its own, which must have read it once before this process reads it. `is_warm`: that
    process starts at once, and not with its first text.

    Raises: CheckpointError.
    """
    if is_built_in(folder):
        return Tokenizer.from_folder(folder, fallback_template)
    path = folder / FILE
    data = read_model_file(path, MAX_TOKENIZER_BYTES)
    pool = WorkerPool(OpenTexts(str(folder.absolute()), fallback_template, len(data)))
    others = [folder / name for name in FILES if name != FILE and has_file(folder / name)]
    mark = _mark_of([data, *(read_model_file(path, MAX_JSON_BYTES) for path in others)])
    is_known = mark is not None and mark.exists()
    if is_known and is_warm:
        with suppress(StoppedError):  # its first text says so
            pool.warm()
    if not is_known:
        try:
            pool.open()
        except StoppedError as error:
            raise CheckpointError(
                f"tokenizer.json cannot be used: {error}",
                where=str(path),
                hint="report it to the model's publisher",
            ) from error
    backend = load_backend(folder, is_checked=is_known)
    if mark is not None and not is_known:
        with suppress(OSError):  # without the mark, it is read twice the next time too
            write_private(mark, b"")
    templates = read_chat_templates(folder, fallback_template)
    return DelegatedTokenizer(lambda: backend, read_special_texts(folder), templates, pool)


def is_built_in(folder: Path) -> bool:
    """Whether a folder's tokenizer and template are those that come with localllm."""
    if any((folder / name).exists() for name in _OTHERS):
        return False
    try:
        return all(cmp(folder / name, _BUILT_IN / name, shallow=False) for name in _BUILT_IN_FILES)
    except OSError:
        return False


def _mark_of(contents: Sequence[bytes]) -> Path | None:
    """The file that marks a vocabulary, which these files hold, as read and checked once by
    processes of these versions; None if there is no place for it.
    """
    folder = private_folder(cache_folder("tokenizers"), "each vocabulary is read twice")
    digest = hashlib.sha256(f"{__version__} {version('tokenizers')}".encode())
    for data in contents:
        digest.update(hashlib.sha256(data).digest())
    return None if folder is None else folder / digest.hexdigest()
