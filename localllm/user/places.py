"""Where localllm keeps the user's files: settings, conversations, caches.

The places follow the XDG base directory specification on every system, so that one description
holds everywhere. Nothing here makes a folder.
"""

import os
import tempfile
from pathlib import Path

from localllm.errors import RequestError

# Nothing can exist below a file, not even for root.
_NOWHERE = Path(os.devnull) / "no-home-folder"


def config_file() -> Path:
    """Settings that apply unless a flag or a variable overrides them."""
    return _folder("XDG_CONFIG_HOME", ".config") / "config.toml"


def user_catalog() -> Path:
    """The user's own models, in the format of models.toml."""
    return _folder("XDG_CONFIG_HOME", ".config") / "models.toml"


def sessions_file() -> Path:
    """Saved conversations."""
    return _folder("XDG_DATA_HOME", ".local/share") / "sessions.db"


def history_file() -> Path:
    """The lines that the user has typed."""
    return _folder("XDG_DATA_HOME", ".local/share") / "history"


def cache_folder(kind: str) -> Path:
    """What can be recreated, by kind: quantized, prefixes, kernels, tunings, downloads."""
    return _folder("XDG_CACHE_HOME", ".cache") / kind


def launch_folder() -> Path:
    """Settings that `localllm launch` writes for other programs."""
    return _folder("XDG_CONFIG_HOME", ".config") / "launch"


def runtime_folder() -> Path:
    """Files that live as long as the user's login session: sockets of running engines."""
    chosen = os.environ.get("XDG_RUNTIME_DIR")
    if chosen:
        return Path(chosen) / "localllm"
    return Path(tempfile.gettempdir()) / f"localllm-{os.getuid()}"


def cache_places(kind: str) -> tuple[Path, Path]:
    """A kind of cache without which nothing works, in its folder or, where that cannot be written,
    as long as the user's login session lives.
    """
    return cache_folder(kind), runtime_folder() / kind


def prefix_folder(chosen: str | None) -> Path:
    """The folder for keys and values of prompts; in `chosen`, if the user gave a folder.

    Raises: RequestError for a `~` that cannot be expanded.
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
    """The variables that would have to be set because the user has no home folder: in a container
    HOME may be unset and the user unknown. Empty if everything has a place.
    """
    if home_folder() != _NOWHERE:
        return []
    names = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME")
    return [name for name in names if not os.environ.get(name)]


def home_folder() -> Path:
    """The user's home folder. If there is none, a place where nothing exists and nothing can be
    created: files there are not found, and what cannot be saved is reported.
    """
    try:
        return Path.home()
    except RuntimeError:
        return _NOWHERE


def _folder(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or home_folder() / default) / "localllm"
