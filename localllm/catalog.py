"""Names of models: the catalogue's aliases, hub repositories, folders, and the built-in one."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.errors import CatalogError, ExitCode

BUILT_IN_MODEL = "pocket"
# pocket, and the model that drafts for it; each a folder of the package.
BUILT_IN_MODELS = (BUILT_IN_MODEL, "pocket-draft")
_PACKAGE = Path(__file__).parent
_REPO_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[A-Za-z0-9][\w./-]*)?")
_REQUIRED = ("repo", "licence", "architecture")


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One alias of models.toml; its template is for a repository that has none.

    `sizes` are the fields of config.json that give the model's shape, where the catalogue knows it.
    """

    alias: str
    repo: str
    revision: str
    licence: str
    architecture: str
    chat_template: str | None = None
    sizes: Mapping[str, Any] | None = None

    def config_json(self) -> dict[str, Any]:
        """What config.json would say of the shape. Raises: CatalogError where it is not known."""
        if self.sizes is None:
            known = [alias for alias, entry in load_catalog().items() if entry.sizes is not None]
            raise CatalogError(
                f"the catalogue does not know the shape of {self.alias}",
                where=f"known: {', '.join(known)}",
                hint="one of these, or the model itself",
                exit_code=ExitCode.USAGE,
            )
        return {"architectures": [self.architecture], **self.sizes}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: a folder, or a repository of the hub.

    `chat_template` is the catalogue's, for a checkpoint that brings none.
    """

    name: str
    folder: Path | None = None
    repo: str | None = None
    revision: str | None = None
    chat_template: str | None = None


def load_catalog() -> dict[str, CatalogEntry]:
    """The entries of models.toml, which lies in the package, or at the root of a checkout.

    Raises: CatalogError for a file that is broken.
    """
    places = (_PACKAGE / "models.toml", _PACKAGE.parent / "models.toml")
    path = next((place for place in places if place.exists()), places[0])
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CatalogError(
            f"the catalogue cannot be read: {error}", where=str(path), exit_code=ExitCode.USAGE
        ) from error
    return {alias: _read_entry(alias, entry, path) for alias, entry in raw.items()}


def _read_entry(alias: str, entry: object, path: Path) -> CatalogEntry:
    known = (*_REQUIRED, "revision", "chat_template")
    sizes = entry.get("sizes") if isinstance(entry, Mapping) else None
    if not isinstance(entry, Mapping) or not all(
        isinstance(value, str) and key in known for key, value in entry.items() if key != "sizes"
    ):
        problem = f"a table of texts with the keys {', '.join(known)}"
    elif sizes is not None and not isinstance(sizes, Mapping):
        problem = "to have a table as its sizes"
    elif any(key not in entry for key in _REQUIRED):
        problem = f"to have {', '.join(_REQUIRED)}"
    else:
        return CatalogEntry(
            alias=alias,
            repo=entry["repo"],
            revision=entry.get("revision", "main"),
            licence=entry["licence"],
            architecture=entry["architecture"],
            chat_template=entry.get("chat_template"),
            sizes=sizes,
        )
    raise CatalogError(
        f"catalogue entry {alias!r} must be {problem}", where=str(path), exit_code=ExitCode.USAGE
    )


def is_model_name(name: str) -> bool:
    """Whether a lone argument is meant as a model: an alias, a folder, or `org/name[@revision]`."""
    if "\0" in name or len(name) > 1000:
        return False
    if name in BUILT_IN_MODELS or name in load_catalog():
        return True
    return _REPO_NAME.fullmatch(name) is not None or _is_folder(name)


def resolve_model(name: str) -> ModelSource:
    """What `name` stands for: an alias, else a folder, else `org/name[@revision]`.

    Raises: CatalogError (exit code 3) for an unknown name, with the nearest ones; exit code 2 for
    a name that tries to be a path outside.
    """
    if not name or "\0" in name:
        raise CatalogError(f"{name!r:.100} is not a model name", exit_code=ExitCode.USAGE)
    if name in BUILT_IN_MODELS:
        return ModelSource(name, folder=_PACKAGE / name)
    catalog = load_catalog()
    if name in catalog:
        entry = catalog[name]
        return ModelSource(
            name, repo=entry.repo, revision=entry.revision, chat_template=entry.chat_template
        )
    if _is_folder(name):
        return ModelSource(name, folder=Path(name))
    if _REPO_NAME.fullmatch(name) and ".." not in name:
        repo, _, revision = name.partition("@")
        return ModelSource(name, repo=repo, revision=revision or None)
    looks_like_path = name.startswith((".", "/", "~")) or ".." in Path(name).parts
    if looks_like_path:
        raise CatalogError(
            f"there is no folder {name!r:.200}",
            hint="a folder with config.json, tokenizer.json and *.safetensors",
            exit_code=ExitCode.USAGE,
        )
    names = [*BUILT_IN_MODELS, *catalog]
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.4)
    raise CatalogError(
        f"unknown model {name!r:.200}",
        where=f"nearest: {', '.join(near)}" if near else f"known: {', '.join(names)}",
        hint="one of these, a folder, or a repository of the hub as org/name",
    )


def _is_folder(name: str) -> bool:
    try:
        return bool(name) and Path(name).is_dir()
    except (OSError, ValueError):
        return False
