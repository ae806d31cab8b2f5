"""`localllm launch`, with programs that only tell how they were started."""

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from window import ROOT

from localllm.launch.programs import PROGRAMS

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
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
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


def test_what_is_not_there_is_told_with_the_way_to_get_it(
    localllm: Localllm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = localllm("launch", "codex", "pocket")
    assert found.code == 2
    assert "npm install -g @openai/codex" in found.err
    assert "claude, codex" in localllm("launch", "emacs").err


@pytest.fixture
def served(home: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server that runs already."""
    from small_server import models, reply, small_server

    listed = {"data": [{"id": "running", "max_model_len": 65536}]}
    answers = {
        "/v1/models": models(listed),
        "/health": reply(json.dumps({"status": "ok", "load": {}}).encode()),
    }
    with small_server(answers) as server:
        yield server


def port_of(server: Any) -> str:
    return str(server.url.rpartition(":")[2])


def test_a_server_that_runs_is_asked(programs: Path, served: Any) -> None:
    found = run("aider", "--port", port_of(served))
    told = json.loads(found.stdout)
    assert told["variables"]["OPENAI_API_BASE"] == f"{served.url}/v1"
    assert told["arguments"][:2] == ["--model", "openai/running"]
    other = run("aider", "pocket", "--port", port_of(served))
    assert other.returncode == 2
    assert "'running' is served" in other.stderr


def test_codex_and_opencode_read_settings_without_files(programs: Path, served: Any) -> None:
    told = json.loads(run("codex", "--port", port_of(served)).stdout)
    given = dict(each.split("=", 1) for each in told["arguments"][1::2])
    assert json.loads(given["model"]) == "running"
    assert json.loads(given["model_context_window"]) == 65536
    assert json.loads(given["model_providers.localllm.wire_api"]) == "responses"
    told = json.loads(run("opencode", "--port", port_of(served)).stdout)
    config = json.loads(told["variables"]["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == "localllm/running"


def test_a_file_of_another_program_is_written_only_after_a_question(
    programs: Path, served: Any, tmp_path: Path
) -> None:
    path = tmp_path / "llm" / "extra-openai-models.yaml"
    refused = run("llm", "--port", port_of(served))
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert not path.exists()
    path.parent.mkdir()
    path.write_text("# mine\n- model_id: other\n  model_name: other\n")
    assert run("llm", "--yes", "--port", port_of(served)).returncode == 7
    text = path.read_text()
    assert text.startswith("# mine\n- model_id: other\n  model_name: other\n")
    assert re.search(r'- model_id: "localllm-running"\n  model_name: "running"', text)
    assert path.with_name(path.name + ".before-localllm").exists()
    # Again: nothing to ask, and no second entry.
    assert run("llm", "--port", port_of(served)).returncode == 7
    assert path.read_text() == text
    path.write_text("{other: form}\n")
    assert "not changed" in run("llm", "--yes", "--port", port_of(served)).stderr
    assert path.read_text() == "{other: form}\n"


def test_settings_with_comments_are_left_to_their_owner(
    localllm: Localllm, monkeypatch: pytest.MonkeyPatch, home: Path, programs: Path, served: Any
) -> None:
    path = home / "zed" / "settings.json"
    path.parent.mkdir()
    path.write_text('{ "theme": "One" } // mine\n')
    found = localllm("launch", "zed", "--yes", "--port", port_of(served))
    assert found.code == 2
    assert "openai_compatible" in found.err
    assert path.read_text() == '{ "theme": "One" } // mine\n'
