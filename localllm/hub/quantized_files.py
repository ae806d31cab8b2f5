"""GGUF files by name: which of them are models, and which one a tag such as `Q4_K_M` means.

A repository holds the same model in many sizes, and often several files of one of them. What a name
says is only for choosing; what is in a file is read from its header.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from localllm.errors import CatalogError

ENDING = ".gguf"
# Parts of the names of files that belong to a model. Source: `gguf_filename_is_model` of llama.cpp;
# drafters in small letters only, since a model with such heads of its own is called `X-MTP-Q8_0`.
_NO_MODELS = ("mmproj", "imatrix")
_DRAFTERS = ("mtp-", "eagle3-", "dflash-", "dspark-")
# Of at most 999 files.
_SPLIT = re.compile(
    r"(?P<name>.+)-(?P<number>[0-9]{5})-of-(?P<count>00(?!000)[0-9]{3})\.gguf", re.IGNORECASE
)
# As the hub's pages name files, in capitals. Source: `tasks/src/gguf.ts` of huggingface.js.
_LABEL = re.compile(
    r"(?<![A-Z0-9])(?:UD-)?"
    r"(?:BF16|F16|F32|MXFP4(?:_MOE)?|NVFP4|TQ[12]_0"
    r"|IQ[1-4]_(?:XXS|XS|NL|S|M)|Q[1-8]_[01K])"
    r"(?:_[A-Z]+)?(?![A-Z0-9]|_[0-9])"
)
# What is taken where no tag says which, in this order.
_DEFAULTS = ("Q4_K_M", "Q8_0")
# Names that an error lists.
_MOST_LISTED = 40


def is_model_file(name: str) -> bool:
    """Whether a path is that of a GGUF model, or of the first of the files that it is split in."""
    file = PurePosixPath(name).name
    lower = file.lower()
    if not lower.endswith(ENDING) or any(part in lower for part in _NO_MODELS):
        return False
    split = _SPLIT.fullmatch(file)
    is_first = split is None or int(split["number"]) == 1
    return is_first and not any(part in file for part in _DRAFTERS)


def label_of(name: str) -> str | None:
    """How a file is quantized, by its path: `Q4_K_M`, `UD-Q4_K_XL`; None if that does not tell."""
    found = _LABEL.findall(name.upper())
    return found[-1] if found else None


def tag_of(name: str) -> str:
    """What chooses a file among others: its label, or else its name without endings."""
    return label_of(name) or stem_of(name)


def stem_of(name: str) -> str:
    """A file's name without its ending, and without its number in a split set."""
    file = PurePosixPath(name).name
    split = _SPLIT.fullmatch(file)
    return split["name"] if split is not None else file[: -len(ENDING)]


def files_of(name: str) -> list[str]:
    """The paths of all files of a model, by that of the first one."""
    split = _SPLIT.fullmatch(name)
    if split is None:
        return [name]
    start, count, ending = split["name"], split["count"], name[-len(ENDING) :]
    return [f"{start}-{i:05}-of-{count}{ending}" for i in range(1, int(count) + 1)]


def models_among(sizes: Mapping[str, int]) -> dict[str, int]:
    """The models among files, by the path of the first file of each, with all their bytes.

    `sizes`: bytes of files by path. One whose other files are missing is none, nor is a file in a
    folder of a folder, from where none is opened.
    """
    models = {}
    for name in sorted(sizes):
        if is_model_file(name) and name.count("/") <= 1:
            files = files_of(name)
            if all(file in sizes for file in files):
                models[name] = sum(sizes[file] for file in files)
    return models


def choose(sizes: Mapping[str, int], tag: str | None, repo: str) -> list[str]:
    """The files of the model that `tag` means; without one, the usual quantization or the only one.

    `tag` is a label, the name of a file, or a part of one; capitals do not matter. `sizes`: bytes
    of files by path. Raises: CatalogError, which lists what there is, if none is meant or several.
    """
    models = models_among(sizes)
    found = _matching(models, tag) if tag is not None else usual(models)
    if len(found) == 1:
        return files_of(found[0])
    listed = [*(found or models)][:_MOST_LISTED]
    if tag is None:
        problem = f"{repo} has {len(models)} GGUF models; a tag says which one"
    elif found:
        problem = f"{repo} has {len(found)} files that {tag!r:.80} may mean"
    else:
        problem = f"{repo} has no GGUF file {tag!r:.80}"
    by_name = len(found) > 1 and len({tag_of(name).upper() for name in found}) < len(found)
    told = {name: stem_of(name) if by_name else tag_of(name) for name in listed}
    raise CatalogError(
        problem,
        where=", ".join(f"{told[name]} ({gigabytes(models[name])})" for name in listed)
        or "it has no GGUF file that holds a model",
        hint=f"{repo}:{told[listed[0]]}" if listed else "check the name; its page lists the files",
    )


def usual(models: Iterable[str]) -> list[str]:
    """Those of models' names that are quantized as most would take; all of them if none is."""
    names = [*models]
    for label in _DEFAULTS:
        found = [name for name in names if label_of(name) == label]
        if found:
            return found
    return names


def gigabytes(num_bytes: int) -> str:
    """A size in a message."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _matching(models: Iterable[str], tag: str) -> list[str]:
    """The models that a tag means: by name, else by label, else by what their paths contain."""
    wanted, names = tag.upper().removesuffix(ENDING.upper()), [*models]
    # As llama.cpp does, which finds UD-Q4_K_M by Q4_K_M too, and q4 in model-q4.gguf.
    part = re.compile(rf"(?<![A-Z0-9]){re.escape(wanted)}[./-]")
    return (
        [name for name in names if stem_of(name).upper() == wanted]
        or [name for name in names if label_of(name) == wanted]
        or [name for name in names if part.search(name.upper())]
    )
