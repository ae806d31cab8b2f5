"""JSON files of a model repository, read as hostile input."""

import json
from pathlib import Path
from typing import Any

from localllm.errors import CheckpointError
from localllm.files.model_file import read_model_file

MAX_JSON_BYTES = 10_000_000
_HINT = "download the model again"


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object in `path`. Raises: as `read_json`; CheckpointError for another value."""
    value = read_json(path, max_bytes)
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path.name} must hold an object, found {type(value).__name__}",
            where=str(path),
            hint=_HINT,
        )
    return value


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value in `path`.

    Raises: CheckpointError if the file cannot be read (see `open_model_file`), is too large, is not
    JSON (with line and column), or is nested too deeply.
    """
    where = str(path)
    data = read_model_file(path, max_bytes)
    try:
        return json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path.name} is not valid JSON: {error.msg} at line {error.lineno}, "
            f"column {error.colno}",
            where=where,
            hint=_HINT,
        ) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path.name} is not UTF-8 ({error})", where=where) from error
    except (RecursionError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} cannot be read as JSON ({error!r:.100})", where=where, hint=_HINT
        ) from error
