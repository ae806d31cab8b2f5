"""What a process with a published model holds, beside what `plan` says and what its file takes."""

from pathlib import Path

import pytest
import torch
from published.conftest import NAMES, run

CONTEXT = 4096
# As many tokens in all three vocabularies, within a few: nearly all that the context holds.
WORDS = ("apple", "river", "stone", "cloud", "green", "paper", "house", "light")
# What the interpreter and torch may take besides.
OTHERS_BYTES = 350_000_000


@pytest.mark.parametrize("form", ["", ".gguf"])
@pytest.mark.parametrize("name", NAMES)
def test_a_process_holds_what_plan_says(models: Path, name: str, form: str, tmp_path: Path) -> None:
    if torch.version.cuda is not None:
        pytest.skip("torch for GPUs takes more memory than the one that was measured")
    model = models / f"{name}{form}"
    if not model.exists():
        pytest.skip(f"{model} is missing")
    long = tmp_path / "long.txt"
    long.write_text(" ".join(WORDS[i % len(WORDS)] for i in range(CONTEXT - 200)))
    told = run("plan", str(model), "-c", str(CONTEXT))
    asked = (
        "chat",
        str(model),
        "Which fruit?",
        "--file",
        str(long),
        "-n",
        "1",
        "--keepalive",
        "1m",
    )
    answer = run(*asked, "-c", str(CONTEXT))
    assert answer["usage"]["prompt_tokens"] > CONTEXT - 300
    engine = run("ps")
    status = Path(f"/proc/{engine['pid']}/status").read_text().splitlines()
    [highest] = [int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")]
    assert told["resident_bytes"] == pytest.approx(highest, rel=0.05)
    file = model if form else model / "model.safetensors"
    cache = CONTEXT // 1024 * told["kv_bytes_per_1k_tokens"]
    kept_of_windows = 70_000_000 if name == "gemma3" else 0  # for prompts that come again
    limit = 1.2 * file.stat().st_size + cache + kept_of_windows + OTHERS_BYTES
    assert highest <= limit
