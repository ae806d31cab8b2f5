"""What Triton compiles for an engine on a GPU: ahead one kernel at a time, then nothing more."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT, PATHS = Path(__file__).parents[2], (".", "kernels", "tests")
COUNTED = Path(__file__).with_name("counted_compilations.py")


# Kind of weights, most rows that take fragments, requests in a batch.
CASES = ["bf16-0-4", "int4-0-64", "int4-64-4", "fp8-0-1", "experts+mxfp4-0-4"]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What is compiled for each."""
    # Where kernels are interpreted nothing is compiled.
    environment = {key: text for key, text in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in PATHS)
    environment["HOME"] = environment["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("home"))
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, str(COUNTED), *CASES]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment, timeout=300
    )
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_warm_engine_compiles_nothing(counted: dict[str, dict[str, Any]], case: str) -> None:
    found = counted[case]
    assert found["late"] == []
    # Whoever asks meanwhile waits for one kernel at most.
    assert found["most"] == 1
    assert found["warm"] > 15
