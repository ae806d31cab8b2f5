"""Published GGUF files, held against transformers, exact products, and llama.cpp's server.

With LOCALLLM_LLAMA_SERVER, the path of llama.cpp's server, its greedy texts are compared too.
"""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ROOT
from published.conftest import NAMES
from torch import Tensor

from localllm import LLM
from localllm.answer.evaluation import LoadedScorer, Tally, plan_windows
from localllm.engine.config import EngineConfig
from localllm.hub.checkpoint import open_checkpoint
from localllm.schedule.sampling_params import SamplingParams

_SERVER = os.environ.get("LOCALLLM_LLAMA_SERVER")
# How much likelier a token may be than one that is chosen instead, in logarithms: inputs of
# products are rounded to 8 bits there and here, in other groups.
_NEAR_TIE = 0.5


def file_of(models: Path, name: str) -> Path:
    file = models / f"{name}.gguf"
    if not file.is_file():
        pytest.skip(f"{file} is missing")
    return file


def book() -> str:
    path = ROOT.parent / "shared" / "data" / "books" / "the-time-machine.txt"
    if not path.is_file():
        pytest.skip(f"{path} is missing")
    return path.read_text(encoding="utf-8")[3000:]


def logits_of(file: Path, text: str, dtype: str) -> tuple[list[int], Tensor]:
    """The tokens of a text, and the logits before each but the first."""
    config = EngineConfig(dtype=dtype, max_model_len=1024, enable_prefix_caching=False)
    checkpoint = open_checkpoint(str(file), config)
    ids = checkpoint.tokenizer.encode(text, add_special_tokens=True)
    [window] = plan_windows(len(ids), 1024, 512)
    return ids, torch.cat(list(LoadedScorer(checkpoint, 1024).logits(ids, window))).float()


@pytest.mark.parametrize("name", NAMES)
def test_rounding_inputs_to_eight_bits_costs_little(models: Path, name: str) -> None:
    file, text = file_of(models, name), book()[:3000]
    ids, found = logits_of(file, text, "bfloat16")
    _, exact = logits_of(file, text, "float32")
    tally = Tally(2)
    tally.add([found, exact], torch.tensor(ids[1:]))
    against = tally.result(["rounded", "exact"]).against
    assert against is not None
    assert against.kl_mean < 0.002


@pytest.mark.parametrize("name", NAMES)
def test_exact_products_give_the_logits_of_transformers(models: Path, name: str) -> None:
    pytest.importorskip("accelerate", reason="pip install accelerate, to read GGUF by transformers")
    from transformers import AutoModelForCausalLM

    file = file_of(models, name)
    ids, found = logits_of(file, book()[:600], "float32")
    model = AutoModelForCausalLM.from_pretrained(
        models, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, :-1].float()
    found, expected = found.log_softmax(-1), expected[:, : found.shape[1]].log_softmax(-1)
    # Of tokens that may be said at all.
    is_likely = expected > -12
    assert float((found - expected)[is_likely].abs().max()) < 1e-3
    assert float((found - expected)[is_likely].abs().mean()) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_llama_cpps_up_to_near_ties(models: Path, name: str) -> None:
    if _SERVER is None:
        pytest.skip("LOCALLLM_LLAMA_SERVER names no program: llama.cpp's llama-server")
    file, text = file_of(models, name), book()
    prompts = ["The capital of France is", text[:400], text[2000:4000], text[5000:11000]]
    llm = LLM(str(file), max_model_len=4096)
    with llama_server(file) as ask:
        for prompt in prompts:
            theirs = ask(
                {
                    "prompt": prompt,
                    "n_predict": 32,
                    "temperature": 0,
                    "cache_prompt": False,
                    "n_probs": 5,
                }
            )
            [ours] = llm.generate([prompt], SamplingParams(max_tokens=32, temperature=0))
            assert ours.num_prompt_tokens == theirs["tokens_evaluated"]
            check_near(theirs["completion_probabilities"], ours.text)


def check_near(theirs: list[dict[str, Any]], ours: str) -> None:
    """Where the texts part, the other token is nearly as likely."""
    said = ""
    for step in theirs:
        if ours.startswith(said + step["token"]):
            said += step["token"]
            continue
        near = [
            each["token"]
            for each in step["top_logprobs"]
            if each["logprob"] > step["logprob"] - _NEAR_TIE
        ]
        assert any(ours[len(said) :].startswith(token) for token in near), (said, near, ours)
        return


@contextmanager
def llama_server(file: Path) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [str(_SERVER), "-m", str(file), "-t", "2", "-c", "4096", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{address}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            return dict(json.load(reply))

    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        yield ask
    finally:
        process.kill()
        process.wait()
