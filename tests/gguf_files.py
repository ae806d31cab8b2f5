"""Writes checkpoints as GGUF files the way llama.cpp's converter does: its names (by the map of the
format's own package), what it does to tensors, and its keys.

Source: `conversion/*.py` of llama.cpp.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf_keys import add_keys
from gguf_models import GgufModel
from torch import Tensor

from localllm.model.families.aliases import with_known_names
from localllm.model.packed.nvfp4_schemes import GgufNvfp4
from localllm.quantize.recipe import Recipe
from localllm.quantize.rounding import round_weight

_NVFP4 = gguf.GGMLQuantizationType.NVFP4
_EXPERT = re.compile(r"(model\.layers\.(\d+)\..*experts)\.(\d+)\.(\w+)\.(weight|bias)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_OF_EXPERTS = {
    **dict.fromkeys(("gate_proj", "w1"), "ffn_gate_exps"),
    **dict.fromkeys(("up_proj", "w3"), "ffn_up_exps"),
    **dict.fromkeys(("down_proj", "w2"), "ffn_down_exps"),
}
_PAIRED = (
    *("llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid"),
    *("nemotron_h", "nemotron_h_moe"),
)
_RAISED = ("gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
# What the converter renames before it asks the map.
_RENAMED = (
    (r"(.*)\.dt_bias", r"\1.dt_proj.bias"),
    (r"(.*\.sinks|.*\.layer_scalar)", r"\1.weight"),
    (r"(.*)\.e_score_correction_bias", r"\1.e_score_correction.bias"),
    (r"(.*)\.expert_bias", r"\1.expert_bias.bias"),
)
# What the map does not know, or not of all architectures.
_OWN = {
    "eh_proj.weight": "nextn.eh_proj.weight",
    "enorm.weight": "nextn.enorm.weight",
    "hnorm.weight": "nextn.hnorm.weight",
    "shared_head.norm.weight": "nextn.shared_head_norm.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "mixer.dt_proj.bias": "ssm_dt.bias",
}


def write_gguf(
    path: Path,
    model: GgufModel,
    tensors: Mapping[str, Tensor],
    *,
    matrices: str = "F32",
    is_rounded: bool = False,
    head_layers: int = 0,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a file with tensors that have GGUF's names, see `converted`.

    `matrices`: the type of those whose rows are whole blocks of it, but for the router's and the
    small ones of a recurrence; `is_rounded`: they are stored as F32 with the values that they have
    in it; `head_layers`: layers behind the model's own; `changes`: numbers by key, without the
    architecture's name, or None for one that is left out.
    """
    writer = gguf.GGUFWriter(path, model.arch)
    writer.add_type(gguf.GGUFType.MODEL)
    config = with_known_names(model.config, model.config["architectures"][0])
    add_keys(writer, model.arch, config, head_layers)
    [keys] = writer.kv_data
    for name, value in (changes or {}).items():
        keys.pop(f"{model.arch}.{name}", None)
        if value is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{model.arch}.{name}", value)
    for name, tensor in tensors.items():
        if matrices == "NVFP4" and _type_of(name, tensor.shape, _NVFP4) is _NVFP4:
            _add_nvfp4(writer, name, tensor, is_rounded=is_rounded)
            continue
        values = tensor.contiguous().float().numpy()
        kind = _type_of(name, values.shape, gguf.GGMLQuantizationType[matrices])
        codes = gguf.quants.quantize(values, kind)
        if is_rounded:
            writer.add_tensor(name, gguf.quants.dequantize(codes, kind))
        else:
            writer.add_tensor(name, codes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_nvfp4(writer: gguf.GGUFWriter, name: str, tensor: Tensor, *, is_rounded: bool) -> None:
    """With the scale of the tensor, or of each expert, which the package cannot make."""
    experts = tensor if tensor.dim() > 2 else tensor[None]
    weights = [round_weight(each.float(), Recipe("nvfp4")) for each in experts]
    if is_rounded:
        values = torch.stack([each.dequantize(torch.float32) for each in weights])
        writer.add_tensor(name, values.view_as(tensor).numpy())
        return
    parts = [GgufNvfp4().write(each) for each in weights]
    codes = torch.stack([part["weight"] for part in parts]).view(*tensor.shape[:-1], -1)
    writer.add_tensor(name, codes.numpy(), raw_dtype=_NVFP4)
    scales = torch.cat([part["scale"] for part in parts])
    base = name.removesuffix(".weight")
    writer.add_tensor(f"{base}.scale", scales.numpy())
    writer.add_tensor(f"{base}.input_scale", torch.ones_like(scales).numpy())


def _type_of(
    name: str, shape: tuple[int, ...], wanted: gguf.GGMLQuantizationType
) -> gguf.GGMLQuantizationType:
    is_kept = any(each in name for each in ("norm", "ffn_gate_inp", "conv", "ssm_a", "ssm_d"))
    is_matrix = len(shape) > 1 and name.endswith(".weight") and not is_kept
    is_whole = shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
    return wanted if is_matrix and is_whole else gguf.GGMLQuantizationType.F32


def converted(
    model: GgufModel, tensors: Mapping[str, Tensor], head_layers: int = 0
) -> dict[str, Tensor]:
    """A checkpoint's tensors, which have the loader's names, by GGUF's and as the converter has
    them.
    """
    config, arch = model.config, model.arch
    count = config["num_hidden_layers"] + head_layers
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(numbers[arch], count)
    found = dict(tensors)
    if config.get("tie_word_embeddings"):
        found.pop("lm_head.weight", None)
    stored = {**dict(_experts(found, arch)), **dict(_factors(config))}
    for name, tensor in found.items():
        for own, values in _changed(name, tensor, arch, config):
            stored[_named(own, known, arch)] = values
    return stored


def _experts(found: dict[str, Tensor], arch: str) -> Iterator[tuple[str, Tensor]]:
    """Those of all experts in one; they are taken out of `found`."""
    groups = dict[tuple[str, str, str], list[Tensor]]()
    for name in [*found]:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            key = match[2], _OF_EXPERTS[match[4]], match[5]
            groups.setdefault(key, []).append(found.pop(name))
    stacks = {key: torch.stack(parts) for key, parts in groups.items()}
    if arch == "gemma4":
        for layer, kind, ending in [*stacks]:
            if kind == "ffn_gate_exps":
                gate = stacks.pop((layer, kind, ending))
                up = stacks.pop((layer, "ffn_up_exps", ending))
                stacks[layer, "ffn_gate_up_exps", ending] = torch.cat((gate, up), dim=1)
    for (layer, kind, ending), whole in stacks.items():
        yield f"blk.{layer}.{kind}.{ending}", whole


def _named(name: str, known: gguf.TensorNameMap, arch: str) -> str:
    if name.startswith("blk."):
        return name
    for pattern, replacement in _RENAMED:
        name = re.sub(f"^{pattern}$", replacement, name)
    match = _LAYER.fullmatch(name)
    if match is not None and match[2] in _OWN:
        return f"blk.{match[1]}.{_OWN[match[2]]}"
    if arch.startswith("nemotron"):
        name = name.replace("model.layers.", "backbone.layers.")
    found = known.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _paired(tensor: Tensor, heads: int) -> Tensor:
    """The two values that turn together side by side."""
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _changed(
    name: str, tensor: Tensor, arch: str, config: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    heads = config.get("num_attention_heads", 1)
    kv_heads = config.get("num_key_value_heads", heads)
    layer, kind = name.rpartition(".layers.")[2].partition(".")[::2]
    if arch in _PAIRED and re.search(r"\.[qk]_proj\.", name):
        tensor = _paired(tensor, heads if ".q_proj." in name else kv_heads)
    if arch in _RAISED and name.endswith("norm.weight") and kind != "linear_attn.norm.weight":
        tensor = tensor + 1
    if arch in ("qwen35", "qwen35moe") and kind.startswith("linear_attn."):
        tensor = _tiled(kind, tensor, config)
    if name.endswith(".A_log"):
        tensor = -tensor.exp()
    if ".conv1d.weight" in name or ".conv.weight" in name:
        tensor = tensor.squeeze(1)
    if kind.startswith(("mamba.", "mixer.")):
        if kind.endswith((".A_log", ".D")):
            tensor = tensor[:, None]
        elif kind.endswith(".norm.weight"):
            groups = config.get("mamba_n_groups") or config["n_groups"]
            tensor = tensor.view(groups, -1)
    splits: dict[str, Callable[[], Iterator[tuple[str, Tensor]]]] = {
        "linear_attn.in_proj_qkvz.weight": lambda: _regrouped(layer, tensor, config),
        "self_attn.kv_b_proj.weight": lambda: _expansions(layer, tensor, config),
        "shared_mlp.input_linear.weight": lambda: _shared(layer, tensor, config),
    }
    if kind == "shared_mlp.output_linear.weight" and not config.get("num_local_experts"):
        yield f"blk.{layer}.ffn_down.weight", tensor
    elif kind in splits:
        yield from splits[kind]()
    else:
        yield name, tensor


def _regrouped(layer: str, tensor: Tensor, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Queries, keys and values of all heads, then the gates, in place of all of each head."""
    keys, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    of_head = tensor.view(keys, -1, tensor.shape[1])
    ends = (0, width, 2 * width, 2 * width + values, 2 * width + 2 * values)
    parts = [of_head[:, first:end].flatten(0, 1) for first, end in pairwise(ends)]
    yield f"blk.{layer}.attn_qkv.weight", torch.cat(parts[:3])
    yield f"blk.{layer}.attn_gate.weight", parts[3]


def _tiled(kind: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """The first value heads of all key heads, then the second ones, in place of all of each."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width, before = config["linear_value_head_dim"], 2 * keys * config["linear_key_head_dim"]

    def tiled(rows: Tensor, size: int) -> Tensor:
        parts = rows.reshape(keys, values // keys, size, *rows.shape[1:])
        return parts.transpose(0, 1).reshape(rows.shape)

    match kind.split(".")[1]:
        case "in_proj_qkv" | "conv1d":
            return torch.cat((tensor[:before], tiled(tensor[before:], width)))
        case "in_proj_z":
            return tiled(tensor, width)
        case "in_proj_a" | "in_proj_b" | "A_log" | "dt_bias":
            return tiled(tensor, 1)
        case "out_proj":
            return tiled(tensor.T, width).T
        case _:
            return tensor


def _expansions(layer: str, tensor: Tensor, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Of each head from queries to latents, and from latents to values."""
    of_head = tensor.view(config["num_attention_heads"], -1, tensor.shape[1])
    width = config["qk_nope_head_dim"]
    yield f"blk.{layer}.attn_k_b.weight", of_head[:, :width].transpose(1, 2)
    yield f"blk.{layer}.attn_v_b.weight", of_head[:, width:]


def _shared(layer: str, tensor: Tensor, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    ending = "_shexp" if config.get("num_local_experts") else ""
    for kind, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
        yield f"blk.{layer}.ffn_{kind}{ending}.weight", part


def _factors(config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """What frequencies are divided by."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", torch.tensor(scaling[f"{kind}_factor"])
    if scaling.get("rope_type") == "llama3":
        width, base = config["head_dim"], config["rope_theta"]
        lengths = 2 * torch.pi * base ** (torch.arange(0, width, 2) / width)
        low, high, factor = (scaling[f"{k}factor"] for k in ("low_freq_", "high_freq_", ""))
        turns = scaling["original_max_position_embeddings"] / lengths
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        yield "rope_freqs.weight", 1 / ((1 - smooth) / factor + smooth)
    full = (config.get("rope_parameters") or {}).get("full_attention", {})
    if full.get("rope_type") == "proportional":
        pairs = config["global_head_dim"] // 2
        turned = int(pairs * full["partial_rotary_factor"])
        yield "rope_freqs.weight", torch.tensor([1.0] * turned + [1e30] * (pairs - turned))
