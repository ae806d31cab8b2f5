"""Names of models: the catalogue's aliases, folders, GGUF files, those of other programs, hub
repositories, and the built-in one.
"""

import difflib
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from localllm.errors import CatalogError, ExitCode
from localllm.files.gguf import MAGIC
from localllm.files.model_file import follow_links
from localllm.files.regular_file import open_regular, read_regular
from localllm.hub.names_here import names_here, with_other_tags
from localllm.hub.quantized_files import ENDING, models_among
from localllm.hub.spellings import bases_of, known_spelling, without_address
from localllm.hub.store_walk import StoreWalk
from localllm.hub.stores import find_by_name
from localllm.user.places import cache_folder, user_catalog

BUILT_IN_MODEL = "pocket"
# pocket, and the model that drafts for it; each a folder of the package.
BUILT_IN_MODELS = (BUILT_IN_MODEL, "pocket-draft")
QUANTIZATIONS = ("int4", "int8", "bf16", "mxfp4-experts")
THINKING = ("none", "hybrid", "always")
TOOLS = (
    *("none", "hermes", "llama3", "mistral", "granite", "command", "glm4", "harmony"),
    *("qwen-coder", "seed", "glm4.5", "gemma4"),
)
_MAX_BYTES = 1_000_000
# Paths that an error lists.
_MOST_LISTED = 20
_PACKAGE = Path(__file__).parents[1]
# A repository, perhaps its revision, and perhaps the tag that chooses one of its GGUF files.
_TAG = re.compile(r"[A-Za-z0-9][\w.-]*")
_REPO_AND_TAG = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    rf"(@(?P<revision>[A-Za-z0-9][\w./-]*))?(:(?P<tag>{_TAG.pattern}))?"
)
# A word followed by a version or a size, as other tools name models too: gemma3, phi-4, x:20b.
_LIKE_A_MODEL = re.compile(
    r"[a-z][a-z.-]*[0-9]+(\.[0-9]+)?b?([-:][a-z0-9._-]+)?"
    r"|[a-z][\w.-]*:(latest|[a-z.-]*[0-9][\w.-]*)"
)
# Families that users ask for by their bare name and that no alias resembles.
_FAMILIES = ("codellama", "falcon", "gemma", "glm", "gpt-oss", "granite", "kimi", "olmo", "phi")
# The part of a GPU's nominal memory that its driver and firmware keep.
_KEPT_BACK_GIB = 0.7
_REQUIRED = ("repo", "licence", "architecture")


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One alias in models.toml; the head of that file explains the fields.

    `revision` None is the newest; `sizes` are the fields of config.json that give the shape.
    """

    alias: str
    repo: str
    licence: str
    architecture: str
    revision: str | None = None
    gated: bool = False
    int4: str | None = None
    quantization: str = "int4"
    thinking: str = "none"
    tools: str = "none"
    recommended: Mapping[str, float] = field(default_factory=dict)
    sampling: Mapping[str, float] = field(default_factory=dict)
    chat_template: str | None = None
    sizes: Mapping[str, Any] | None = None

    def config_json(self) -> dict[str, Any]:
        """The fields of config.json that give the shape. Raises: CatalogError if it is unknown."""
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
    """Where a model comes from: a folder, a GGUF file that is here, or a repository of the hub.

    `tag` chooses a GGUF file of the repository; `chat_template` is the catalogue's, for a
    checkpoint that has none.
    """

    name: str
    folder: Path | None = None
    repo: str | None = None
    revision: str | None = None
    chat_template: str | None = None
    file: Path | None = None
    tag: str | None = None


def load_catalog() -> dict[str, CatalogEntry]:
    """The entries of models.toml, which lies in the package or at the root of a checkout. Unless
    LOCALLLM_NO_CONFIG is set, entries of the user's own file are added or override them.

    Raises: CatalogError, with the line, for a malformed file.
    """
    places = (_PACKAGE / "models.toml", _PACKAGE.parent / "models.toml")
    entries = {**_read_package(next((place for place in places if place.exists()), places[0]))}
    own = user_catalog()
    if not os.environ.get("LOCALLLM_NO_CONFIG") and os.path.lexists(own):
        entries |= _read_catalog(own)
    return entries


def recommended(kind: str, memory_bytes: int) -> CatalogEntry | None:
    """The recommended model for a machine whose memory (`kind` cpu) or GPU (`gpu`) has
    `memory_bytes`; None if the catalogue has none.
    """
    gib = memory_bytes / 2**30 + _KEPT_BACK_GIB
    fitting = [
        (entry.recommended[kind], entry)
        for entry in load_catalog().values()
        if entry.recommended.get(kind, gib + 1) <= gib
    ]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


# A plan of the whole catalogue looks every model up, and reading it takes 15 ms.
@lru_cache(maxsize=1)
def _read_package(path: Path) -> dict[str, CatalogEntry]:
    return _read_catalog(path)


def _read_catalog(path: Path) -> dict[str, CatalogEntry]:
    try:
        text = read_regular(path, _MAX_BYTES).decode("utf-8")
    except OSError as error:
        raise _broken(path, f"the catalogue cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise _broken(path, "the catalogue is not UTF-8", line) from error
    try:
        raw = tomllib.loads(text)
    except ValueError as error:  # its text gives line and column
        raise _broken(path, f"the catalogue cannot be read: {error}") from error
    return {alias: _read_entry(alias, entry, path, text) for alias, entry in raw.items()}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_sampling(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(number, (int, float)) and not isinstance(number, bool)
        for number in value.values()
    )


def _is_recommended(value: object) -> bool:
    return _is_sampling(value) and set(cast(Mapping[str, float], value)) <= {"cpu", "gpu"}


_FIELDS: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(
        ("repo", "licence", "architecture", "revision", "int4", "chat_template"),
        (_is_text, "a string"),
    ),
    "gated": (lambda value: isinstance(value, bool), "true or false"),
    "quantization": (lambda value: value in QUANTIZATIONS, f"one of {', '.join(QUANTIZATIONS)}"),
    "thinking": (lambda value: value in THINKING, f"one of {', '.join(THINKING)}"),
    "tools": (lambda value: value in TOOLS, f"one of {', '.join(TOOLS)}"),
    "recommended": (_is_recommended, "a table of GiB for cpu and gpu"),
    "sampling": (_is_sampling, "a table of numbers"),
    "sizes": (lambda value: isinstance(value, Mapping), "a table"),
}


def _read_entry(alias: str, entry: object, path: Path, text: str) -> CatalogEntry:
    def fail(problem: str, key: str = "") -> CatalogError:
        return _broken(
            path, f"catalogue entry {alias!r:.60}: {problem}", _line_of(text, alias, key)
        )

    if not isinstance(entry, Mapping):
        raise fail("must be a table")
    for key, value in entry.items():
        if key not in _FIELDS:
            near = difflib.get_close_matches(key, _FIELDS, n=1)
            known = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_FIELDS)}"
            raise fail(f"unknown key {key!r:.40}; {known}", key)
        is_valid, expected = _FIELDS[key]
        if not is_valid(value):
            raise fail(f"{key} must be {expected}, found {value!r:.60}", key)
    missing = [key for key in _REQUIRED if key not in entry]
    if missing:
        raise fail(f"{', '.join(missing)} missing")
    return CatalogEntry(alias=alias, **entry)


def _line_of(text: str, alias: str, key: str) -> int | None:
    """The line of an entry's key, or else of its head; None if it is not easily found."""
    head = re.compile(rf"\s*\[\s*[\"']?{re.escape(alias)}[\"']?[\].]")
    found = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("["):
            if found is not None and not head.match(line):
                break
            if found is None and head.match(line):
                found = number
        elif found is not None and key and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return number
    return found


def _broken(path: Path, problem: str, line: int | None = None) -> CatalogError:
    return CatalogError(
        problem,
        where=str(path) if line is None else f"{path}, line {line}",
        hint="fix the file, or ignore it: localllm --no-config ..."
        if path == user_catalog()
        else "reinstall localllm",
        exit_code=ExitCode.USAGE,
    )


def plain_name(name: str) -> str:
    """The folder, the file, the alias or the repository that `name` spells in another way: as an
    address, as other programs do, with capitals, or with the user's own folder as `~`.

    What another program has under exactly this name comes before an alias that resembles it.
    """
    catalog = load_catalog()
    if name in BUILT_IN_MODELS or name in catalog or _is_here(name):
        return name
    if name.startswith("~"):
        expanded = os.path.expanduser(name)
        return expanded if _is_here(expanded) else name
    stored = find_by_name(name)
    if stored is not None:
        return stored.name
    bare = without_address(name)
    repos = {entry.repo.lower(): entry.repo for entry in catalog.values()}
    return known_spelling(bare, (*BUILT_IN_MODELS, *catalog), repos) or bare.rstrip("/") or name


def nearest_models(name: str, cutoff: float = 0.6) -> list[str]:
    """Aliases and models on this machine that the user may have meant, at most three."""
    names = {_with_hyphen(each): each for each in (*BUILT_IN_MODELS, *load_catalog())}
    for each in names_here():
        names |= dict.fromkeys({_with_hyphen(each), *bases_of(each)} - {*names}, each)
    spelt = _with_hyphen(name)
    begun = [each for each in names if each.startswith(spelt)] if len(spelt) > 2 else []
    near = difflib.get_close_matches(spelt, names, n=6, cutoff=cutoff)
    return list(dict.fromkeys(names[each] for each in [*begun, *near]))[:3]


def _with_hyphen(name: str) -> str:
    """A name as aliases are written: other programs write the size after a colon."""
    base, _, size = name.lower().partition(":")
    return f"{base}-{size}" if size and size != "latest" else base


def is_model_name(name: str) -> bool:
    """Whether a lone argument names a model: an alias, a folder, a GGUF file, a model of another
    program, or `org/name[@revision][:tag]`.
    """
    if "\0" in name or len(name) > 1000:
        return False
    if len(name.split()) > 1:  # a question
        return _is_folder(name)
    name = plain_name(name)
    if name in BUILT_IN_MODELS or name in load_catalog() or _is_folder(name):
        return True
    if _REPO_AND_TAG.fullmatch(name) is not None or name.lower().endswith(ENDING):
        return True
    return is_gguf_file(name) or _path_of_tag(name) is not None or find_by_name(name) is not None


def looks_like_model(word: str) -> bool:
    """Whether a lone word that names no model was probably meant to."""
    lower = word.lower()
    if not re.fullmatch(r"[\w.:-]{2,64}", lower):
        return False
    is_versioned = _LIKE_A_MODEL.fullmatch(lower) is not None
    return is_versioned or lower in _FAMILIES or bool(nearest_models(word, cutoff=0.65))


def unknown_model(name: str, hint: str = "") -> CatalogError:
    """The error for an unknown model name, with its other tags here, or else the nearest names."""
    here = with_other_tags(name)
    if here:
        return CatalogError(
            f"unknown model {name!r:.200}",
            where=f"here is {', '.join(here)}",
            hint=f"{here[0]}, or another name; localllm ls lists what is here",
        )
    near = nearest_models(name, cutoff=0.5)
    others = "a folder, or a repository of the hub as org/name; localllm plan lists the known ones"
    return CatalogError(
        f"unknown model {name!r:.200}",
        where=f"nearest: {', '.join(near)}" if near else "",
        hint=hint or (f"one of these, {others}" if near else others),
    )


def resolve_model(name: str) -> ModelSource:
    """Resolve `name`: an alias, else a folder or a GGUF file, else a model that another program has
    downloaded, else `org/name[@revision][:tag]`.

    Raises: CatalogError (exit code 3) for an unknown name, with the nearest ones; exit code 2 for
    another file, a path where nothing is, or one with a tag; exit code 7 for several GGUF models.
    """
    if not name or "\0" in name:
        raise CatalogError(f"{name!r:.100} is not a model name", exit_code=ExitCode.USAGE)
    name = plain_name(name)
    if name in BUILT_IN_MODELS:
        return ModelSource(name, folder=_PACKAGE / name)
    catalog = load_catalog()
    if name in catalog:
        entry = catalog[name]
        return ModelSource(
            name, repo=entry.repo, revision=entry.revision, chat_template=entry.chat_template
        )
    if _is_folder(name):
        only = _only_gguf(Path(name))
        return ModelSource(name, folder=Path(name) if only is None else None, file=only)
    if is_gguf_file(name):
        return ModelSource(name, file=follow_links(Path(name)))
    quantized = _quantized_here(name)
    if quantized is not None:
        return ModelSource(name, folder=quantized)
    stored = find_by_name(name)
    if stored is not None:
        return ModelSource(stored.name, file=stored.file)
    _refuse_tag(name)
    found = _REPO_AND_TAG.fullmatch(name)
    if found is None or found["tag"] is None:  # a tag may be the name of a file there
        _refuse_file(name)
    if found is not None and ".." not in name:
        # Ollama's tag for no particular one.
        tag = None if found["tag"] == "latest" else found["tag"]
        return ModelSource(name, repo=found["repo"], revision=found["revision"], tag=tag)
    _refuse_address(name)
    if _looks_like_path(name):
        raise CatalogError(
            f"there is no folder {name!r:.200}",
            hint="a folder with config.json, tokenizer.json and *.safetensors, or a GGUF file",
            exit_code=ExitCode.USAGE,
        )
    raise unknown_model(name)


def _quantized_here(name: str) -> Path | None:
    """The folder that `quantize` made under this name."""
    folder = cache_folder("quantized") / name
    return folder if Path(name).name == name and _is_folder(str(folder)) else None


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF model of a folder without safetensors; None if there is none.

    Raises: CatalogError (exit code 7), which lists them, for several.
    """
    if any(folder.glob("*.safetensors")):
        return None
    models = [*models_among(StoreWalk().gguf(folder))]
    if len(models) > 1:
        paths = [shlex.quote(str(folder / each)) for each in models[:_MOST_LISTED]]
        raise CatalogError(
            f"{folder} has {len(models)} GGUF models",
            where=", ".join(paths),
            hint=f"the path of one of them: {paths[0]}",
            exit_code=ExitCode.CHECKPOINT,
        )
    return folder / models[0] if models else None


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or ".." in Path(name).parts


def _path_of_tag(name: str) -> str | None:
    """The path of a GGUF file or a folder in front of a tag; None for other names."""
    path, _, tag = os.path.expanduser(name).rpartition(":")
    if not path or _TAG.fullmatch(tag) is None:  # as in `main.py: what is wrong?`
        return None
    return path if is_gguf_file(path) or (_looks_like_path(path) and _is_folder(path)) else None


def _refuse_tag(name: str) -> None:
    """Raises: CatalogError (exit code 2) for a path with a tag."""
    path = _path_of_tag(name)
    if path is not None:
        raise CatalogError(
            f"a path takes no tag: {name:.200}",
            where="a tag chooses among the files of a repository of the hub",
            hint=shlex.quote(path),
            exit_code=ExitCode.USAGE,
        )


def _refuse_address(name: str) -> None:
    """Raises: CatalogError for another address than the hub's."""
    if "://" in name:
        raise CatalogError(
            f"{name:.200} is not an address of a model on the hub",
            hint="https://huggingface.co/org/name, or org/name",
        )


def _refuse_file(name: str) -> None:
    """Raises: CatalogError (exit code 2) for a file that is no GGUF file, or for one of those that
    is not here.
    """
    is_here = is_file(name)
    if not is_here and not name.lower().endswith(ENDING):
        return
    where = "a model is a folder with config.json, tokenizer.json and *.safetensors, or a GGUF file"
    if Path(name).is_symlink() and not is_here:
        what, hint = "is a link to nothing", f"make it lead to a file: {os.readlink(name)} is none"
    elif not is_here:
        what, hint = "does not exist", "check the path"
    else:
        what, folder = "is a file, and no GGUF", Path(name).parent
        has_model = (folder / "config.json").is_file()
        hint = f"the folder that it is in: {folder}" if has_model else "the path of such a one"
    raise CatalogError(f"{name:.200} {what}", where=where, hint=hint, exit_code=ExitCode.USAGE)


def is_gguf_file(name: str) -> bool:
    """Whether there is a GGUF file of this name, known by how it begins; one that only ends like
    one is broken.
    """
    if not is_file(name):
        return False
    try:
        with open_regular(Path(name)) as file:
            return file.read(len(MAGIC)) == MAGIC or name.lower().endswith(ENDING)
    except OSError:  # whoever opens it says why
        return name.lower().endswith(ENDING)


def is_file(name: str) -> bool:
    """Whether there is a file of this name; False for an invalid path."""
    try:
        return bool(name) and Path(name).is_file()
    except (OSError, ValueError):
        return False


def _is_here(name: str) -> bool:
    return _is_folder(name) or is_gguf_file(name) or _quantized_here(name) is not None


def _is_folder(name: str) -> bool:
    try:
        return bool(name) and Path(name).is_dir()
    except (OSError, ValueError):
        return False
