"""The script that runs everything on a GPU, rehearsed on a CPU with what that machine lacks hidden;
and its plan, with parts that are scripts of a line.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HIDING = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("prompt_toolkit", "platformdirs", "pydantic", "fastapi"):
            raise ModuleNotFoundError(f"{name} is hidden")

sys.meta_path.insert(0, Hidden())
"""
# What only a GPU can show.
NOT_REHEARSED = {
    *("driver", "self-check int4", "self-check int8", "self-check fp8"),
    *("kernel tests", "engine tests", "float32", "sanitizer"),
    *("speed 8B int4", "speed 8B bf16", "speed 1B bf16", "speed 1B int4"),
    *("speed 0.6B int4", "speed 0.6B bf16"),
    *("kernels", "profiled", "tuned", "compilations"),
}


def rehearse(folder: Path, *arguments: str) -> tuple[int, Any]:
    (folder / "sitecustomize.py").write_text(HIDING)
    out = folder / "found.json"
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}:{ROOT / 'kernels'}"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "tools/gpu_suite.py", "--rehearse", "--out", str(out), *arguments]
    process = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    return process.returncode, json.loads(out.read_text())


@pytest.mark.slow
def test_it_runs_from_a_bare_checkout(tmp_path: Path) -> None:
    code, found = rehearse(tmp_path, "--only", "prefix")
    assert code == 0, found
    assert found["environment"]["versions"]["torch"]
    parts = {name: part["found"] for name, part in found["parts"].items()}
    assert parts["prefix"]["rows"][0]["test"] == "90% of 200 shared"
    assert parts["prefix"]["memory"]["groups"][0]["num_blocks"] > 0


@pytest.mark.slow
def test_every_part_is_rehearsed(tmp_path: Path, suite: ModuleType) -> None:
    code, found = rehearse(tmp_path)
    parts = {name: part["found"] for name, part in found["parts"].items()}
    failed = {name: part for name, part in parts.items() if "error" in part}
    assert (code, failed) == (0, {})
    assert set(parts) == set(suite.PARTS) - {"checked"}
    assert {name for name, part in parts.items() if "not_rehearsed" in part} == NOT_REHEARSED
    assert parts["windows"]["1024"]["step_s"]
    assert set(parts["sampling 8B int4"]["step_s"]) == {"greedy", "default", "penalties"}
    assert set(parts["start 0.6B"]) == {"kernels compiled", "warm", "warm again"}
    assert {each["test"] for each in parts["kernels"]["rows"]} >= {"int4 qkv", "int4 fragments qkv"}
    assert {each["state"] for each in parts["self-check int4"]["cases"]} == {"good"}


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("gpu_suite")


@pytest.fixture
def run(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, list[str]]]:
    """Run the script with parts that write a line; "load" fails. Returns the code, and the parts
    that were run, in order.
    """
    log, part = tmp_path / "log", tmp_path / "part.py"
    part.write_text(
        "import json, sys\n"
        "name, out = (sys.argv[sys.argv.index(flag) + 1] for flag in ('--part', '--out'))\n"
        f"print(name, file=open({str(log)!r}, 'a'))\n"
        "open(out, 'w').write(json.dumps({'first': 1}))\n"
        "sys.exit(name == 'load')\n"
    )
    monkeypatch.setattr(suite, "__file__", str(part))
    monkeypatch.setattr(suite, "environment", lambda place: {"commit": "a", "rehearsal": True})

    def run(*arguments: str) -> tuple[int, list[str]]:
        log.write_text("")
        out = str(tmp_path / "found.json")
        monkeypatch.setattr(sys, "argv", ["gpu_suite", "--rehearse", "--out", out, *arguments])
        return suite.main(), log.read_text().splitlines()

    return run


def test_a_part_that_fails_costs_itself_alone_and_is_run_again(
    run: Callable[..., tuple[int, list[str]]], tmp_path: Path
) -> None:
    three = ("prefix", "load", "windows")
    assert run("--only", *three) == (1, [*three])
    parts = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert "exited with 1" in parts["load"]["found"]["error"]
    assert [parts[name]["found"] for name in ("prefix", "windows")] == 2 * [{"first": 1}]
    # What is done stands in the file.
    assert run("--only", *three, "drafts") == (1, ["load", "drafts"])
    assert run("--only", "prefix", "drafts") == (0, [])
    assert run("--only", "prefix", "drafts", "--again") == (0, ["prefix", "drafts"])
    assert set(json.loads((tmp_path / "found.json").read_text())["parts"]) == {*three, "drafts"}


def test_results_of_another_commit_are_kept_apart(
    run: Callable[..., tuple[int, list[str]]],
    suite: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--only", "prefix") == (0, ["prefix"])
    monkeypatch.setattr(suite, "environment", lambda place: {"commit": "b", "rehearsal": True})
    assert run("--only", "prefix", "drafts") == (2, [])
    assert "results of commit a, and this is b" in capsys.readouterr().err


def test_minutes_take_what_is_worth_most_and_name_the_rest(
    run: Callable[..., tuple[int, list[str]]], suite: ModuleType, tmp_path: Path
) -> None:
    everything = suite.wanted(suite.GROUPS, [])
    assert set(everything) == set(suite.PARTS) - {"checked"}
    planned = suite.fitting(everything, 600)
    assert planned[:3] == ["driver", "self-check int4", "kernel tests"]
    assert sum(suite.PARTS[name].seconds for name in planned) <= 600
    # The verdict may be on another machine.
    later = suite.wanted(suite.GROUPS, ["self-check int4", "checked"])
    assert "checked" in later
    assert suite.wanted(["steps"], [name for name in suite.PARTS if "speed" in name]) == [
        *("checked", "sampling 8B int4", "sampling 8B bf16")
    ]
    assert suite.wanted(["steps"], suite.PARTS) == []
    code, ran = run("--group", "context", "--minutes", "0")
    left_out = json.loads((tmp_path / "found.json").read_text())["left_out"]
    assert (code, ran, left_out) == (0, [], suite.wanted(["context"], []))


def test_a_part_that_is_ended_leaves_what_it_has_found(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from gpu_parts.place import Place\n"
        "place = Place(True, Path(sys.argv[sys.argv.index('--out') + 1]))\n"
        "place.keep('first', 1)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tools"))
    monkeypatch.setattr(suite, "__file__", str(slow))
    found = suite.run_part("load", suite.Place(True), 3.0)["found"]
    assert found["first"] == 1
    assert "timed out after 3 s" in found["error"]
