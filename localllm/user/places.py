"""Where localllm keeps what is the user's: settings, conversations, what can be made again.

By the XDG base directory specification, on every system alike, so that what is written down once
holds everywhere. Nothing here makes a folder.
"""

import os
import tempfile
from pathlib import Path

from localllm.errors import RequestError

# Below a file there are no files, not even for root.
_NOWHERE = Path(os.devnull) / "no-home-folder"


def config_file() -> Path:
    """Settings that hold where neither a flag nor a variable says otherwise."""
    return _folder("XDG_CONFIG_HOME", ".config") / "config.toml"


def user_catalog() -> Path:
    """Models of the user's own, in the form of models.toml."""
    return _folder("XDG_CONFIG_HOME", ".config") / "models.toml"


def sessions_file() -> Path:
    """Saved conversations."""
    return _folder("XDG_DATA_HOME", ".local/share") / "sessions.db"


def history_file() -> Path:
    """What was typed."""
    return _folder("XDG_DATA_HOME", ".local/share") / "history"


def cache_folder(kind: str) -> Path:
    """What can be made again, by kind: quantized, prefixes, kernels, tunings, downloads."""
    return _folder("XDG_CACHE_HOME", ".cache") / kind


def runtime_folder() -> Path:
    """What lives as long as the session of the user: sockets of running engines."""
    chosen = os.environ.get("XDG_RUNTIME_DIR")
    if chosen:
        return Path(chosen) / "localllm"
    return Path(tempfile.gettempdir()) / f"localllm-{os.getuid()}"


def prefix_folder(chosen: str | None) -> Path:
    """Keys and values of prompts; in `chosen`, a folder of the user's, it has one of its own.

    Raises: RequestError for a `~` that stands for nothing.
    """
    if chosen is None:
        return cache_folder("prefixes")
    try:
        return Path(chosen).expanduser() / "localllm-prefixes"
    except RuntimeError as error:
        raise RequestError(
            f"{chosen!r:.200}: {error}", param="cache_dir", hint="a path without ~, or set HOME"
        ) from error


def lost_places() -> list[str]:
    """The variables that would have to say where things are kept, since the user has no folder: in
    a container HOME may be unset and the user unknown. Empty where all have a place.
    """
    if home_folder() != _NOWHERE:
        return []
    names = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME")
    return [name for name in names if not os.environ.get(name)]


def home_folder() -> Path:
    """The user's folder; where there is none, a place where nothing is and nothing can be made, so
    that what is looked for is not found, and what cannot be kept is said to be lost.
    """
    try:
        return Path.home()
    except RuntimeError:
        return _NOWHERE


def _folder(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or home_folder() / default) / "localllm"
