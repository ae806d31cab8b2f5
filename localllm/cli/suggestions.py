"""What the shell offers when Tab is pressed: names of models, sessions and settings."""

import os
from pathlib import Path

from localllm.errors import LocalLLMError


def models(incomplete: str) -> list[str]:
    """Aliases, and what is on this machine; without the hub's client, which takes half a second."""
    from localllm.catalog import BUILT_IN_MODELS, load_catalog
    from localllm.places import cache_folder

    try:
        names = {*BUILT_IN_MODELS, *load_catalog()}
    except LocalLLMError:
        names = {*BUILT_IN_MODELS}
    for folder in _hub_cache().glob("models--*"):
        names.add(folder.name.removeprefix("models--").replace("--", "/", 1))
    names |= {str(folder) for folder in cache_folder("quantized").glob("*") if folder.is_dir()}
    return sorted(name for name in names if name.startswith(incomplete)) + _folders(incomplete)


def sessions(incomplete: str) -> list[str]:
    """Names of saved sessions, or their numbers."""
    from localllm.places import sessions_file
    from localllm.sessions import SessionStore

    try:
        rows = SessionStore(sessions_file()).rows() if sessions_file().exists() else []
    except LocalLLMError:
        return []
    names = [row.name or str(row.id) for row in rows]
    return [name for name in names if name.startswith(incomplete)]


def gpus(incomplete: str) -> list[str]:
    """GPUs of which data sheets are known."""
    from localllm.gpus import GPUS

    return [name for name in GPUS if name.startswith(incomplete)]


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def _folders(incomplete: str) -> list[str]:
    """Folders that a path goes on with, where it looks like one."""
    if not incomplete.startswith((".", "/", "~")):
        return []
    shown = Path(incomplete)
    try:
        parent = shown.expanduser() if incomplete.endswith("/") else shown.expanduser().parent
        start = "" if incomplete.endswith("/") else shown.name
        found = [path for path in parent.iterdir() if path.is_dir() and path.name.startswith(start)]
    except (OSError, RuntimeError):
        return []
    base = incomplete[: len(incomplete) - len(start)]
    return sorted(f"{base}{path.name}/" for path in found)
