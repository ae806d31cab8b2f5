"""What coding agents do to a cache: long conversations whose head changes with every turn."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import Server, end, start_server
from server.tool_calling import TEMPLATES, TOOLS

from localllm.hub.checkpoint import open_checkpoint

TURNS = 12
BEHIND = 75  # sentences after what changes
WORDS = "read the file then change one line and run every test again before you answer".split()  # noqa: SIM905
OWN_TOOLS = [
    {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]}
    for each in TOOLS
]


def sentences(count: int, seed: int) -> str:
    """About ten tokens each."""
    lines = (
        " ".join(WORDS[(i * (seed + 3) + k * 5) % len(WORDS)] for k in range(9)) + f" {i}."
        for i in range(count)
    )
    return " ".join(lines)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with a context of 16,384 tokens, whose text is of no interest here."""
    folder = tmp_path_factory.mktemp("model") / "pocket"
    shutil.copytree(open_checkpoint().folder, folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace(": 2048", ": 16384"))
    (folder / "chat_template.jinja").write_text(TEMPLATES["hermes"])
    return folder


@pytest.fixture
def agent_server(server_home: Path, model: Path) -> Callable[..., Any]:
    @contextmanager
    def start(*flags: str) -> Iterator[Server]:
        named = ("--served-model-name", "pocket", "--max-num-seqs", "2")
        server = start_server(server_home, *named, *flags, model=str(model))
        yield server
        end(server)

    return start


def system(turn: int) -> str:
    changing = f"Now it is 10:{turn:02}:00.\nThere are {turn} changed files."
    return f"{sentences(115, 1)}\n{changing}\n{sentences(BEHIND, 2)}"


def session(
    server: Server, turns: int = TURNS
) -> Iterator[tuple[int, dict[str, Any], httpx.Headers]]:
    """Turns of an agent that calls tools: each one's number, usage and headers."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Mend the first test."}]
    with httpx.Client(base_url=server.url, timeout=300) as client:
        for turn in range(turns):
            body = {
                "model": "pocket",
                "max_tokens": 300,  # a call that is cut is none
                "temperature": 0,
                "system": [{"type": "text", "text": system(turn)}],
                "messages": messages,
                "tools": OWN_TOOLS,
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            }
            response = client.post("/v1/messages", json=body)
            assert response.status_code == 200, response.text
            answer = response.json()
            yield turn, answer["usage"], response.headers
            [call] = answer["content"]
            found = {
                "type": "tool_result",
                "tool_use_id": call["id"],
                "content": sentences(2, turn + 7),
            }
            messages.append({"role": "assistant", "content": answer["content"]})
            messages.append({"role": "user", "content": [found]})


def test_what_stands_before_a_change_is_cached_and_the_change_is_told(
    agent_server: Callable[..., Any],
) -> None:
    with agent_server() as server:
        for turn, usage, headers in session(server, turns=5):
            assert "x-localllm-moved-lines" not in headers
            if turn == 0:
                assert "why" not in usage
                continue
            changed = usage["why"]["first_difference"]
            assert (changed["message"], changed["role"]) == (1, "system")
            # A token may be one digit or two.
            assert f"{turn - 1:02}:00.".endswith(changed["before"].split()[0])
            assert f"{turn:02}:00.".endswith(changed["now"].split()[0])
            assert usage["cache_read_input_tokens"] >= 0.95 * changed["token"]
            # All behind the change is computed again, and that is said too.
            assert usage["why"]["tokens_computed_again"] > 10 * BEHIND


def test_under_a_rule_nearly_all_is_cached_and_every_answer_says_so(
    agent_server: Callable[..., Any],
) -> None:
    rules = ("--volatile", r"Now it is .*", "--volatile", r"There are \d+ changed files\.")
    cached = total = 0
    with agent_server(*rules) as server:
        for turn, usage, headers in session(server):
            assert headers["x-localllm-moved-lines"] == "2"
            assert usage["why"]["moved_lines"] == 2
            if turn:
                cached += usage["cache_read_input_tokens"]
                total += usage["cache_read_input_tokens"] + usage["input_tokens"]
    assert cached >= 0.95 * total


def test_an_answer_can_be_named_to_compare_with(agent_server: Callable[..., Any]) -> None:
    def ask(client: httpx.Client, head: str, previous: str | None, **more: Any) -> dict[str, Any]:
        body = {
            "model": "pocket",
            "max_tokens": 1,
            "system": head,
            "messages": [{"role": "user", "content": "Go on."}],
            "diagnostics": {"previous_message_id": previous},
            **more,
        }
        found: dict[str, Any] = client.post("/v1/messages", json=body).json()
        return found

    with agent_server() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        first = ask(client, system(1), None)
        assert first["diagnostics"] is None
        assert ask(client, system(1), first["id"])["diagnostics"] is None
        changed = ask(client, system(2), first["id"])["diagnostics"]["cache_miss_reason"]
        assert changed["type"] == "system_changed"
        assert changed["cache_missed_input_tokens"] > 10 * BEHIND
        other = ask(client, system(1), first["id"], tools=OWN_TOOLS)["diagnostics"]
        assert other["cache_miss_reason"]["type"] == "tools_changed"
        gone = ask(client, system(1), "msg_unknown")["diagnostics"]["cache_miss_reason"]
        assert gone == {"type": "previous_message_not_found"}


@pytest.mark.parametrize("way", ["mark", "flag"])
def test_a_pinned_system_prompt_stays_while_others_come_and_go(
    agent_server: Callable[..., Any], way: str
) -> None:
    """The cache holds 2 contexts of 1,024 tokens; eight other prompts of 600 would fill it."""
    flags = ("--ctx", "1024", *(["--pin"] if way == "flag" else []))
    head: Any = sentences(38, 5)
    if way == "mark":
        head = [{"type": "text", "text": head, "cache_control": {"type": "ephemeral"}}]
    with agent_server(*flags) as server, httpx.Client(base_url=server.url, timeout=120) as client:

        def cached(system: Any, question: str) -> float:
            asked = [{"role": "user", "content": question}]
            body = {"model": "pocket", "max_tokens": 1, "messages": asked, "system": system}
            usage = client.post("/v1/messages", json=body).json()["usage"]
            read: int = usage["cache_read_input_tokens"]
            return read / (read + usage["input_tokens"])

        cached(head, "First?")
        for other in range(8):
            assert cached("", sentences(45, 20 + other)) < 0.1
        assert cached(head, "Second?") > 0.9
