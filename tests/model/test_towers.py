"""Checkpoints with a vision tower load their text model, whose logits equal transformers'."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import byte_tokenizer, tiny_config
from engines import load_folder
from heads import APART, add_head, load_own_head, random_head
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache
from whole_text import whole_text

from localllm import LLM, SamplingParams
from localllm.errors import CheckpointError, UnsupportedModelError
from localllm.model.families.table import architecture_of

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 48}
DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
TOWERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "gemma3_text",
        {"sliding_window": 24, "tie_word_embeddings": True},
        VISION,
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        "gemma4_text",
        {
            "sliding_window": 24,
            "tie_word_embeddings": True,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 288,
            "num_kv_shared_layers": 2,
        },
        {**VISION, "head_dim": 16, "num_key_value_heads": 2},
    ),
    "gemma4_unified": (
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified_text",
        {
            "sliding_window": 24,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "global_head_dim": 32,
        },
        VISION,
    ),
    "mistral3": ("Mistral3ForConditionalGeneration", "ministral3", {}, {**VISION, "head_dim": 16}),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "qwen3_5_text", DELTA_NET, QWEN_VISION),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe_text",
        {
            **DELTA_NET,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 24,
        },
        QWEN_VISION,
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl_text",
        {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
        QWEN_VISION,
    ),
}


def write_tower(folder: Path, name: str, tied: tuple[bool, bool] | None = None) -> Any:
    """Save a random model of transformers' with its tower; returns the model. `tied`: whether the
    outer config says that embeddings are tied, and whether the text model's does.
    """
    architecture, kind, changes, vision = TOWERS[name]
    text = {**tiny_config("LlamaForCausalLM", **changes), "model_type": kind}
    for unwanted in ("architectures", "hidden_act"):
        del text[unwanted]
    text |= {"pad_token_id": 0, "dtype": "float32"}
    raw = {"model_type": name, "text_config": text, "vision_config": vision}
    raw |= {"architectures": [architecture], "tie_word_embeddings": name.startswith("gemma")}
    if tied is not None:
        raw["tie_word_embeddings"], text["tie_word_embeddings"] = tied
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter_name, values in model.named_parameters():
            if "norm" in parameter_name:
                values.copy_(1 + 0.2 * torch.randn_like(values))
            elif values.dim() == 2:
                values.copy_(torch.randn_like(values) / values.shape[1] ** 0.5)
    model.float().eval().save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "architectures": [architecture]}))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model


def logprobs_like(folder: Path, model: Any) -> float:
    """The largest difference of a logprob, over an answer to a prompt longer than the window."""
    prompt = torch.randint(3, 259, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=5)
    llm = LLM(str(folder), max_num_batched_tokens=32, max_num_seqs=1, dtype="float32")
    [completion] = llm.generate([prompt], params)
    tokens = completion.samples[0].tokens
    ids = [token.token_id for token in tokens]
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        # Token by token, since the sums of a delta rule over chunks err more.
        rows = [
            model(torch.tensor([[each]]), past_key_values=cache, use_cache=True).logits[0].float()
            for each in prompt + ids
        ]
        logits = torch.cat(rows)[len(prompt) - 1 : -1]
    assert ids == logits.argmax(-1).tolist()
    expected = torch.log_softmax(logits, -1)
    return max(
        abs(logprob - float(row[i]))
        for token, row in zip(tokens, expected, strict=True)
        for i, logprob in token.logprobs.top  # type: ignore[union-attr]
    )


@pytest.mark.parametrize("name", TOWERS)
def test_the_text_model_beside_a_tower(name: str, tmp_path: Path) -> None:
    model = write_tower(tmp_path / "model", name)
    assert logprobs_like(tmp_path / "model", model) < 1e-4


@pytest.mark.parametrize("tied", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("name", ["gemma4", "mistral3", "qwen3_vl"])
def test_the_head_is_the_stored_one_if_there_is_one(
    name: str, tied: tuple[bool, bool], tmp_path: Path
) -> None:
    model = write_tower(tmp_path / "model", name, tied)
    assert logprobs_like(tmp_path / "model", model) < 1e-4


def test_what_both_levels_say_counts_and_null_says_nothing() -> None:
    text = {"model_type": "gemma3_text", "eos_token_id": 1, "dtype": None}
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    found = architecture_of({**raw, "eos_token_id": [1, 106], "dtype": "bfloat16"})
    assert found.eos_token_ids == (1, 106)
    assert found.dtype == "bfloat16"
    assert found.tie_word_embeddings


NEW, OLD = (
    ("model.language_model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
)


def test_older_and_newer_names_of_the_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = write_tower(folder, "mistral3")
    stored = load_file(folder / "model.safetensors")
    before, after = (OLD, NEW) if any(name.startswith(OLD[0]) for name in stored) else (NEW, OLD)
    assert logprobs_like(folder, model) < 1e-4
    renamed = {}
    for name, tensor in stored.items():
        for old, new in zip(before, after, strict=True):
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        renamed[name] = tensor
    assert any(name.startswith(after[0]) for name in renamed)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    assert logprobs_like(folder, model) < 1e-4


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_head_is_found_beside_a_vision_tower(name: str, tmp_path: Path) -> None:
    """Published files have one: the text model's names begin otherwise there, the head's do not."""
    folder = tmp_path / "whole"
    write_tower(folder, name)
    target = load_folder(folder, torch.float32)
    expected = random_head(target)
    assert expected is not None
    add_head(folder, expected.architecture, APART, seed=5)
    target = load_folder(folder, torch.float32)
    hidden = torch.randn(9, 48, generator=torch.Generator().manual_seed(3))
    rows = []
    for head in (load_own_head(folder, target), expected):
        batch, cache = whole_text(head, list(range(9)), hidden)
        with torch.inference_mode():
            rows.append(head.forward(batch, cache)[:9])
    torch.testing.assert_close(*rows)
    assert (rows[0] - rows[0][:1]).abs().max() > 0.1


def test_a_text_model_of_another_kind_is_refused() -> None:
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"model_type": "x"}}
    with pytest.raises(UnsupportedModelError, match="the text model 'x' is not supported"):
        architecture_of(raw)
    with pytest.raises(CheckpointError, match="'text_config' must be an object"):
        architecture_of({**raw, "text_config": 3})
