"""Folders with Gemma 4's assistants, with random weights and in the published layout, for tests."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from checkpoints import VOCAB_SIZE, random_values, tiny_config
from drafting import eager
from heads import load_beside
from safetensors.torch import save_file

from localllm.drafting.assistant_drafter import AssistantDrafter
from localllm.drafting.speculator import Speculator
from localllm.engine.model_runner import ModelRunner
from localllm.model.architecture import Architecture
from localllm.model.assistant import find_assistant
from localllm.model.decoder import DecoderModel
from localllm.model.found_head import FoundHead
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.model.weights import open_source

WIDTH, NUM_CLUSTERS, NUM_ACTIVE = 32, 24, 3
KINDS = ["sliding_attention", "full_attention"]
# A tiny Gemma 4 for which `write_assistant(folder, 48)` writes an assistant.
TARGET: dict[str, Any] = {
    "layer_types": KINDS,
    "sliding_window": 24,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def write_assistant(
    folder: Path,
    target_width: int,
    *,
    has_clusters: bool = False,
    is_unified: bool = False,
    **layers: Any,
) -> None:
    """An assistant for a target of two key heads of 16 in windowed layers, and of 32 in full ones;
    `layers`: other fields of its layers' config.
    """
    unified = "_unified" if is_unified else ""
    text: dict[str, Any] = {
        **tiny_config("LlamaForCausalLM", hidden_size=WIDTH, num_hidden_layers=2),
        "model_type": f"gemma4{unified}_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": KINDS,
        "sliding_window": 24,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 2,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        **layers,
    }
    for unwanted in ("architectures", "hidden_act", "torch_dtype"):
        del text[unwanted]
    prefix = "Gemma4Unified" if is_unified else "Gemma4"
    config = {
        "architectures": [f"{prefix}AssistantForCausalLM"],
        "model_type": f"gemma4{unified}_assistant",
        "text_config": text,
        "backbone_hidden_size": target_width,
        "use_ordered_embeddings": has_clusters,
        "num_centroids": NUM_CLUSTERS,
        "centroid_intermediate_top_k": NUM_ACTIVE,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    shapes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (WIDTH, 2 * target_width),
        "post_projection.weight": (target_width, WIDTH),
        "model.embed_tokens.weight": (VOCAB_SIZE, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    for i, head_width in enumerate((16, text["global_head_dim"])):
        shapes |= _layer(f"model.layers.{i}", head_width)
    if has_clusters:
        shapes["masked_embedding.centroids.weight"] = (NUM_CLUSTERS, WIDTH)
    generator = torch.Generator().manual_seed(21)
    tensors = {name: random_values(name, shape, generator) for name, shape in shapes.items()}
    if has_clusters:
        order = torch.randperm(VOCAB_SIZE, generator=generator)
        tensors["masked_embedding.token_ordering"] = order
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _layer(name: str, head_width: int) -> dict[str, tuple[int, ...]]:
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    return {
        f"{name}.self_attn.q_proj.weight": (4 * head_width, WIDTH),
        f"{name}.self_attn.o_proj.weight": (WIDTH, 4 * head_width),
        f"{name}.self_attn.q_norm.weight": (head_width,),
        f"{name}.mlp.gate_proj.weight": (80, WIDTH),
        f"{name}.mlp.up_proj.weight": (80, WIDTH),
        f"{name}.mlp.down_proj.weight": (WIDTH, 80),
        f"{name}.layer_scalar": (1,),
        **{f"{name}.{norm}_layernorm.weight": (WIDTH,) for norm in norms},
    }


def found_in(folder: Path, target: Architecture) -> FoundHead:
    """The assistant in a folder."""
    return find_assistant("assistant", folder, "target", target)


def random_assistant(target: DecoderModel) -> DecoderModel:
    """An assistant with random weights."""
    with tempfile.TemporaryDirectory() as name:
        write_assistant(Path(name), target.architecture.hidden_size)
        found = found_in(Path(name), target.architecture)
        with open_source(found.weights) as source:
            return load_beside(source, found.architecture, target)


def cache_seen(assistant: DecoderModel, kv_cache: PagedKVCache) -> PagedKVCache:
    """What an assistant sees of its target's cache."""
    places = [kv_cache.places[plan.reads or 0] for plan in assistant.architecture.layers]
    return PagedKVCache(kv_cache.stacks, tuple(places))


def assistant_speculator(
    target: DecoderModel, assistant: DecoderModel, kv_cache: PagedKVCache, max_draft: int
) -> Speculator:
    """An assistant drafts whatever becomes of it; `kv_cache`: its target's."""
    own_tap, tap = assistant.architecture.num_layers, target.architecture.num_layers
    runner = ModelRunner(assistant, cache_seen(assistant, kv_cache), taps=(own_tap,))
    return eager(AssistantDrafter(runner, (tap,), 256), max_draft)
