"""A bias of keys costs a cache in 8 bits no codes, and changes no score but by one number."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.engine import scoring
from localllm.engine.config import EngineConfig
from localllm.engine.loaded_decoder import load_decoder
from localllm.engine.scoring import WindowScorer
from localllm.model.decoder import DecoderModel
from localllm.model.families.table import read_architecture
from localllm.model.key_means import key_means


def load(folder: Path) -> DecoderModel:
    config = EngineConfig(dtype="float32", max_num_seqs=1, device="cpu")
    return load_decoder(folder, read_architecture(folder), config).model


def logits(model: DecoderModel, dtype: torch.dtype) -> Tensor:
    ids = torch.randint(model.architecture.vocab_size, (60,), generator=torch.Generator()).tolist()
    return torch.cat(list(WindowScorer(model, 60, dtype).logits(ids)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_large_bias_of_keys_costs_no_codes(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    folder = make_checkpoint("Qwen2ForCausalLM", rope_theta=1e6)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("k_proj.bias"):
            # Of the pair that hardly turns, as in Qwen2.5: the last one of each half.
            heads = read_architecture(folder).cache_groups[0].state.num_heads
            halves = torch.zeros(heads, 2, len(tensors[name]) // heads // 2)
            halves[:, :, -1] = 100.0
            tensors[name] = halves.flatten().to(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = load(folder)
    exact = logits(model, torch.float32)
    with_means = (logits(model, dtype) - exact).norm()
    monkeypatch.setattr(scoring, "key_means", lambda model, dtype: ())
    without = (logits(model, dtype) - exact).norm()
    assert with_means < 0.2 * without


def test_keys_without_a_bias_have_no_means(make_checkpoint: Callable[..., Path]) -> None:
    biased, plain = (load(make_checkpoint(f"{name}ForCausalLM")) for name in ("Qwen2", "Llama"))
    assert key_means(plain, torch.int8) == (None,)
    assert key_means(biased, torch.bfloat16) == (None,)
    (means,) = key_means(biased, torch.int8)
    assert means is not None
    assert means.shape[0] == biased.architecture.num_layers
