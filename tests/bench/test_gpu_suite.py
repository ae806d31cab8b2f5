"""The script that runs everything on a GPU, tried on a CPU with what that machine lacks hidden."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
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


def run(folder: Path, *arguments: str) -> tuple[int, Any]:
    (folder / "sitecustomize.py").write_text(HIDING)
    out = folder / "found.json"
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}:{ROOT / 'kernels'}"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "tools/gpu_suite.py", "--on-cpu", "--out", str(out), *arguments]
    process = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    return process.returncode, json.loads(out.read_text())


def test_it_runs_from_a_bare_checkout(tmp_path: Path) -> None:
    code, found = run(tmp_path, "--only", "prefix", "sampling 8B int4")
    assert code == 0, found
    assert found["environment"]["versions"]["torch"]
    parts = {name: part["found"] for name, part in found["parts"].items()}
    assert parts["prefix"]["rows"][0]["test"] == "90% of 200 shared"
    assert parts["prefix"]["memory"]["groups"][0]["num_blocks"] > 0
    assert set(parts["sampling 8B int4"]["step_s"]) == {"greedy", "default", "penalties"}


@pytest.mark.slow
def test_more_of_it_runs_from_a_bare_checkout(tmp_path: Path) -> None:
    code, found = run(tmp_path, "--only", "start 0.6B", "windows")
    assert code == 0, found
    parts = {name: part["found"] for name, part in found["parts"].items()}
    assert parts["windows"]["1024"]["step_s"]
    assert set(parts["start 0.6B"]) == {"kernels compiled", "warm", "warm again"}


def test_a_part_that_fails_costs_itself_alone(tmp_path: Path) -> None:
    code, found = run(tmp_path, "--only", "kernels", "tuned")
    assert code == 1
    parts = {name: part["found"] for name, part in found["parts"].items()}
    assert "kernels need a GPU" in parts["kernels"]["error"]
    assert parts["tuned"]["trials"] == 0
    code, found = run(tmp_path, "--group", "context", "--budget", "0")
    assert code == 1
    assert [part["found"] for part in found["parts"].values()] == 5 * [{"error": "no time left"}]


def test_a_part_that_is_ended_leaves_what_it_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    suite = importlib.import_module("gpu_suite")
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
