"""`doctor`, `rm`, `cache`, `sessions`: what a user does to keep things in order."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.chat.store import SessionStore
from localllm.chat.transcript import Transcript, Turn
from localllm.cli.models import warm
from localllm.errors import ExitCode, LocalLLMError
from localllm.operators.verdict import Outcome, Verdict, VerdictFile
from localllm.user.places import cache_folder, sessions_file
from localllm_kernels.compiling.choice import Piece

Run = Callable[..., Any]


def lines(outcome: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in outcome.out.splitlines()]


def test_doctor_tells_what_a_report_needs_and_no_secret(
    localllm: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    outcome = localllm("doctor", "--json")
    assert outcome.code == 0, outcome.err
    findings = {line["what"]: line for line in lines(outcome)}
    assert {"localllm", "packages", "GPU", "memory", "hub cache", "answer"} <= set(findings)
    assert findings["answer"]["state"] == "ok"
    assert "hf_secret" not in outcome.out
    assert "HF_TOKEN is set" in findings["variables"]["found"]
    assert localllm("doctor").out.count("\n") >= len(findings)


def test_doctor_fails_only_where_nothing_answers(
    localllm: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise LocalLLMError("for a test")

    monkeypatch.setattr("localllm.user.places.sessions_file", broken)
    outcome = localllm("doctor")
    assert outcome.code == 0
    assert "note  sessions" in outcome.out
    monkeypatch.setattr("localllm.answer.llm.open_model", broken)
    outcome = localllm("doctor")
    assert outcome.code == ExitCode.FAILURE
    assert "bad   answer" in outcome.out


def test_doctor_lists_what_was_found_about_kernels(localllm: Run) -> None:
    outcomes = (
        Outcome(Piece.NORMS, "norm", 1, "good", "", 1e-5, 4e-5),
        Outcome(Piece.INT8, "down", 16, "wrong", "30 times as far off", 1e-5, 1e-5),
        Outcome(Piece.FRAGMENTS, "down", 1, "good", "", 1e-5, 2e-5),
    )
    VerdictFile.of("GPU 1", "shape").write(Verdict("GPU 1", "of a shape", outcomes))
    outcome = localllm("doctor")
    assert outcome.code == 0
    shown = outcome.out.splitlines()
    [first] = [i for i, line in enumerate(shown) if "GPU 1: models of a shape" in line]
    assert [line.split(maxsplit=2)[2] for line in shown[first + 1 : first + 4]] == [
        "norms: good, 4.0 times as fast as torch",
        "int8 products: wrong, so torch computes them (down, 16 rows: 30 times as far off)",
        "int4 products by fragments: used for 1 row, 2.0 times as fast as the other way",
    ]
    assert [line.split()[0] for line in shown[first : first + 4]] == ["ok", "ok", "note", "ok"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, which is checked")
def test_a_check_of_the_gpu_needs_one(localllm: Run) -> None:
    outcome = localllm("doctor", "--gpu")
    assert outcome.code == ExitCode.MEMORY
    assert "no usable GPU" in outcome.err
    outcome = localllm("doctor", "pocket")
    assert outcome.code == ExitCode.USAGE
    assert "--gpu" in outcome.err


def test_what_has_come_here_can_be_warmed_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warmed: list[str] = []
    monkeypatch.setattr(warm, "warm_up", lambda name, config: warmed.append(name))

    def offered(*, has_gpu: bool, terminal: bool, answer: str = "", name: str = "qwen3-4b") -> str:
        monkeypatch.setattr(warm, "has_gpu_driver", lambda: has_gpu)
        monkeypatch.setattr(warm, "is_terminal", lambda stream: terminal)
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        warm.offer_to_warm(name)
        return capsys.readouterr().err

    assert offered(has_gpu=False, terminal=True, answer="y\n") == ""
    assert "localllm warm qwen3-4b" in offered(has_gpu=True, terminal=False)
    assert "localllm warm qwen3-4b" in offered(has_gpu=True, terminal=True, answer="n\n")
    assert not warmed
    assert "[Y/n]" in offered(has_gpu=True, terminal=True, answer="\n")
    assert warmed == ["qwen3-4b"]
    # A folder is loaded by its name, and shown as a shell takes it.
    assert "localllm warm './my model'" in offered(has_gpu=True, terminal=False, name="./my model")
    offered(has_gpu=True, terminal=True, answer="y\n", name="./my model")
    assert warmed[-1] == "./my model"


def test_a_model_on_a_cpu_is_warm_at_once(localllm: Run) -> None:
    outcome = localllm("warm", "pocket")
    assert outcome.code == 0
    assert "pocket is warm" in outcome.err


def test_a_quantized_model_is_removed_when_it_is_said(
    localllm: Run, make_checkpoint: Callable[..., Path]
) -> None:
    place = cache_folder("quantized") / "small-gptq-g32"
    place.parent.mkdir(parents=True)
    make_checkpoint().rename(place)
    outcome = localllm("rm", place.name)
    assert outcome.code == ExitCode.USAGE
    assert "--yes" in outcome.err
    assert place.exists()
    assert localllm("rm", place.name, "--yes").code == 0
    assert not place.exists()


def test_only_what_is_ours_is_removed(localllm: Run, make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    assert localllm("rm", str(folder), "--yes").code == ExitCode.USAGE
    assert folder.exists()
    assert localllm("rm", "pocket", "--yes").code == ExitCode.USAGE
    assert localllm("rm", "qwen3-8b", "--yes").code == ExitCode.MODEL


def test_caches_are_listed_and_cleared_by_kind(localllm: Run) -> None:
    tunings = cache_folder("tunings")
    tunings.mkdir(parents=True)
    (tunings / "x.json").write_text("{}" * 500)
    kinds = {
        each["kind"]: each
        for each in map(json.loads, localllm("cache", "list", "--json").out.splitlines())
    }
    assert kinds["tunings"]["bytes"] == 1000
    assert localllm("cache", "clear", "--yes").code == ExitCode.USAGE
    assert localllm("cache", "clear", "nonsense", "--yes").code == ExitCode.USAGE
    assert localllm("cache", "clear", "tunings", "--yes").code == 0
    assert not tunings.exists()


def test_prompts_are_kept_on_disk_where_that_is_asked_for(localllm: Run, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    kept = ("--cache-disk", "50MB", "--cache-dir", str(folder))
    words = ("chat", "pocket", "x" * 100, "-n", "4", "--greedy", "--why", "--json")
    assert localllm(*words, *kept, "--no-save").code == 0
    assert not folder.exists()
    first, again = (localllm(*words, *kept) for _ in range(2))
    asked, told = (json.loads(each.out) for each in (first, again))
    assert asked["usage"]["cached_tokens"] == 0
    assert told["usage"]["cached_tokens"] >= told["usage"]["prompt_tokens"] - 16 > 0
    assert told["text"] == asked["text"]
    assert "came from disk" in again.err
    assert "came from disk" not in first.err
    mine = folder / "of mine"
    mine.write_text("kept")
    listed = localllm("cache", "list", "--json", "--cache-dir", str(folder)).out
    sizes = {each["kind"]: each["bytes"] for each in map(json.loads, listed.splitlines())}
    assert sizes["prefixes"] > 0
    words = ("cache", "clear", "prefixes", "--yes", "--cache-dir", str(folder))
    assert localllm(*words).code == 0
    assert [path.name for path in folder.iterdir()] == ["of mine"]
    assert localllm("chat", "pocket", "hi", "--cache-disk", "many").code == ExitCode.USAGE


@pytest.fixture
def store() -> SessionStore:
    store = SessionStore(sessions_file())
    store.create(Transcript("pocket", None, [Turn("Why?", "pocket", "Because.")]), "reasons")
    store.create(Transcript("pocket", None, [Turn("How?", "pocket", "So.")]))
    return store


def test_sessions_are_listed_shown_exported_and_removed(
    localllm: Run, store: SessionStore, tmp_path: Path
) -> None:
    listed = localllm("sessions", "list").out
    assert "reasons" in listed
    assert "Why?" in listed
    assert [
        json.loads(line)["id"] for line in localllm("sessions", "list", "--json").out.splitlines()
    ] == [2, 1]
    assert "## assistant\n\nBecause." in localllm("sessions", "show", "reasons").out
    path = tmp_path / "chat.json"
    assert localllm("sessions", "export", "1", str(path)).code == 0
    assert json.loads(path.read_text())["messages"][1]["content"] == "Because."
    assert localllm("sessions", "export", "1", str(path)).code == ExitCode.USAGE
    assert localllm("sessions", "show", "reson").code == ExitCode.USAGE
    assert localllm("sessions", "rm", "reasons").code == ExitCode.USAGE
    assert localllm("sessions", "rm", "reasons", "--yes").code == 0
    assert [row.id for row in store.rows()] == [2]
    assert localllm("sessions", "rm", "--all", "-y").code == 0
    assert not store.rows()


def test_a_question_goes_on_with_a_saved_session(localllm: Run) -> None:
    asked = ("--temp", "0", "-n", "20")
    assert localllm("chat", "--session", "cache", "What is the KV cache?", *asked).code == 0
    assert localllm("chat", "--continue", "What is a block?", *asked).code == 0
    found = SessionStore(sessions_file()).get("cache")
    questions = [turn.question for turn in found.transcript.turns]
    assert questions == ["What is the KV cache?", "What is a block?"]
    # In a pipe nothing is saved unless that is asked for.
    assert localllm("chat", "What is paging?", *asked).code == 0
    assert len(SessionStore(sessions_file()).rows()) == 1
    assert localllm("chat", "--session", "cache", "--continue", "x").code == ExitCode.USAGE
    assert localllm("chat", "--no-save", "--continue", "x").code == ExitCode.USAGE


def test_there_is_nothing_to_go_on_with_at_first(localllm: Run) -> None:
    outcome = localllm("chat", "--continue", "x")
    assert outcome.code == ExitCode.USAGE
    assert "no conversation is saved yet" in outcome.err


def test_what_does_not_fit_is_dropped_only_when_that_is_said(localllm: Run) -> None:
    asked = ("--session", "long", "--ctx", "200", "-n", "40", "--temp", "0")
    for _ in range(2):
        assert localllm("chat", "What is the KV cache? " * 8, *asked).code == 0
    refused = localllm("chat", "What is the KV cache? " * 8, *asked)
    assert refused.code == ExitCode.CONTEXT
    assert "200" in refused.err
    told = localllm(
        "chat", "What is the KV cache? " * 8, *asked, "--overflow", "drop-oldest", "--json"
    )
    assert told.code == 0, told.err
    cut = json.loads(told.out)["truncated"]
    assert cut["policy"] == "drop-oldest"
    assert cut["dropped_turns"] >= 1
    assert cut["dropped_tokens"] > 0
    assert "dropped the oldest 1 turn" in told.err
    assert len(SessionStore(sessions_file()).get("long").transcript.turns) == 3
