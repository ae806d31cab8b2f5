"""Which earlier prompt a prompt is compared with, and which lines a rule may move."""

from typing import Any

import pytest

from localllm.errors import RequestError
from localllm.server.earlier_prompts import Digest, EarlierPrompts
from localllm.server.volatile_lines import parse_rule

OWNER = b"a"


def digest(*texts: str) -> Digest:
    roles = ("system", "user", "assistant")
    messages: list[dict[str, Any]] = []
    for text in texts:
        role = next(each for each in roles if each.startswith(text[0]))
        messages.append({"role": role, "content": text})
    return Digest.of(messages, None)


def test_of_prompts_that_share_as_much_one_with_the_same_system_prompt_is_nearest() -> None:
    earlier = EarlierPrompts()
    earlier.remember(OWNER, "plain", digest("u question"), [1, 2])
    earlier.remember(OWNER, "with a system prompt", digest("s brief", "u question"), [3, 1, 2])
    found = earlier.nearest(OWNER, digest("u question"))
    assert found is earlier.find(OWNER, "plain")
    found = earlier.nearest(OWNER, digest("s brief", "u question"))
    assert found is earlier.find(OWNER, "with a system prompt")


def test_a_prompt_that_shares_more_is_nearer_and_others_do_not_count() -> None:
    earlier = EarlierPrompts()
    earlier.remember(OWNER, "long", digest("s old", "u one", "a two", "u three"), [1])
    earlier.remember(OWNER, "short", digest("s new", "u one"), [2])
    now = digest("s new", "u one", "a two", "u four")
    assert earlier.nearest(OWNER, now) is earlier.find(OWNER, "long")
    assert earlier.nearest(b"other", now) is None
    assert earlier.nearest(OWNER, digest("u nothing of these")) is None


@pytest.mark.parametrize("num_tokens", [1, 1 << 18])
def test_who_asks_much_makes_nobody_else_be_forgotten(num_tokens: int) -> None:
    """As many as are looked through, or as many as fit."""
    earlier = EarlierPrompts()
    earlier.remember(b"other", "kept", digest("u question"), [1, 2])
    for number in range(600):
        earlier.remember(OWNER, f"{number}", digest("u question"), [5] * num_tokens)
    assert earlier.find(b"other", "kept") is not None
    assert earlier.find(OWNER, "599") is not None
    assert earlier.find(OWNER, "0") is None


@pytest.mark.parametrize("rule", ["", ".*", "(a|)", "["])
def test_a_rule_that_would_move_everything_is_refused(rule: str) -> None:
    with pytest.raises(RequestError, match=r"empty lines|not a valid regular"):
        parse_rule(rule)
