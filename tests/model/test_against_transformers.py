"""Logits and greedy text equal transformers' on random checkpoints of every architecture."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_config, write_checkpoint
from transformers import AutoModelForCausalLM

from localllm import LLM, SamplingParams
from localllm.engine.scheduler import ScheduledBatch
from localllm.engine.speculation_config import SpeculationConfig

# Float32 sums in another order; the models are two layers of width 48.
MAX_LOGPROB_DIFFERENCE = 1e-4
NUM_GREEDY_TOKENS = 48
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, heads times head_dim is the hidden size": (
        "LlamaForCausalLM",
        {"hidden_size": 64, "head_dim": None},
    ),
    "llama, as many kv heads": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama, one kv head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama, kv heads left out": ("LlamaForCausalLM", {"num_key_value_heads": None}),
    "llama, biased": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama, 3 heads of 20": (
        "LlamaForCausalLM",
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 20},
    ),
    "llama, linear rope, old spelling": (
        "LlamaForCausalLM",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "llama, llama3 rope, old spelling": ("LlamaForCausalLM", {"rope_scaling": LLAMA3}),
    "llama, llama3 rope, new spelling": (
        "LlamaForCausalLM",
        {
            "rope_theta": None,
            "rope_parameters": {**LLAMA3, "rope_theta": 500000.0},
            "torch_dtype": None,
            "dtype": "float32",
        },
    ),
    "llama, yarn": ("LlamaForCausalLM", {"rope_scaling": YARN}),
    "llama, yarn with its options": (
        "LlamaForCausalLM",
        {
            "rope_scaling": {
                **YARN,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
            }
        },
    ),
    "llama, head larger than the tokenizer": ("LlamaForCausalLM", {"vocab_size": 333}),
    "mistral, no window": ("MistralForCausalLM", {}),
    "mistral, window shorter than the prompt": ("MistralForCausalLM", {"sliding_window": 24}),
    "mistral, window of one": ("MistralForCausalLM", {"sliding_window": 1}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2, tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2, window from layer 1 on": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen2, window not in use": ("Qwen2ForCausalLM", {"sliding_window": 8}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3, biased, one kv head, tied, yarn": (
        "Qwen3ForCausalLM",
        {
            "attention_bias": True,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_scaling": YARN,
        },
    ),
    "qwen3, layer types": (
        "Qwen3ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def write_case(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> Path:
    config = tiny_config(architecture, **changes)
    config = {name: value for name, value in config.items() if value is not None}
    if architecture == "MistralForCausalLM":
        # Left out means 4,096 there, so that null has to be said.
        config.setdefault("sliding_window", None)
    return write_checkpoint(tmp_path / "model", config)


def assert_like_transformers(folder: Path) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    oracle.eval()
    prompt = torch.randint(3, 259, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(temperature=0, max_tokens=NUM_GREEDY_TOKENS, ignore_eos=True)
    # Chunks of 32 tokens: the prompt takes three steps; and a row of logits for each token.
    llm = LLM(
        str(folder),
        max_num_batched_tokens=32,
        max_num_seqs=1,
        dtype="float32",
        speculation=SpeculationConfig("off"),
    )
    logits = record_logits(llm)
    [completion] = llm.generate([prompt], params)
    assert completion.error is None
    tokens = [token.token_id for token in completion.samples[0].tokens]
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    assert tokens == expected.argmax(dim=-1).tolist()
    difference = torch.log_softmax(torch.cat(logits), -1) - torch.log_softmax(expected, -1)
    assert difference.abs().max().item() < MAX_LOGPROB_DIFFERENCE


def record_logits(llm: LLM) -> list[torch.Tensor]:
    """A list that grows by the logits of every step that samples."""
    runner = llm.model.text_engine.engine._runner
    recorded: list[torch.Tensor] = []
    forward = runner.forward

    def forward_recorded(batch: ScheduledBatch) -> torch.Tensor:
        logits = forward(batch)
        if len(logits):
            recorded.append(logits)
        return logits

    runner.forward = forward_recorded  # type: ignore[method-assign]
    return recorded


@pytest.mark.parametrize("case", CASES)
def test_logprobs_and_greedy_text_equal_transformers(case: str, tmp_path: Path) -> None:
    assert_like_transformers(write_case(tmp_path, *CASES[case]))


def test_absent_window_of_mistral_is_4096_as_in_transformers(tmp_path: Path) -> None:
    from localllm.model.families.table import read_architecture

    folder = write_case(tmp_path, "MistralForCausalLM", {})
    raw = json.loads((folder / "config.json").read_text())
    del raw["sliding_window"]
    (folder / "config.json").write_text(json.dumps(raw))
    assert [state.window for state in read_architecture(folder).states] == [4096, 4096]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_checkpoints_load_as_transformers_does(dtype: str, tmp_path: Path) -> None:
    folder = write_case(tmp_path, "LlamaForCausalLM", {"torch_dtype": dtype})
    assert_like_transformers(folder)


def test_sharded_checkpoint_equals_whole(tmp_path: Path) -> None:
    config = tiny_config("Qwen2ForCausalLM")
    whole = write_checkpoint(tmp_path / "whole", config)
    sharded = write_checkpoint(tmp_path / "sharded", config, num_shards=3)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = [
        LLM(str(folder), max_num_seqs=1).generate("Some words", params)[0].text
        for folder in (whole, sharded)
    ]
    assert texts[0] == texts[1]


def test_built_in_model_equals_transformers() -> None:
    import localllm

    folder = Path(localllm.__file__).parent / "pocket"
    assert_like_transformers(folder)
