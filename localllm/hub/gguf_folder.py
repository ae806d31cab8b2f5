"""A GGUF model as a folder: the small files that a checkpoint has, made from the file's header.

All that opens a model reads config.json, tokenizer.json and the like from a folder. For a GGUF file
they are made once and kept in the cache, with the path of the file, whose blocks are read where
they lie. When another is made, those of files that are gone and those unused for long are removed.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from localllm.errors import CheckpointError, ExitCode
from localllm.files.file_times import note_use
from localllm.files.gguf import GgufHeader, read_gguf, split_files
from localllm.hub import generation_config
from localllm.hub.kept_folders import forget_unused, private_place
from localllm.model.gguf.config import config_of
from localllm.model.weight_files import GGUF_FOLDERS, GGUF_NAME
from localllm.text.gguf_tokenizer import end_token_ids, tokenizer_files
from localllm.user.version import __version__

# What the files depend on besides the GGUF file.
_MADE_BY = ("model/gguf", "text", "hub/gguf_folder.py")
_PACKAGE = Path(__file__).parents[1]
# GGUF's names of recommended settings, and those of generation_config.json.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


# Size, time of the last change and number of a file.
_Status = tuple[int, int, int]


def folder_of(file: Path) -> Path:
    """The folder with the small files of a GGUF model; `file`: any of its files.

    Raises: as `read_gguf`, `config_of` and `tokenizer_files`; CheckpointError (exit code 5) where
    there is no place for the folder.
    """
    folders, statuses = private_place(GGUF_FOLDERS), _statuses(file)
    folder = folders / _digest(file, statuses)
    if not folder.exists():
        contents = _contents(read_gguf(file), statuses)
        _forget_gone(folders)
        forget_unused(folders)
        _write(folder, contents)
    note_use(folder)
    return folder


def _contents(header: GgufHeader, statuses: Mapping[Path, _Status]) -> dict[str, Mapping[str, Any]]:
    sampling = {
        name: header.keys[f"general.sampling.{key}"]
        for key, name in _SAMPLING.items()
        if f"general.sampling.{key}" in header.keys
    }
    files = []
    for place in map(_place, header.files):
        num_bytes, mtime_ns, _ = statuses[place]
        files.append({"path": str(place), "num_bytes": num_bytes, "mtime_ns": mtime_ns})
    return {
        "config.json": config_of(header),
        **tokenizer_files(header.keys, str(header.files[0])),
        generation_config.FILE_NAME: {**sampling, "eos_token_id": end_token_ids(header.keys)},
        GGUF_NAME: {"files": files},
    }


def _write(folder: Path, contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Write all files, then give the folder its name: nobody sees a part of them."""
    made = Path(tempfile.mkdtemp(prefix="new-", dir=folder.parent))
    try:
        for name, content in contents.items():
            # In UTF-8, whatever the locale says; escaped are only bytes of paths that are no text.
            text = json.dumps(content, ensure_ascii=name == GGUF_NAME)
            (made / name).write_text(text, encoding="utf-8")
        made.rename(folder)
    except OSError as error:
        if not folder.exists():  # else another process was faster
            raise CheckpointError(
                f"the vocabulary of a GGUF file cannot be kept: {error.strerror}",
                where=str(folder.parent),
                hint="make room there, or set XDG_CACHE_HOME",
                exit_code=ExitCode.DISK,
            ) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)  # of what has not got its name


def _place(file: Path) -> Path:
    """Where a file lies, by its own name: two links to one file are two models, since one of them
    may go, and the other files of a split set may differ.
    """
    return file.parent.resolve() / file.name


def _statuses(file: Path) -> dict[Path, _Status]:
    """Of all files of a model, as far as they are here."""
    found = {}
    for place in map(_place, split_files(file)):
        with suppress(OSError):  # `read_gguf` says what is wrong
            status = place.stat()
            found[place] = status.st_size, status.st_mtime_ns, status.st_ino
    return found


def _digest(file: Path, statuses: Mapping[Path, _Status]) -> str:
    """Of what the small files are made from: the model, as far as the status of its files tells,
    and our code.
    """
    told = f"{_place(file)} {[*statuses.values()]} {__version__}"
    digest = hashlib.sha256(os.fsencode(told))
    for name in _MADE_BY:
        path = _PACKAGE / name
        for source in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _forget_gone(folders: Path) -> None:
    """Remove the folders of files that are not there any more."""
    for folder in folders.iterdir():
        # It may be unfinished, or of another version.
        with suppress(OSError, ValueError, KeyError, TypeError):
            files = json.loads((folder / GGUF_NAME).read_bytes())["files"]
            if not all(Path(each["path"]).exists() for each in files):
                shutil.rmtree(folder, ignore_errors=True)
