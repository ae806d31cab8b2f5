"""JSON files of a model repository, read as hostile input."""

import json
from pathlib import Path
from typing import Any

from localllm.errors import CheckpointError

MAX_JSON_BYTES = 10_000_000


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object in `path`.

    Raises: CheckpointError where the file is missing, too large, no JSON (with line and column),
    nested too deeply, or not an object.
    """
    where, hint = str(path), "download the model again"
    try:
        num_bytes = path.stat().st_size
        if num_bytes > max_bytes:
            raise CheckpointError(
                f"{path.name} is too large: {num_bytes:,} bytes, at most {max_bytes:,}",
                where=where,
                hint=hint,
            )
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.name} is missing", where=str(path.parent), hint=hint
        ) from error
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path.name} is not valid JSON: {error.msg} at line {error.lineno}, "
            f"column {error.colno}",
            where=where,
            hint=hint,
        ) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path.name} is not UTF-8 ({error})", where=where) from error
    except (RecursionError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} cannot be read as JSON ({error!r:.100})", where=where, hint=hint
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path.name} must hold an object, found {type(value).__name__}", where=where, hint=hint
        )
    return value
