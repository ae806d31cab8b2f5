"""The user's settings: a flat TOML file with default values of flags."""

import os
import tomllib
from typing import Any

from localllm.errors import CatalogError, ExitCode
from localllm.files.regular_file import read_regular
from localllm.user.places import config_file

DEFAULT_MODEL = "default_model"
_MAX_BYTES = 1_000_000


def read_settings() -> dict[str, Any]:
    """Values by the name of their flag, with `_` for `-`; empty if LOCALLLM_NO_CONFIG is set.

    Raises: CatalogError (exit code 2), with the line, for a malformed file.
    """
    path = config_file()
    if os.environ.get("LOCALLLM_NO_CONFIG") or not os.path.lexists(path):
        return {}
    try:
        raw = tomllib.loads(read_regular(path, _MAX_BYTES).decode("utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CatalogError(
            f"the settings cannot be read: {reason}",
            where=str(path),
            hint="fix the file, or ignore it: localllm --no-config ...",
            exit_code=ExitCode.USAGE,
        ) from error
    return {name.replace("-", "_"): value for name, value in raw.items()}


def default_model() -> str | None:
    """The model to use if none is named: LOCALLLM_MODEL, else the user's setting."""
    named = os.environ.get("LOCALLLM_MODEL") or read_settings().get(DEFAULT_MODEL)
    return str(named) if named else None
