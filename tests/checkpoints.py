"""Makes small checkpoints with random weights, in the hub's format, for any architecture."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from localllm.model.architecture import Architecture
from localllm.model.blocks.experts import ExpertsSpec, StackedNames
from localllm.model.families.table import architecture_of
from localllm.model.stored_names import named_for_files

VOCAB_SIZE = 288
END_OF_TEXT = "<|endoftext|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config(architecture: str, **changes: Any) -> dict[str, Any]:
    """A config.json with odd sizes: head_dim times heads is not the hidden size."""
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 0,
    }
    if architecture == "MistralForCausalLM":
        config["sliding_window"] = None
    config.update(changes)
    return config


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights that make logits of ordinary size, so that near ties are rare."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: random_values(name, shape, generator)
        for name, shape in architecture_of(config).tensors().items()
    }
    dtype = getattr(torch, config.get("torch_dtype", config.get("dtype", "float32")))
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def random_values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """One of them."""
    values = torch.randn(shape, generator=generator)
    if "norm" in name or "scalar" in name:
        return 1 + 0.2 * values
    if len(shape) == 1 or "embed_tokens" in name or "lm_head" in name:
        return 0.5 * values
    return values / shape[1] ** 0.5


def stacked(
    tensors: dict[str, torch.Tensor], architecture: Architecture
) -> dict[str, torch.Tensor]:
    """The tensors as files hold them: those of a layer's experts in one, in some families."""
    found = dict(tensors)
    for layer, experts in architecture.experts():
        if experts.stacked is not None:
            _stack(found, f"{layer}.", experts, experts.stacked)
    return found


def _stack(
    found: dict[str, torch.Tensor], prefix: str, spec: ExpertsSpec, names: StackedNames
) -> None:
    for kind in ("weight", "bias") if spec.expert.has_bias else ("weight",):
        every = [spec.expert_at(i).names for i in range(spec.router.num_experts)]
        by_part = zip(*every, strict=True)
        gate, up, down = (
            torch.stack([found.pop(f"{prefix}{name}.{kind}") for name in part]) for part in by_part
        )
        pair = torch.stack((gate, up), dim=2 if names.is_interleaved else 1)
        for name, whole in ((names.gate_up, pair.flatten(1, 2)), (names.down, down)):
            if kind == "bias":
                found[f"{prefix}{name}_bias"] = whole
                continue
            ending = ".weight" if "linear" in name else ""
            turned = whole.transpose(1, 2) if names.is_transposed else whole
            found[f"{prefix}{name}{ending}"] = turned.contiguous()


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and the special tokens of ChatML."""
    specials = [END_OF_TEXT, "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(specials + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    return tokenizer


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    *,
    num_shards: int = 1,
    chat_template: str | None = CHATML,
    seed: int = 0,
) -> Path:
    """Write config, weights and tokenizer to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    architecture = architecture_of(config)
    tensors = stacked(random_tensors(config, seed), architecture)
    tensors = named_for_files(tensors, architecture)
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {}
        names = sorted(tensors)
        for shard in range(num_shards):
            file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
            part = {name: tensors[name] for name in names[shard::num_shards]}
            save_file(part, folder / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(part, file))
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config: dict[str, Any] = {"eos_token": END_OF_TEXT}
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder
