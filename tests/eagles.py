"""Folders with EAGLE heads, with random weights and in the published layouts, for tests."""

import json
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from checkpoints import random_values, tiny_config
from heads import FUSED_TAPS, load_beside
from safetensors.torch import save_file
from torch import Tensor

from localllm.model.architecture import Architecture
from localllm.model.decoder import DecoderModel
from localllm.model.eagle import find_eagle
from localllm.model.found_head import FoundHead
from localllm.model.weight_files import find_weight_files
from localllm.model.weights import open_source

Layout = Literal["authors", "speculators"]
EAGLE3_LAYER = {"authors": "midlayer", "speculators": "layers.0"}


def layer_config(width: int, **changes: Any) -> dict[str, Any]:
    """The layers of a head of `width`, as a Llama."""
    return tiny_config("LlamaForCausalLM", hidden_size=width, num_hidden_layers=1) | changes


def _layer(name: str, width: int, width_in: int, *, has_head_norms: bool) -> dict[str, Any]:
    shapes = {
        f"{name}.self_attn.q_proj.weight": (64, width_in),
        f"{name}.self_attn.k_proj.weight": (32, width_in),
        f"{name}.self_attn.v_proj.weight": (32, width_in),
        f"{name}.self_attn.o_proj.weight": (width, 64),
        f"{name}.mlp.gate_proj.weight": (80, width),
        f"{name}.mlp.up_proj.weight": (80, width),
        f"{name}.mlp.down_proj.weight": (width, 80),
        f"{name}.post_attention_layernorm.weight": (width,),
    }
    if has_head_norms:
        shapes |= {f"{name}.self_attn.{each}_norm.weight": (16,) for each in "qk"}
    return shapes


def write_eagle3(
    folder: Path,
    target: Architecture,
    layout: Layout = "authors",
    num_drafted: int = 40,
    num_layers: int = 1,
    fc_norms: Literal["none", "one", "each"] = "none",
    model_type: str = "llama",
    **fields: Any,
) -> dict[str, Tensor]:
    """A head for `target`, whose tensors it returns by their names in the file."""
    width, vocab_size = target.hidden_size, target.vocab_size
    first, norms = EAGLE3_LAYER[layout], model_type == "qwen3"
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, 3 * width),
        **_layer(first, width, 2 * width, has_head_norms=norms),
        f"{first}.hidden_norm.weight": (width,),
        f"{first}.input_layernorm.weight": (width,),
        "norm.weight": (width,),
        "lm_head.weight": (num_drafted, width),
    }
    for i in range(1, num_layers):
        shapes |= _layer(f"layers.{i}", width, width, has_head_norms=norms)
        shapes[f"layers.{i}.input_layernorm.weight"] = (width,)
    if fc_norms == "one":
        shapes["input_norm.weight"] = (3 * width,)
    if fc_norms == "each":
        shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(3)}
    generator = torch.Generator().manual_seed(11)
    tensors = {name: random_values(name, shape, generator) for name, shape in shapes.items()}
    if num_drafted < vocab_size:
        drafted = torch.randperm(vocab_size, generator=generator)[:num_drafted].sort().values
        tensors["d2t"] = drafted - torch.arange(num_drafted)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, drafted, True)
    layers = layer_config(width, num_hidden_layers=num_layers, model_type=model_type)
    own = {"draft_vocab_size": num_drafted, **fields}
    if layout == "authors":
        config = {**layers, **own, "architectures": ["LlamaForCausalLMEagle3"]}
    else:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layers,
            "norm_before_fc": fc_norms == "one",
            "fc_norm": fc_norms == "each",
            **own,
        }
    _write(folder, config, tensors)
    return tensors


def write_eagle(
    folder: Path, target: Architecture, layout: Layout = "authors", *, has_norms: bool = False
) -> dict[str, Tensor]:
    """A head of the first kind; `has_norms`: those that speculators' layout may have."""
    width = target.hidden_size
    is_theirs = layout == "speculators"
    fc, layer = ("fusion_fc", "transformer") if is_theirs else ("fc", "layers.0")
    shapes: dict[str, tuple[int, ...]] = {
        f"{fc}.weight": (width, 2 * width),
        f"{fc}.bias": (width,),
        **_layer(layer, width, width, has_head_norms=False),
    }
    if has_norms:
        names = ("embedding_layernorm", "pre_lm_head_layernorm", f"{layer}.input_layernorm")
        shapes |= {f"{name}.weight": (width,) for name in names}
    generator = torch.Generator().manual_seed(12)
    tensors = {name: random_values(name, shape, generator) for name, shape in shapes.items()}
    config = {**layer_config(width), "architectures": ["LlamaForCausalLM"]}
    if is_theirs:
        config = {
            "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
            "speculators_model_type": "eagle",
            "transformer_layer_config": layer_config(width),
            "layernorms": has_norms,
            "fusion_bias": True,
        }
    _write(folder, config, tensors)
    return tensors


def found_eagle(folder: Path, target_folder: Path, target: Architecture) -> FoundHead:
    """The head in a folder, for a target in another."""
    files = find_weight_files(target_folder)
    return find_eagle("head", folder, "target", target, files)


def load_eagle(found: FoundHead, target: DecoderModel) -> DecoderModel:
    """A head with its weights."""
    with open_source(found.weights) as source:
        return load_beside(source, found.architecture, target)


def random_eagle3(target: DecoderModel) -> DecoderModel:
    """A head with random weights, whose taps are FUSED_TAPS; see heads.py."""
    with tempfile.TemporaryDirectory() as name:
        folder, layers = Path(name), [tap + 1 for tap in FUSED_TAPS]
        write_eagle3(folder, target.architecture, eagle_aux_hidden_state_layer_ids=layers)
        return load_eagle(found_eagle(folder, folder, target.architecture), target)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    own = {name: values.contiguous() for name, values in tensors.items()}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
