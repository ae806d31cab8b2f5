"""Where the hub's client keeps its downloads, told without importing it, which takes half a second.

The client itself, where it is imported anyway, says the same.
"""

import os
from pathlib import Path

from localllm.user.places import home_folder


def hub_cache_folder() -> Path:
    """The folder with a folder for each repository."""
    cache = os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache"
    home = os.environ.get("HF_HOME") or Path(cache) / "huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named or Path(home) / "hub")


def repository_folders(cache: Path) -> dict[str, Path]:
    """The folders of models in a cache of this layout, by repository."""
    return {
        folder.name.removeprefix("models--").replace("--", "/", 1): folder
        for folder in sorted(cache.glob("models--*"))
    }


def newest_snapshot(repository: Path) -> Path | None:
    """The folder of the files of a repository's newest revision here."""
    try:
        found = [each for each in (repository / "snapshots").iterdir() if each.is_dir()]
        return max(found, key=lambda folder: folder.stat().st_mtime, default=None)
    except OSError:
        return None
