"""Safetensors headers read as hostile input: every claim is checked before a byte is loaded."""

import json
import os
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from localllm.errors import CheckpointError
from localllm.files.model_file import open_model_file
from localllm.model.tensor_info import ITEM_BYTES, MAX_TENSORS, TensorInfo

# Parsing takes a second and 100 MB for every 5 MB. A tensor takes about 130 bytes. The largest
# known header describes 73,000 tensors (a mixture of experts in int4) in 9.6 MB; no supported model
# needs more than 1 MB.
MAX_HEADER_BYTES = 10_000_000
MAX_DIMENSIONS = 8
_REDOWNLOAD = "download the file again"


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of one file, by name.

    The library that loads the data checks most of this too, but it accepts duplicate names, and its
    messages do not name the tensor.

    Raises: as `open_model_file`; CheckpointError for a file that is cut short, has overlapping
    tensors, repeats a name or states wrong sizes.
    """
    with open_model_file(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        length_field = file.read(8)
        header_bytes = int.from_bytes(length_field, "little")
        if len(length_field) < 8 or header_bytes > file_bytes - 8:
            raise broken_file(path, "the file is cut short: its header is not complete")
        if header_bytes > MAX_HEADER_BYTES:
            raise broken_file(
                path, f"the header claims {header_bytes:,} bytes; the limit is {MAX_HEADER_BYTES:,}"
            )
        text = file.read(header_bytes)
    # Counted before parsing, which is what would take the time and the memory.
    if text.count(b'"data_offsets"') > MAX_TENSORS:
        raise broken_file(path, f"the header describes over {MAX_TENSORS:,} tensors")
    if not text.startswith(b"{"):
        raise broken_file(path, "the header does not begin with {")
    try:
        # Decoded here: given bytes, json takes UTF-16 and UTF-32, too.
        header = json.loads(text.decode(), object_pairs_hook=lambda pairs: _unique(pairs, path))
    except (ValueError, RecursionError) as error:
        raise broken_file(path, f"the header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise broken_file(path, "the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise broken_file(path, "the header's metadata is not a map of strings")
    spans = []
    tensors = {}
    for name, entry in header.items():
        tensor, start, end = _read_entry(path, name, entry, 8 + header_bytes)
        tensors[name] = tensor
        spans.append((start, end, name))
    position = 0
    for start, end, name in sorted(spans):
        if start != position:
            kind = "overlaps the one before it" if start < position else "leaves a gap before it"
            raise broken_file(path, f"tensor {name!r:.120} {kind}")
        position = end
    if position != file_bytes - 8 - header_bytes:
        last = max(spans)[2] if spans else "none"
        raise broken_file(
            path,
            f"the file holds {file_bytes - 8 - header_bytes:,} bytes of data, "
            f"but its header describes {position:,} (last tensor {last!r:.120})",
        )
    return tensors


def _read_entry(path: Path, name: str, entry: Any, data_start: int) -> tuple[TensorInfo, int, int]:
    where = f"tensor {name!r:.120}"
    if not isinstance(entry, dict):
        raise broken_file(path, f"{where} has no description")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise broken_file(path, f"{where} has the unknown dtype {dtype!r:.40}")
    if (
        not _are_sizes(shape)
        or len(shape) > MAX_DIMENSIONS
        or not _are_sizes(offsets)
        or len(offsets) != 2
    ):
        raise broken_file(path, f"{where} has a broken shape or broken offsets")
    start, end = offsets
    if end - start != prod(shape) * ITEM_BYTES[dtype]:
        raise broken_file(
            path, f"{where} spans {end - start:,} bytes, but its shape {shape} of {dtype} needs "
            f"{prod(shape) * ITEM_BYTES[dtype]:,}"
        )  # fmt: skip
    tensor = TensorInfo(name, path, dtype, tuple(shape), start=data_start + start)
    return tensor, start, end


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 62 for v in values
    )


def _unique(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise broken_file(path, f"the header names {name!r:.120} twice")
        result[name] = value
    return result


def broken_file(path: Path, problem: str) -> CheckpointError:
    """The error for a file that is not what it should be."""
    return CheckpointError(
        f"broken weight file {path.name}: {problem}", where=str(path), hint=_REDOWNLOAD
    )
