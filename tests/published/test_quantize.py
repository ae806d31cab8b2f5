"""A published model rounded to 4 and 8 bits, and its loss as transformers measures it."""

from pathlib import Path

import pytest
import torch
from fork_server import ROOT
from published.conftest import run
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = ROOT / "docs" / "architecture" / "exactness.md"
NUM_TOKENS = 400


@pytest.mark.parametrize(("method", "most"), [("rtn", 0.5), ("int8", 0.01)])
def test_the_divergence_is_the_one_that_transformers_finds(
    smollm: Path, tmp_path: Path, method: str, most: float
) -> None:
    out = tmp_path / method
    run("quantize", str(smollm), str(out), "--method", method, "--no-verify")
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    ids = tokenizer(TEXT.read_text()).input_ids[:NUM_TOKENS]
    text = tmp_path / "text.txt"
    text.write_text(tokenizer.decode(ids))

    flags = ("--text", str(text), "--dtype", "float32")
    found = run("eval", str(out), "--against", str(smollm), *flags)
    exact, rounded = (_logprobs(folder, ids) for folder in (smollm, out))
    expected = float((exact.exp() * (exact - rounded)).sum(-1).mean())
    loss = -exact[range(len(ids) - 1), torch.tensor(ids[1:])].mean()

    assert found["tokens"] == len(ids) - 1
    assert found["against"]["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-3)
    # Our products in few bits round activations to 8 bits too; transformers' do not.
    assert found["against"]["kl_mean"] == pytest.approx(expected, rel=0.1, abs=2e-3)
    assert 0 < expected < most


@torch.no_grad()
def _logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """[tokens - 1, vocab_size], in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
