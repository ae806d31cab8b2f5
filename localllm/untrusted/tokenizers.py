"""A folder's tokenizer, as far from this process as its author is from its user."""

import hashlib
import logging
from filecmp import cmp
from importlib.metadata import version
from pathlib import Path
from stat import S_ISREG

from localllm import __version__
from localllm.errors import CheckpointError
from localllm.places import cache_folder
from localllm.tokenizer import (
    MAX_TOKENIZER_BYTES,
    Tokenizer,
    load_backend,
    read_chat_templates,
    read_special_tokens,
)
from localllm.untrusted.delegated_tokenizer import DelegatedTokenizer
from localllm.untrusted.worker import StoppedError
from localllm.untrusted.worker_pool import WorkerPool

logger = logging.getLogger(__name__)
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_OLDER = "special_tokens_map.json"
_BUILT_IN = Path(__file__).parents[1] / "pocket"


def open_tokenizer(folder: Path, fallback_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model's folder; the built-in one works in this process, any other in a
    process of its own, which has to have read it once before this one does.

    Raises: CheckpointError.
    """
    if is_built_in(folder):
        return Tokenizer.from_folder(folder, fallback_template)
    path = folder / "tokenizer.json"
    num_bytes = path.stat().st_size if path.is_file() else 0
    opening = {
        "kind": "texts",
        "folder": str(folder.absolute()),
        "fallback_template": fallback_template,
        "num_bytes": num_bytes,
    }
    pool = WorkerPool(opening)
    mark = _mark_of(path)
    if mark is None or not mark.exists():
        try:
            pool.open()
        except StoppedError as error:
            raise CheckpointError(
                f"tokenizer.json cannot be used: {error}",
                where=str(path),
                hint="report it to the model's publisher",
            ) from error
        _note(mark)
    backend = load_backend(folder)
    return DelegatedTokenizer(
        lambda: backend,
        read_special_tokens(folder),
        read_chat_templates(folder, fallback_template),
        pool,
    )


def is_built_in(folder: Path) -> bool:
    """Whether a folder's tokenizer and template are those that come with localllm."""
    if (folder / _OLDER).exists():
        return False
    try:
        return all(cmp(folder / name, _BUILT_IN / name, shallow=False) for name in _FILES)
    except OSError:
        return False


def _mark_of(path: Path) -> Path | None:
    """Where it is kept that a process of these versions has read a vocabulary; None for a file that
    no process has to read.
    """
    try:
        if not S_ISREG(path.stat().st_mode) or path.stat().st_size > MAX_TOKENIZER_BYTES:
            return None
        digest = hashlib.sha256(path.read_bytes())
    except OSError:
        return None
    digest.update(f"{__version__} {version('tokenizers')}".encode())
    return cache_folder("tokenizers") / digest.hexdigest()


def _note(mark: Path | None) -> None:
    if mark is None:
        return
    try:
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch(mode=0o600)
    except OSError as error:  # it is only read again the next time
        logger.debug("%s cannot be kept: %s", mark, error)
