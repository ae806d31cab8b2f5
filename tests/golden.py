"""Quantized checkpoints as other tools make them, beside the same weights dequantized."""

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import random_tensors, write_checkpoint
from safetensors.torch import save_file
from torch import Tensor

from localllm.engine.config import EngineConfig
from localllm.engine.loaded_decoder import load_decoder
from localllm.engine.scoring import WindowScorer
from localllm.model.families.table import architecture_of, read_architecture
from localllm.model.packed.fp8 import Fp8Weight
from localllm.model.packed.fp8_schemes import Fp8
from localllm.model.packed.int4 import Int4Weight, pack_nibbles
from localllm.model.packed.int4_schemes import Awq, Gptq, PackedInt4
from localllm.model.packed.mxfp4_schemes import BlocksMxfp4, PackedMxfp4
from localllm.model.packed.nvfp4_schemes import ModelOptNvfp4, PackedNvfp4
from localllm.model.packed.scheme import Scheme
from localllm.quantize.recipe import Recipe
from localllm.quantize.rounding import round_weight


def quantize_naively(weight: Tensor, *, symmetric: bool, permuted: bool) -> Int4Weight:
    """Groups of 16, rounded to nearest."""
    generator = torch.Generator().manual_seed(int(weight.shape[0]))
    width_out, width_in = weight.shape
    permutation = None
    if permuted:
        groups = torch.randperm(width_in, generator=generator) // 16
        permutation = torch.sort(groups, stable=True).indices
    ordered = weight if permutation is None else weight[:, permutation]
    grouped = ordered.view(width_out, -1, 16)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    if symmetric:
        scales = (torch.maximum(high, -low) / 7).half()
        zeros = torch.full_like(low, 8)
    else:
        scales = ((high - low) / 15).half()
        zeros = (-low / scales).round().clamp(1, 15)
    codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    own_zeros = None if symmetric else zeros.to(torch.uint8)
    packed = pack_nibbles(codes.to(torch.uint8).flatten(1))
    return Int4Weight(packed, scales, own_zeros, permutation)


def gptq_config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, **changes}


def packed_config(symmetric: bool) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": 16,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*down_proj"],
    }


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True}
SYMMETRIC = {"symmetric": True, "permuted": False}
ASYMMETRIC = {"symmetric": False, "permuted": False}
PERMUTED = {"symmetric": True, "permuted": True}
BOTH = {"symmetric": False, "permuted": True}
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [32, 16]}
FP8_BLOCKS = Fp8("weight_scale_inv", (32, 16))
MXFP4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["lm_head"],
}
MODELOPT_CONFIG = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "exclude_modules": ["lm_head"],
}
GOLDEN: dict[str, tuple[dict[str, Any], Scheme, dict[str, bool]]] = {
    "awq": (AWQ_CONFIG, Awq(16), ASYMMETRIC),
    "packed": (packed_config(True), PackedInt4(16, True), SYMMETRIC),
    "packed asymmetric": (packed_config(False), PackedInt4(16, False), ASYMMETRIC),
    "gptq": (gptq_config(), Gptq(16, is_v2=False), ASYMMETRIC),
    "gptq act-order": (gptq_config(desc_act=True), Gptq(16, is_v2=False), PERMUTED),
    "gptq v2": (gptq_config(checkpoint_format="gptq_v2"), Gptq(16, is_v2=True), BOTH),
}


def logits_of(folder: Path, dtype: str, ids: list[int] | None = None) -> tuple[Tensor, Any]:
    """The logits after each of `ids`, and the model."""
    architecture = read_architecture(folder)
    loaded = load_decoder(folder, architecture, EngineConfig(dtype=dtype, max_num_seqs=1))  # type: ignore[arg-type]
    ids = ids or [(7 * i + 3) % 200 for i in range(40)]
    rows = list(WindowScorer(loaded.model, 64).logits(ids))
    return torch.cat(rows), loaded.model


def to_fp8(weight: Tensor, scheme: Fp8) -> Fp8Weight:
    """With a scale for each row, or for each of the scheme's blocks."""
    width_out, width_in = weight.shape
    rows, columns = scheme.block or (1, width_in)
    padded = torch.nn.functional.pad(weight, (0, -width_in % columns, 0, -width_out % rows))
    blocks = padded.view(len(padded) // rows, rows, -1, columns)
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    factors = scales.repeat_interleave(rows, 0)[:width_out].repeat_interleave(columns, 1)
    codes = (weight / factors[:, :width_in]).to(torch.float8_e4m3fn)
    return Fp8Weight(codes, scales, (rows, columns))


def write_golden(
    folders: tuple[Path, Path],
    config: dict[str, Any],
    quantization: dict[str, Any],
    scheme: Scheme,
    kind: dict[str, bool],
) -> None:
    """The dequantized checkpoint in the first folder, the quantized one in the second."""
    architecture = architecture_of(config)
    # Other tools quantize those too that are dequantized here.
    linears = architecture.quantized().keys() | architecture.dense_linears()
    tensors = random_tensors(config)
    plain, stored = {}, {}
    for name, tensor in tensors.items():
        plain[name] = stored[name] = tensor
        linear = name.removesuffix(".weight")
        if linear in linears and "down_proj" not in name and "lm_head" not in name:
            weight: Any
            if isinstance(scheme, Fp8):
                weight = to_fp8(tensor, scheme)
            elif isinstance(scheme, PackedMxfp4 | BlocksMxfp4):
                weight = round_weight(tensor, Recipe("mxfp4"))
            elif isinstance(scheme, PackedNvfp4 | ModelOptNvfp4):
                weight = round_weight(tensor, Recipe("nvfp4"))
            else:
                weight = quantize_naively(tensor, **kind)
            plain[name] = weight.dequantize(torch.float32)
            del stored[name]
            for suffix, part in scheme.write(weight).items():
                stored[f"{linear}.{suffix}"] = part
    for folder, content in zip(folders, (plain, stored), strict=True):
        write_checkpoint(folder, config)
        save_file(content, folder / "model.safetensors")
    config = {**config, "quantization_config": quantization}
    (folders[1] / "config.json").write_text(json.dumps(config))
