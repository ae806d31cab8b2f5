"""Parse the values of flags."""

import re
from collections.abc import Sequence
from typing import TypeVar

from localllm.drafting.speculation_config import SpeculationConfig
from localllm.errors import RequestError
from localllm.text.prompt import THINK_LEVELS, ThinkLevel

ChoiceT = TypeVar("ChoiceT", bound=str)


def parse_size(text: str, param: str) -> int:
    """Bytes from `512MiB`, `2GiB`, `1.5g` or a number of bytes. Raises: RequestError."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,3})?) ?([kmgt]?)(i?b)?", text.strip().lower())
    if found is None or (found[2] == "" and "." in found[1]):
        raise RequestError(
            f"--{param} must be a size like 512MiB or 2GiB, found {text!r:.40}", param=param
        )
    if not found[2] and not found[3] and 0 < int(found[1]) < 1024:
        raise RequestError(
            f"--{param} {text} needs a unit", param=param, hint=f"--{param} {text}GiB"
        )
    # A letter alone or with iB means powers of 1,024; with B, as disks are sold, powers of 1,000.
    unit = 1000 if found[3] == "b" else 1024
    return int(float(found[1]) * unit ** " kmgt".index(found[2] or " "))


def parse_expert_memory(text: str | None) -> int | None:
    """Bytes, or None for `auto`. Raises: RequestError."""
    if text is None or text.lower() == "auto":
        return None
    return parse_size(text, "expert-memory")


def parse_context(text: str | None) -> int | None:
    """`4096`, `32k` (times 1,024) or `auto` (None), which llama.cpp writes as 0. Raises:
    RequestError.
    """
    if text is None or text.lower() in ("auto", "0"):
        return None
    digits = text[:-1] if text[-1:] in ("k", "K") else text
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= 12
    if not is_number or int(digits) == 0:
        raise RequestError(
            f"--ctx must be like 4096, 32k or auto, found {text!r:.40}",
            param="ctx",
            hint="-c is the context; --continue goes on with the last conversation",
        )
    return int(digits) * (1024 if digits != text else 1)


def parse_keepalive(text: str | None) -> float | None:
    """Seconds from `5m`, `90s`, `2h` or a number of seconds; negative: forever. Raises:
    RequestError.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(-?[0-9]{1,7}(?:\.[0-9]{1,3})?) ?(s|m|min|h)?", text.strip().lower())
    if found is None:
        raise RequestError(
            f"--keepalive must be like 5m, 90s, 0 or -1, found {text!r:.40}", param="keepalive"
        )
    return float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[found[2] or "s"]


def parse_speculation(drafter: str, max_draft: int, ngram: str) -> SpeculationConfig:
    """Parse `--spec`, `--spec-max` and `--spec-ngram`. Raises: RequestError."""
    found = re.fullmatch("([0-9]{1,3}):([0-9]{1,3})", ngram)
    if found is None:
        raise RequestError(
            f"--spec-ngram must be like 2:8, found {ngram!r:.40}", param="spec_ngram"
        )
    return SpeculationConfig(drafter, max_draft, int(found[1]), int(found[2]))


def parse_logit_bias(entries: list[str]) -> dict[int, float]:
    """Parse `ID=BIAS` entries. Raises: RequestError."""
    biases = {}
    for entry in entries:
        token_id, _, bias = entry.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError as error:
            raise RequestError(
                f"--logit-bias must be like 42=-1.5, found {entry!r:.60}", param="logit_bias"
            ) from error
    return biases


def parse_choice(name: str, text: str, choices: Sequence[ChoiceT]) -> ChoiceT:
    """Parse the value of the flag `name`, one of some words. Raises: RequestError."""
    for choice in choices:
        if text == choice:
            return choice
    *others, last = choices
    known = f"{', '.join(others)} or {last}" if others else last
    raise RequestError(f"--{name} must be {known}, found {text!r:.40}", param=name)


def parse_think(text: str | None) -> ThinkLevel | None:
    """Parse the value of `--think`. Raises: RequestError."""
    return None if text is None else parse_choice("think", text, THINK_LEVELS)
