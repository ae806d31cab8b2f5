"""The tokens that a checkpoint's small files add to the vocabulary of `tokenizer.json`.

Which file names which tokens has changed over the years. The ids are those of transformers 5,
which still reads all of them: a token that the vocabulary lacks gets the next free id, whatever id
the file says. `added_tokens_decoder` in tokenizer_config.json makes special_tokens_map.json and
added_tokens.json void.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from localllm.errors import CheckpointError, brief
from localllm.files.json_file import read_json_object
from localllm.files.model_file import has_file

CONFIG, SPECIAL_MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
# The files read here; any of them changes what a text's ids are.
FILES = (CONFIG, SPECIAL_MAP, ADDED)
# Characters of a token; the longest in common vocabularies have some hundred.
MAX_TOKEN_CHARS = 4096
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_OLDER_EXTRA = "additional_special_tokens"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """`listed`: by the ids that a file says; where `is_older`, those of `tokenizer.json` beat them.
    `named`: special tokens by name, `bos_token` and the like; `extra`: those without one.
    """

    listed: Mapping[int, AddedToken]
    named: Mapping[str, AddedToken]
    extra: tuple[AddedToken, ...] = ()
    is_older: bool = False

    @property
    def texts(self) -> dict[str, str]:
        """The special tokens' texts by name, as a chat template reads them."""
        return {name: each.content for name, each in self.named.items() if name.endswith("_token")}

    def add_to(self, backend: Backend) -> None:
        """Add to `backend` what it lacks; a listed token also replaces one with other flags."""
        known = backend.get_added_tokens_decoder()
        same = {repr(token) for token in known.values()}
        named = {token.content for token in self.named.values()}
        special = {token.content for token in known.values() if token.special} | named
        adding = [
            self.listed[i]
            for i in sorted(self.listed)
            if repr(self.listed[i]) not in same and not (self.is_older and i in known)
        ]
        if self.is_older:
            adding += [each for each in known.values() if each.content in named]
        contents = {token.content for token in (*known.values(), *adding)}
        for token in (*self.named.values(), *self.extra):
            if token.content not in contents:
                contents.add(token.content)
                adding.append(token)
        for token in adding:
            token.special = token.special or token.content in special
        backend.add_tokens(adding)


def read_added_tokens(folder: Path) -> AddedTokens:
    """What the files in `folder` say; each may be missing. Raises: CheckpointError."""
    origin = folder / CONFIG
    config = _read(origin)
    named, extra = _special_tokens(config, origin)
    if "added_tokens_decoder" not in config:
        return _with_older_files(folder, named, extra)
    listed = config["added_tokens_decoder"]
    if listed is not None and not isinstance(listed, Mapping):
        raise _refused(origin, "added_tokens_decoder", "an object", listed)
    tokens = {
        _id(i, origin): _token(token, "added_tokens_decoder", origin)
        for i, token in (listed or {}).items()
    }
    return AddedTokens(tokens, _in_order(named), tuple(extra))


def _with_older_files(
    folder: Path, named: dict[str, AddedToken], extra: list[AddedToken]
) -> AddedTokens:
    """With what special_tokens_map.json and added_tokens.json say besides the config."""
    older = _all_special(_read(folder / SPECIAL_MAP))
    older_named, older_extra = _special_tokens(older, folder / SPECIAL_MAP)
    named = _in_order(named | older_named)
    if "extra_special_tokens" in older or not extra:
        extra = [*extra, *older_extra]
    special = {token.content for token in (*named.values(), *extra)}
    origin = folder / ADDED
    tokens = {}
    for text, i in _read(origin).items():
        flags = {"special": text in special, "normalized": text not in special}
        tokens[_id(i, origin)] = _token({"content": text, **flags}, ADDED, origin)
    return AddedTokens(tokens, named, tuple(extra), is_older=True)


def _in_order(named: Mapping[str, AddedToken]) -> dict[str, AddedToken]:
    """The names that all models have come first."""
    return {name: named[name] for name in dict.fromkeys((*_NAMED, *named)) if name in named}


def _special_tokens(
    config: Mapping[str, Any], origin: Path
) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """The special tokens with a name, and those without one."""
    named = {
        name: _token(value, name, origin)
        for name, value in config.items()
        if (name in _NAMED and value is not None) or (name.endswith("_token") and _is_token(value))
    }
    name = "extra_special_tokens" if config.get("extra_special_tokens") else _OLDER_EXTRA
    value = config.get(name)
    if isinstance(value, Mapping):
        named |= {each: _token(token, each, origin) for each, token in value.items()}
        return named, []
    if value is not None and not isinstance(value, list):
        raise _refused(origin, name, "a list of tokens", value)
    return named, [_token(token, name, origin) for token in value or []]


def _all_special(value: Any) -> Any:
    """special_tokens_map.json, where a token given as an object is special without saying so."""
    if isinstance(value, Mapping):
        parts = {name: _all_special(part) for name, part in value.items()}
        return {**parts, "special": True} if "content" in value else parts
    return [_all_special(part) for part in value] if isinstance(value, list) else value


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and "content" in value)


def _token(value: Any, name: str, origin: Path) -> AddedToken:
    """A token that is given as its text, then it is special, or as an object with its flags."""
    given = {"content": value, "special": True} if isinstance(value, str) else value
    text = given.get("content") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(text, str):
        raise _refused(origin, name, "a token", value)
    flags = {flag: given[flag] for flag in _FLAGS if given.get(flag) is not None}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise _refused(origin, name, "a token with flags that are true or false", value)
    if len(text) > MAX_TOKEN_CHARS or any("\ud800" <= char < "\ue000" for char in text):
        raise _refused(origin, name, f"of at most {MAX_TOKEN_CHARS:,} characters", text)
    return AddedToken(text, **flags)


def _id(value: Any, origin: Path) -> int:
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if type(number) is not int or not 0 <= number < 1 << 31:
        raise _refused(origin, "a token's id", "a whole number of at least 0", value)
    return number


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if has_file(path) else {}


def _refused(origin: Path, name: str, expected: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"{origin.name}: {name} must be {expected}, found {brief(value)}",
        where=str(origin),
        hint="another copy of the file, or report it to the model's publisher",
    )
