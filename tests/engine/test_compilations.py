"""What Triton compiles for an engine on a GPU: ahead one kernel at a time, then nothing more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT, PATHS = Path(__file__).parents[2], (".", "kernels", "tests")
COUNTED = Path(__file__).with_name("counted_compilations.py")


# Kind of weights, most rows that take fragments, requests in a batch.
@pytest.mark.parametrize(
    "case",
    [
        "int4-64-4",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("bf16-0-4", "int4-0-64", "fp8-0-1", "experts+mxfp4-0-4")
        ),
    ],
)
def test_a_warm_engine_compiles_nothing(case: str, tmp_path: Path) -> None:
    # Where kernels are interpreted nothing is compiled.
    environment = {key: text for key, text in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in PATHS)
    environment["HOME"] = environment["XDG_CACHE_HOME"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(COUNTED), case],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=300,
    )
    found = json.loads(done.stdout)
    assert found["late"] == []
    # Whoever asks meanwhile waits for one kernel at most.
    assert found["most"] == 1
    assert found["warm"] > 15
