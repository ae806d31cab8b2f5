"""Names of models as other programs and web pages spell them."""

import re
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

# Names in front of a model's that say where others get it from.
_HUBS = ("huggingface.co", "www.huggingface.co", "hf.co", "hf-mirror.com")
_OLLAMA = ("ollama.com", "www.ollama.com", "registry.ollama.ai")
_PREFIXES = ("ollama_chat/", "ollama/", "library/", "hf://")
# Organisations have such names too, so two more parts must follow.
_LONG_PREFIXES = ("huggingface/", "hf/", "models/")
# Behind an address: a view of a repository, its revision, and a file.
_VIEW = re.compile(
    r"(?P<repo>[^/]+/[^/]+)/(tree|blob|resolve|raw|commit)/(?P<revision>[^/]+)(/.*)?"
)
_PAGE = re.compile(r"(?P<repo>[^/]+/[^/]+)/(discussions|commits|settings)(/.*)?")
# The end of a tag that says how a file is quantized, or that a model is for chats, as ours are.
_QUANTIZED = re.compile(r"[-:]((ud-)?i?q[0-9][0-9a-z_]*|fp16|bf16|f16|fp32|f32|mxfp4|gguf)$")
_FOR_CHATS = re.compile(r"[-:](latest|instruct|it|chat|[0-9]{4})$")
# What Ollama means by a name without a size.
_UNSIZED = {
    "deepseek-r1": "deepseek-r1-7b", "gpt-oss": "gpt-oss-20b",
    "granite3.3": "granite-3.3-8b", "hermes3": "hermes-3-8b", "llama3.1": "llama-3.1-8b",
    "llama3.2": "llama-3.2-3b", "mistral": "mistral-7b", "mistral-small": "mistral-small-24b",
    "olmo2": "olmo2-7b", "phi4:14b": "phi-4", "qwen2.5": "qwen2.5-7b",
    "qwen2.5-coder": "qwen2.5-coder-7b", "qwen3": "qwen3-8b",
    "smollm2": "smollm2-1.7b", "tinyllama": "tinyllama-1.1b",
}  # fmt: skip


def without_address(name: str) -> str:
    """`name` without an address or a program's name in front; with the revision that an address of
    the hub names.
    """
    name = name.strip()
    host, _, path = re.sub(r"^https?://", "", name).partition("/")
    if host.lower() in _OLLAMA:
        return urlsplit(path).path.strip("/").removeprefix("library/")
    if host.lower() in _HUBS:
        path = urlsplit(path).path.strip("/").removeprefix("api/").removeprefix("models/")
        view = _VIEW.fullmatch(path) or _PAGE.fullmatch(path)
        if view is None:
            return path
        revision = view.groupdict().get("revision") or "main"
        return view["repo"] + ("" if revision == "main" else f"@{revision}")
    for prefix in _PREFIXES:
        rest = name.removeprefix(prefix)
        if rest != name and rest.strip("/"):
            return without_address(rest)
    for prefix in _LONG_PREFIXES:
        rest = name.removeprefix(prefix)
        if rest != name and rest.strip("/").count("/") == 1:
            return rest
    return name


def bases_of(name: str) -> set[str]:
    """What a model's name without its tag may be shortened to, in small letters: the name alone,
    without who published it, and without `-GGUF`.
    """
    base = without_address(name).lower().partition(":")[0]
    alone = base.rpartition("/")[2]
    return {base, alone, alone.removesuffix("-gguf")}


def known_spelling(name: str, aliases: Iterable[str], repos: Mapping[str, str]) -> str | None:
    """The alias, or the repository, that `name` spells in another way: with capitals, other
    punctuation, or a tag that says what every alias is. `repos`: the catalogue's, in small letters.
    """
    lower = name.lower().strip("/").removeprefix("meta-")
    if lower in repos:
        return repos[lower]
    known = {_key(alias): alias for alias in aliases}
    for shorter in _shortened(lower):
        found = known.get(_key(shorter)) or known.get(_key(_UNSIZED.get(shorter, "")))
        if found is not None:
            return found
    return None


def _shortened(name: str) -> Iterable[str]:
    """`name`, and what is left of it without each tag at its end."""
    yield name
    for ending in (_QUANTIZED, _FOR_CHATS, _FOR_CHATS):
        shorter = ending.sub("", name)
        if shorter != name:
            yield (name := shorter)


def _key(name: str) -> str:
    return re.sub(r"[-_:\s]", "", name)
