"""A GGUF model as a folder: the small files that a checkpoint has, made from the file's header.

All that opens a model reads config.json, tokenizer.json and the like from a folder. For a GGUF file
they are made once and kept in the cache, beside the path of the file, whose blocks are read where
they lie.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm.errors import CheckpointError, ExitCode
from localllm.files.gguf import GgufHeader, read_gguf
from localllm.files.private_files import private_folder
from localllm.hub import generation_config
from localllm.model.gguf.config import config_of
from localllm.model.weight_files import GGUF_FOLDERS, GGUF_NAME
from localllm.text.gguf_tokenizer import end_token_ids, tokenizer_files
from localllm.user.places import cache_folder
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


def folder_of(file: Path) -> Path:
    """The folder with the small files of a GGUF model; `file`: any of its files.

    Raises: as `read_gguf`, `config_of` and `tokenizer_files`; CheckpointError (exit code 5) where
    there is no place for the folder.
    """
    folders = private_folder(cache_folder(GGUF_FOLDERS), "a GGUF model cannot be opened")
    if folders is None:
        raise CheckpointError(
            "the vocabulary of a GGUF file needs a place in the cache",
            where=str(cache_folder(GGUF_FOLDERS)),
            hint="make the folder writable, or set XDG_CACHE_HOME",
            exit_code=ExitCode.DISK,
        )
    folder = folders / _digest(file)
    if not folder.exists():
        header = read_gguf(file)
        _forget_gone(folders)
        _write(folder, _contents(header))
    return folder


def _contents(header: GgufHeader) -> dict[str, Mapping[str, Any]]:
    files = [str(_place(each)) for each in header.files]
    sampling = {
        name: header.keys[f"general.sampling.{key}"]
        for key, name in _SAMPLING.items()
        if f"general.sampling.{key}" in header.keys
    }
    return {
        "config.json": config_of(header),
        **tokenizer_files(header.keys, str(header.files[0])),
        generation_config.FILE_NAME: {**sampling, "eos_token_id": end_token_ids(header.keys)},
        GGUF_NAME: {"files": files},
    }


def _write(folder: Path, contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Write all files, then give the folder its name: nobody sees a part of them."""
    made = Path(tempfile.mkdtemp(prefix="gguf-", dir=folder.parent.parent))
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


def _digest(file: Path) -> str:
    """Of what the small files are made from: the file, as far as its status tells, and our code."""
    place = _place(file)
    try:
        status = place.stat()
        told = f"{place} {status.st_size} {status.st_mtime_ns} {status.st_ino} {__version__}"
    except OSError:
        told = str(place)  # `read_gguf` says what is wrong
    digest = hashlib.sha256(os.fsencode(told))
    for name in _MADE_BY:
        path = _PACKAGE / name
        for source in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _forget_gone(folders: Path) -> None:
    """Remove the folders of files that are not there any more."""
    for folder in folders.iterdir():
        try:
            files = json.loads((folder / GGUF_NAME).read_bytes())["files"]
            if all(Path(each).exists() for each in files):
                continue
        except (OSError, ValueError, KeyError):
            pass
        shutil.rmtree(folder, ignore_errors=True)
