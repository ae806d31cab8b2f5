"""`localllm launch`, with programs that only tell how they were started."""

import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fork_server import ROOT
from small_server import Answer, SmallServer, head, models, reply, small_server

from localllm.attach.server_records import OwnServer, own_servers, recorded
from localllm.errors import LocalLLMError
from localllm.launch.programs import PROGRAMS, Program
from localllm.launch.server import _wait_until_ready
from localllm.launch.settings import Endpoint
from localllm.user.places import runtime_folder

Localllm = Callable[..., Any]
TELLS = f"""#!{sys.executable}
import json, os, sys, urllib.request
names = ("ANTHROPIC_", "OPENAI_", "OPENCODE_", "LOCALLLM_API_KEY")
told = {{k: v for k, v in os.environ.items() if k.startswith(names)}}
url = told.get("ANTHROPIC_BASE_URL", "")
if url:
    body = {{"model": told["ANTHROPIC_MODEL"], "max_tokens": 5,
            "messages": [{{"role": "user", "content": "What is the KV cache?"}}]}}
    request = urllib.request.Request(url + "/v1/messages", json.dumps(body).encode(),
        {{"Content-Type": "application/json", "x-api-key": told["ANTHROPIC_AUTH_TOKEN"]}})
    told["answer"] = json.load(urllib.request.urlopen(request))["content"][0]["text"]
    try:
        urllib.request.urlopen(url + "/health")
    except urllib.error.HTTPError as error:
        told["without a key"] = error.code
print(json.dumps({{"arguments": sys.argv[1:], "variables": told}}))
sys.exit(7)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, in which every program is one that tells."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for program in PROGRAMS.values():
        path = folder / program.executables[0]
        path.write_text(TELLS)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture
def home(user_directories: Path) -> Path:
    return user_directories


def run(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """In a process of its own, since it starts one."""
    variables = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    return subprocess.run(
        [sys.executable, "-m", "localllm", "launch", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **variables},
    )


def test_a_program_gets_a_server_of_its_own_which_ends_with_it(programs: Path) -> None:
    found = run("claude", "pocket", "--port", "0", "--", "-p", "hello world")
    told = json.loads(found.stdout)
    assert found.returncode == 7  # the program's own
    assert told["arguments"] == ["-p", "hello world"]
    assert told["variables"]["answer"]
    assert told["variables"]["without a key"] == 401
    assert "agents need 24,576 or more" in found.stderr
    url = told["variables"]["ANTHROPIC_BASE_URL"]
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(f"{url}/health")


def test_arguments_for_the_program_are_no_model(programs: Path, home: Path) -> None:
    for more in (["-p", "hello"], ["file.py", "--", "-x"]):
        found = run("aider", "--port", "0", "--", *more)
        told = json.loads(found.stdout)
        assert told["arguments"][-len(more) :] == more
        assert told["arguments"][:2] == ["--model", "openai/pocket"]


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_dry_run_shows_what_would_be_set_and_starts_nothing(
    localllm: Localllm, home: Path, name: str
) -> None:
    before = sorted(home.rglob("*"))
    found = localllm(
        "launch", name, "qwen3-8b", "--ctx", "64k", "--dry-run", "--port", "9", "--", "-x"
    )
    assert found.code == 0
    assert re.search(r"-x$", found.out, re.MULTILINE)
    assert "qwen3-8b" in found.out
    assert "would be started" in found.err
    assert "http://127.0.0.1:9" in found.out
    for line in found.out.splitlines():
        if line.startswith("export "):
            assert len(shlex.split(line)) == 2
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "length"), [((), 2048), (("--ctx", "1k"), 1024), (("--ctx", "auto"), 2048)]
)
def test_a_dry_run_tells_the_context_that_the_model_has(
    localllm: Localllm, home: Path, flags: tuple[str, ...], length: int
) -> None:
    found = localllm("launch", "claude", "pocket", "--dry-run", "--port", "9", *flags)
    assert f"export CLAUDE_CODE_MAX_CONTEXT_TOKENS={length}\n" in found.out


def test_what_is_not_there_is_told_with_the_way_to_get_it(
    localllm: Localllm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = localllm("launch", "codex", "pocket")
    assert found.code == 2
    assert "npm install -g @openai/codex" in found.err
    assert "claude, codex" in localllm("launch", "emacs").err


def listing(model: object, length: object = 65536) -> bytes:
    return models({"data": [{"id": model, "max_model_len": length}]})


@contextmanager
def own_server(answer: Answer) -> Iterator[SmallServer]:
    """A server of this user's, with that answer to `/v1/models`."""
    with (
        small_server({"/v1/models": answer}) as server,
        recorded(OwnServer(server.url, int(port_of(server)), os.getpid())),
    ):
        yield server


@pytest.fixture
def served(home: Path) -> Iterator[SmallServer]:
    """A server that runs already."""
    with own_server(listing("running")) as server:
        yield server


def port_of(server: SmallServer) -> str:
    return server.url.rpartition(":")[2]


def test_a_server_that_runs_is_asked(programs: Path, served: SmallServer) -> None:
    found = run("aider", "--port", port_of(served))
    told = json.loads(found.stdout)
    assert told["variables"]["OPENAI_API_BASE"] == f"{served.url}/v1"
    assert told["arguments"][:2] == ["--model", "openai/running"]
    other = run("aider", "pocket", "--port", port_of(served))
    assert other.returncode == 2
    assert "'running' is served" in other.stderr


def test_codex_and_opencode_read_settings_without_files(
    programs: Path, served: SmallServer
) -> None:
    told = json.loads(run("codex", "--port", port_of(served)).stdout)
    given = dict(each.split("=", 1) for each in told["arguments"][1::2])
    assert json.loads(given["model"]) == "running"
    assert json.loads(given["model_context_window"]) == 65536
    assert json.loads(given["model_providers.localllm.wire_api"]) == "responses"
    told = json.loads(run("opencode", "--port", port_of(served)).stdout)
    config = json.loads(told["variables"]["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == "localllm/running"


def test_a_file_of_another_program_is_written_only_after_a_question(
    programs: Path, served: SmallServer, home: Path
) -> None:
    path = home / "zed" / "settings.json"
    refused = run("zed", "--port", port_of(served))
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert not path.exists()
    path.parent.mkdir()
    path.write_text('{"theme": "One"}')
    assert run("zed", "--yes", "--port", port_of(served)).returncode == 7
    text = path.read_text()
    assert json.loads(text)["theme"] == "One"
    assert "running" in text
    assert path.with_name(path.name + ".before-localllm").exists()
    # Again: nothing to ask.
    assert run("zed", "--port", port_of(served)).returncode == 7
    assert path.read_text() == text


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=sorted(PROGRAMS))
def test_a_key_is_in_no_command_line_and_in_no_file_of_another_program(
    home: Path, program: Program
) -> None:
    endpoint = Endpoint("http://127.0.0.1:8000", "m", 65536, key="sk-secret")
    settings = program.settings(endpoint)
    assert "sk-secret" not in " ".join(settings.command)
    files = [change for change in settings.files if "sk-secret" in change.addition]
    assert files or "sk-secret" in " ".join(settings.variables.values())
    assert all(change.is_own for change in files)


def test_the_key_of_llm_is_in_a_private_file(
    programs: Path, served: SmallServer, home: Path
) -> None:
    found = run("llm", "--port", port_of(served), "--api-key", "sk-secret")
    assert json.loads(found.stdout)["arguments"] == ["chat", "-m", "localllm-running"]
    assert b"Authorization: Bearer sk-secret" in served.asked[0]
    keys = home / "localllm" / "launch" / "llm" / "keys.json"
    assert json.loads(keys.read_text()) == {"localllm": "sk-secret"}
    assert keys.stat().st_mode & 0o077 == keys.parent.stat().st_mode & 0o077 == 0


def test_a_dry_run_shows_no_key(localllm: Localllm, served: SmallServer) -> None:
    found = localllm("launch", "llm", "--dry-run", "--port", port_of(served), "--api-key", "sk-x")
    assert found.code == 0
    assert "sk-x" not in found.out + found.err
    assert '"KEY"' in found.out


def test_what_else_listens_on_the_port_is_sent_nothing(programs: Path, home: Path) -> None:
    with small_server({"/v1/models": listing("running")}) as server:
        found = run("aider", "--port", port_of(server), "--api-key", "secret")
        assert found.returncode == 2  # a server of its own cannot have that port
        assert "cannot listen" in found.stderr
        assert server.asked == []


def test_a_server_that_has_ended_is_not_taken_for_the_one_that_listens_now(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with small_server() as server:
        port = int(port_of(server))
        path = runtime_folder() / f"{port}.server"
        with recorded(OwnServer(server.url, port, os.getpid())):
            assert [each.port for each in own_servers()] == [port]
            left = path.read_text()
        assert own_servers() == []
        path.write_text(left)  # as after a kill: nobody holds it locked
        assert own_servers() == []
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert [each.port for each in own_servers()] == [port]
            path.parent.chmod(0o777)
            assert own_servers() == []  # others could have written it


def drip() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    for _ in range(1000):
        time.sleep(0.1)
        yield b" "


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (listing("\x1b]0;owned\x07red"), 1, "no program can be given"),
        (listing("a\0b"), 1, "no program can be given"),
        (listing("--yes"), 1, "no program can be given"),
        (listing("x" * 1000), 1, "no program can be given"),
        (listing(5), 1, "does not answer like"),
        (listing("running", "long"), 1, "does not answer like"),
        (listing("running", -5), 1, "does not answer like"),
        (reply(b"[" * 100_000), 1, "nested too deeply"),
        (head("302 Found", "Location: http://127.0.0.1:9/v1/models"), 4, "redirects to"),
        (reply(b"{}", "401 Unauthorized"), 3, "key"),
        (drip, 4, "has not answered within"),
    ],
    ids=lambda value: value[-30:].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_what_a_server_answers_is_checked(
    localllm: Localllm,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: Answer,
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr("localllm.attach.openai_client.SHORT_REPLY_S", 0.5)
    with own_server(answer) as server:
        for to in (("--port", port_of(server)), ("--remote", server.url)):
            found = localllm("launch", "claude", "--dry-run", *to)
            assert found.code == code, found.err
            assert said in found.err
            assert "\x1b" not in found.out + found.err


def test_a_server_elsewhere_is_asked_if_it_is_named(programs: Path, home: Path) -> None:
    listed = {"data": [{"id": "one"}, {"id": "two", "max_model_len": 4096}]}
    with small_server({"/v1/models": models(listed)}) as server:
        told = json.loads(run("aider", "two", "--remote", server.url).stdout)
        assert told["arguments"][:2] == ["--model", "openai/two"]
        assert told["variables"]["OPENAI_API_BASE"] == f"{server.url}/v1"
        assert run("aider", "three", "--remote", server.url).returncode == 3


def test_what_a_server_says_is_not_where_it_listens(home: Path) -> None:
    says = "print('x answers at http://127.0.0.1:9/v1', file=__import__('sys').stderr)"
    process = subprocess.Popen([sys.executable, "-c", says], stderr=subprocess.PIPE)
    lines: list[str] = []
    assert process.stderr is not None
    with (home / "log").open("w+b") as log:
        log.write(process.stderr.read())
        log.flush()
        with pytest.raises(LocalLLMError, match="ended before"):
            _wait_until_ready(process, log.fileno(), lines.append)
    assert lines == ["x answers at http://127.0.0.1:9/v1"]


def test_settings_with_comments_are_left_to_their_owner(
    localllm: Localllm,
    monkeypatch: pytest.MonkeyPatch,
    home: Path,
    programs: Path,
    served: SmallServer,
) -> None:
    path = home / "zed" / "settings.json"
    path.parent.mkdir()
    path.write_text('{ "theme": "One" } // mine\n')
    found = localllm("launch", "zed", "--yes", "--port", port_of(served))
    assert found.code == 2
    assert "openai_compatible" in found.err
    assert path.read_text() == '{ "theme": "One" } // mine\n'
