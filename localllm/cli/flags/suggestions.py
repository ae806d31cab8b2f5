"""What the shell offers when Tab is pressed: names of models, sessions and settings."""

import re
from pathlib import Path

import typer

from localllm.cli.flags.settings import flag_of, setting_names
from localllm.errors import LocalLLMError
from localllm.user.settings import DEFAULT_MODEL, read_settings


def models(incomplete: str) -> list[str]:
    """Aliases and models on this machine; without the hub's client, which takes half a second."""
    from localllm.hub.catalog import BUILT_IN_MODELS, load_catalog
    from localllm.hub.names_here import names_here

    try:
        names = {*BUILT_IN_MODELS, *load_catalog()}
    except LocalLLMError:
        names = {*BUILT_IN_MODELS}
    names |= names_here()
    return sorted(name for name in names if name.startswith(incomplete)) + _places(incomplete)


def programs(incomplete: str) -> list[str]:
    """What `localllm launch` can start."""
    from localllm.launch.programs import PROGRAMS

    return sorted(name for name in PROGRAMS if name.startswith(incomplete))


def removable(incomplete: str) -> list[str]:
    """Models on this machine that can be deleted."""
    from localllm.hub.catalog import load_catalog
    from localllm.hub.names_here import fetched_names, quantized_names

    fetched = fetched_names()
    try:
        aliases = {entry.repo: alias for alias, entry in load_catalog().items()}
    except LocalLLMError:
        aliases = {}
    names = {aliases.get(repo, repo) for repo in fetched} | quantized_names()
    return sorted(name for name in names if name.startswith(incomplete))


def cache_kinds(incomplete: str) -> list[str]:
    """Kinds that `cache clear` accepts."""
    from localllm.user.cache_kinds import cache_kinds

    return [kind.name for kind in cache_kinds(None) if kind.name.startswith(incomplete)]


def settings(context: typer.Context, incomplete: str) -> list[str]:
    """Names that `config set` takes."""
    names = setting_names(context)
    if context.info_name == "unset":
        names = [name.replace("_", "-") for name in _set_by_the_user()]
    return [name for name in names if name.startswith(incomplete)]


def _set_by_the_user() -> list[str]:
    try:
        return sorted(read_settings())
    except LocalLLMError:
        return []


def setting_values(context: typer.Context, incomplete: str) -> list[str]:
    """Values of the setting that is named before."""
    name = context.params.get("name") or ""
    if name.replace("-", "_") == DEFAULT_MODEL:
        return models(incomplete)
    flag = flag_of(context, name)
    if flag is None:
        return []
    return [item.value for item in flag.shell_complete(context, incomplete)]


def sessions(incomplete: str) -> list[str]:
    """Names of saved sessions; the number of one whose name a shell would not take as one word."""
    from localllm.chat.store import SessionStore
    from localllm.user.places import sessions_file

    try:
        rows = SessionStore(sessions_file()).rows() if sessions_file().exists() else []
    except LocalLLMError:
        return []
    names = [
        row.name if row.name and re.fullmatch(r"[\w@%+=:,./-]+", row.name) else str(row.id)
        for row in rows
    ]
    return [name for name in names if name.startswith(incomplete)]


def gpus(incomplete: str) -> list[str]:
    """GPUs whose data sheets are known."""
    from localllm.cost.gpus import GPUS

    return [name for name in GPUS if name.startswith(incomplete)]


def _places(incomplete: str) -> list[str]:
    """Folders and GGUF files that complete `incomplete`, if it looks like a path."""
    if not incomplete.startswith((".", "/", "~")):
        return []
    shown = Path(incomplete)
    try:
        parent = shown.expanduser() if incomplete.endswith("/") else shown.expanduser().parent
        start = "" if incomplete.endswith("/") else shown.name
        found = [path for path in parent.iterdir() if path.name.startswith(start)]
        endings = {path: _ending(path) for path in found}
    except (OSError, RuntimeError):
        return []
    base = incomplete[: len(incomplete) - len(start)]
    return sorted(
        f"{base}{path.name}{ending}" for path, ending in endings.items() if ending is not None
    )


def _ending(path: Path) -> str | None:
    """What stands behind a name: of a folder, or of a GGUF file; None for what is no model."""
    if path.is_dir():
        return "/"
    return "" if path.suffix.lower() == ".gguf" else None
