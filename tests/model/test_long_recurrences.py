"""Long answers behind prompts of any length, in any chunks, equal transformers' where layers keep
recurrent state.
"""

import random
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from every_family import EVERY_FAMILY, small_config
from oracle import logprobs_of, record_logits
from transformers import AutoModelForCausalLM

from localllm import LLM, SamplingParams
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.model.families.table import architecture_of

RECURRENT = [
    family for family in EVERY_FAMILY if architecture_of(small_config(family)).recurrent_groups
]
STEPS = 200


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 37, 300, 700])
@pytest.mark.parametrize("family", RECURRENT)
def test_a_long_answer_behind_a_prompt_in_any_chunks(
    family: str, length: int, tmp_path: Path
) -> None:
    config = {**small_config(family), "max_position_embeddings": 1024}
    config = {name: value for name, value in config.items() if value is not None}
    folder = write_checkpoint(tmp_path / "model", config)
    drawn = random.Random(f"{family} {length}")
    prompt = [drawn.randint(3, 258) for _ in range(length)]
    llm = LLM(
        str(folder),
        max_num_batched_tokens=drawn.randint(1, length),
        max_num_seqs=1,
        dtype="float32",
        speculation=SpeculationConfig("off"),
    )
    logits = record_logits(llm)
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    [completion] = llm.generate([prompt], params)
    tokens = [token.token_id for token in completion.samples[0].tokens]
    ids, first = prompt + tokens, length - 1
    # Only eager experts multiply in float64.
    oracle = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    whole = logprobs_of(oracle, ids, [len(ids)])[first:-1]
    # Token by token with products in float64: transformers' sums over chunks err more.
    exact = logprobs_of(oracle.double(), ids, [1] * len(ids))[first:-1]
    limit = max(1e-4, 3 * (whole - exact).abs().max().item())
    found = torch.log_softmax(torch.cat(logits), -1)
    assert (found - exact).abs().max().item() < limit
    chosen = exact.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (exact.amax(-1) - chosen).max().item() < limit
