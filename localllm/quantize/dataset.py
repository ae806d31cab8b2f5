"""Calibration text from a data set on the hub."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localllm.errors import DownloadError, ExitCode
from localllm.hub.snapshot import (
    cache_root,
    link_file,
    look_up_dataset,
    note_revision,
    snapshot_folder,
)
from localllm.hub.transfer import HubCommit, HubFile, fetch_blob
from localllm.hub.verified import VerifiedFiles

# Far more than any calibration needs; a data set may be thousands of times larger.
MAX_CHARS = 20_000_000
_ENDINGS = (".txt", ".jsonl", ".parquet")
_TEXT_KEYS = ("text", "content", "prompt", "question", "instruction")


def fetch_dataset_text(name: str) -> str:
    """Text of the data set `name`, from its training files first.

    Text files, JSON lines and (if pyarrow is installed) parquet files are read.

    Raises: DownloadError for a data set that cannot be fetched, or that holds no readable text.
    """
    parts: list[str] = []
    num_chars = 0
    try:
        origin, files = look_up_dataset(name, _ENDINGS)
        for file in sorted(files, key=lambda file: ("train" not in file.name, file.name)):
            for text in _read_texts(_fetch(origin, file)):
                parts.append(text)
                num_chars += len(text)
                if num_chars > MAX_CHARS:
                    return "\n\n".join(parts)
    except DownloadError:
        raise
    except Exception as error:  # whatever the hub's client and its transport raise
        raise DownloadError(
            f"the data set {name} cannot be fetched: {error!s:.200}",
            hint="check the spelling, the network and HF_TOKEN, or use --calib-text FILE",
        ) from error
    if not parts:
        raise DownloadError(
            f"the data set {name} has no text in {', '.join(_ENDINGS)} files",
            hint="--calib-text FILE with your own text",
            exit_code=ExitCode.USAGE,
        )
    return "\n\n".join(parts)


def _fetch(origin: HubCommit, file: HubFile) -> Path:
    """A file of a data set in the hub's own cache, downloaded if need be."""
    blob = cache_root(origin.repo, origin.kind) / "blobs" / file.digest
    if not (snapshot_folder(origin) / file.name).exists():
        fetch_blob(origin, file, blob, VerifiedFiles(), lambda count: None)
    place = link_file(origin, file)
    note_revision(origin, None)
    return place


def _read_texts(path: Path) -> Iterator[str]:
    if path.suffix == ".txt":
        yield path.read_text(encoding="utf-8", errors="replace")
    elif path.suffix == ".jsonl":
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                yield from _text_of(json.loads(line))
    else:
        yield from _read_parquet(path)


def _read_parquet(path: Path) -> Iterator[str]:
    try:
        from pyarrow import parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise DownloadError(
            "the data set is a parquet file, which needs pyarrow",
            where=path.name,
            hint="pip install pyarrow (the extra localllm[datasets]), or use --calib-text FILE",
            exit_code=ExitCode.USAGE,
        ) from error
    for batch in parquet.ParquetFile(path).iter_batches(1000):
        for row in batch.to_pylist():
            yield from _text_of(row)


def _text_of(row: Any) -> Iterator[str]:
    if isinstance(row, str):
        yield row
    if not isinstance(row, dict):
        return
    for message in row.get("messages") or row.get("conversations") or ():
        if isinstance(message, dict):
            yield from _text_of(message)
    for key in (*_TEXT_KEYS, "value"):
        if isinstance(row.get(key), str):
            yield row[key]
            return
