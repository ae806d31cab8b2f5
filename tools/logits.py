"""Prints digests of logits, for comparing two states of the code bit by bit.

    PYTHONPATH=.:kernels python tools/logits.py FOLDER > before.txt    # in one checkout
    PYTHONPATH=.:kernels python tools/logits.py FOLDER > after.txt     # in another
    diff before.txt after.txt

The first run writes small random checkpoints to FOLDER. Each line is a digest of all logits that
the answers to a fixed set of prompts are drawn from: whole, in chunks, and after a cached prefix.
"""

import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from localllm import LLM, SamplingParams
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.engine.model_runner import ModelRunner
from localllm.schedule.scheduler import ScheduledBatch

VOCAB_SIZE, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 288, 128, 256, 4, 2, 32, 3
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 24},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "rope_scaling": YARN},
}
QUANTIZED = {
    "int4": ("--method", "rtn", "--group-size", "32"),
    "awq": ("--method", "rtn", "--group-size", "64", "--asym", "--format", "awq"),
    "int8": ("--method", "int8", "--head", "int8"),
    "fp8": ("--method", "fp8", "--format", "fp8"),
}


def write_checkpoint(folder: Path, family: dict[str, Any]) -> None:
    """Write random weights and a byte tokenizer."""
    folder.mkdir(parents=True)
    config = {**SIZES, "model_type": "x", **family}
    generator = torch.Generator().manual_seed(0)
    name = config["architectures"][0]
    has_bias = {"qkv": name.startswith(("Llama", "Qwen2")), "o": name.startswith("Llama")}

    def values(*shape: int, scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        return (mean + scale * torch.randn(shape, generator=generator)).bfloat16()

    tensors = {"model.embed_tokens.weight": values(VOCAB_SIZE, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for part, (out, width, kind) in {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN, "qkv"),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN, "qkv"),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN, "qkv"),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM, "o"),
            "mlp.gate_proj": (INNER, HIDDEN, "o"),
            "mlp.up_proj": (INNER, HIDDEN, "o"),
            "mlp.down_proj": (HIDDEN, INNER, "o"),
        }.items():
            tensors[f"{at}{part}.weight"] = values(out, width, scale=width**-0.5)
            if has_bias[kind]:
                tensors[f"{at}{part}.bias"] = values(out, scale=0.2)
        norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
        if name.startswith("Qwen3"):
            norms |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
        for part, width in norms.items():
            tensors[f"{at}{part}.weight"] = values(width, scale=0.2, mean=1.0)
    tensors["model.norm.weight"] = values(HIDDEN, scale=0.2, mean=1.0)
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = values(VOCAB_SIZE, HIDDEN)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<|endoftext|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')


def write_all(folder: Path) -> None:
    """Write every checkpoint that does not exist yet."""
    for name, family in FAMILIES.items():
        if not (folder / name).exists():
            write_checkpoint(folder / name, family)
    for kind, flags in QUANTIZED.items():
        for name in ("llama", "qwen3"):
            out = folder / f"{name}-{kind}"
            if not out.exists():
                command = [sys.executable, "-m", "localllm", "quantize", str(folder / name)]
                subprocess.run(
                    [*command, str(out), *flags, "--no-verify"],
                    check=True,
                    stdout=sys.stderr,
                )


def configurations(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of checkpoints, with options of the engine."""
    names = sorted(path.name for path in folder.iterdir() if (path / "config.json").exists())
    for name, backend, kv in itertools.product(names, ("auto", "torch"), ("auto", "int8", "fp8")):
        if kv == "auto" or "-" not in name:
            for tokens in (256, 13):
                yield name, {"backend": backend, "kv_cache_dtype": kv, "tokens": tokens}
    for name in FAMILIES:
        yield name, {"dtype": "float32", "tokens": 64}
        yield name, {"deterministic": True, "tokens": 64}


PROMPTS = [[1 + (7 * i * i + 3 * i) % 250 for i in range(length)] for length in (1, 5, 16, 33, 150)]


def digest(folder: Path, options: dict[str, Any]) -> str:
    """The digest of the logits that a model's answers are drawn from, in any order."""
    rows: set[bytes] = set()
    plain = ModelRunner.forward

    def watched(
        self: ModelRunner, batch: ScheduledBatch, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits = plain(self, batch, hidden)
        rows.update(hashlib.sha256(row.tobytes()).digest() for row in logits.numpy())
        return logits

    given = dict(options)
    tokens = given.pop("tokens")
    ModelRunner.forward = watched  # type: ignore[method-assign]
    try:
        with LLM(
            folder,
            device="cpu",
            threads=1,
            kv_cache_tokens=2048,
            max_num_batched_tokens=tokens,
            speculation=SpeculationConfig(drafter="off"),  # drafting depends on timing
            **given,
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            # Torch's bfloat16 products depend on the number of rows, and that depends on timing.
            is_exact = given.get("backend") != "torch"
            for prompts in (PROMPTS, PROMPTS[::-1]):
                for part in [prompts] if is_exact else [[prompt] for prompt in prompts]:
                    llm.generate(part, params)
    finally:
        ModelRunner.forward = plain  # type: ignore[method-assign]
    return hashlib.sha256(b"".join(sorted(rows))).hexdigest()[:24]


def main() -> int:
    """Print a line for each configuration."""
    folder = Path(sys.argv[1])
    write_all(folder)
    for name, options in configurations(folder):
        flags = " ".join(f"{key}={value}" for key, value in options.items())
        sys.stdout.write(f"{digest(folder / name, options)} {name} {flags}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
