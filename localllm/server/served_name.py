"""What clients call a model."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServedName:
    """`is_any`: every other name is taken for this one."""

    text: str
    is_any: bool = False


def name_for_clients(name: str, folder: Path) -> str:
    """The name of a model whose files are in `folder`: a typed path is not it, since it tells where
    the user keeps files, and clients would have to know it.
    """
    folder = folder.resolve()
    try:
        is_path = Path(name).expanduser().resolve() == folder
    except (OSError, RuntimeError, ValueError):  # a name that is no path
        is_path = False
    if not is_path:
        return name
    kept = folder.parent.parent.name  # models--ORG--NAME/snapshots/COMMIT, in the hub's cache
    if folder.parent.name == "snapshots" and kept.startswith("models--"):
        return kept.removeprefix("models--").replace("--", "/", 1)
    return folder.name or name
