"""What Triton compiles for an engine on a GPU: ahead one kernel at a time, then nothing more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT, PATHS = Path(__file__).parents[2], (".", "kernels", "tests")
COUNTED = Path(__file__).with_name("counted_compilations.py")


@pytest.mark.parametrize(
    ("kind", "fragment_rows", "max_num_seqs"),
    [
        ("bf16", 0, 4),
        ("int4", 0, 64),
        ("int4", 64, 4),
        ("fp8", 0, 1),
    ],
)
def test_a_warm_engine_compiles_nothing(kind: str, fragment_rows: int, max_num_seqs: int) -> None:
    command = [sys.executable, str(COUNTED), kind, str(fragment_rows), str(max_num_seqs)]
    # Where kernels are interpreted nothing is compiled.
    environment = {key: text for key, text in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in PATHS)
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment, timeout=300
    )
    found = json.loads(done.stdout)
    assert found["late"] == []
    # Whoever asks meanwhile waits for one kernel at most.
    assert found["most"] == 1
    assert found["warm"] > 15
