"""Quantization configs as other tools write them: what is read, and what is refused by name."""

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_tensors, tiny_config, write_checkpoint
from compressed_tensors.transform import (
    TransformArgs,
    TransformConfig,
    TransformScheme,
    apply_transform_config,
)
from golden import (
    AWQ_CONFIG,
    FP8_CONFIG,
    GOLDEN,
    gptq_config,
    logits_of,
    packed_config,
    write_golden,
)
from safetensors.torch import load_file, save_file
from torch import nn

from localllm.errors import CheckpointError, UnsupportedModelError
from localllm.model.families.table import architecture_of, read_architecture
from localllm.model.packed.fp8_schemes import Fp8
from localllm.model.packed.int4 import Int4Weight, pack_nibbles
from localllm.model.packed.int4_schemes import Awq, Gptq, PackedInt4
from localllm.model.packed.int8_schemes import PackedInt8, PlainInt8
from localllm.model.packed.nvfp4_schemes import ModelOptNvfp4, PackedNvfp4
from localllm.model.packed.scheme import Scheme
from localllm.model.quantization_config import read_quantization
from localllm.model.quantization_fields import check_quantization_fields, with_quantization

UP = "model.layers.0.mlp.up_proj"


def schemes(raw: dict[str, Any], name: str = UP) -> tuple[Scheme, ...]:
    found = read_quantization(raw)
    assert found is not None
    return found.schemes_of(name)


def packed(**changes: Any) -> dict[str, Any]:
    """compressed-tensors, with changes of the whole or, under "weights", of its group's weights."""
    raw = copy.deepcopy(packed_config(True))
    raw["config_groups"]["group_0"]["weights"].update(changes.pop("weights", {}))
    return {**raw, **changes}


INT8 = {"num_bits": 8, "strategy": "channel", "group_size": None}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
BLOCKS = {**FP8, "strategy": "block", "block_structure": "128x64"}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (packed(quantization_status="frozen"), (PackedInt4(16, True),)),
        (packed(quantization_status=None), (PackedInt4(16, True),)),
        (packed(format=None), (PackedInt4(16, True),)),
        (packed(format=None, weights=INT8), (PackedInt8(), PlainInt8())),
        (packed(format="int-quantized", weights=INT8), (PlainInt8(),)),
        (packed(format=None, weights=FP8), (Fp8("weight_scale", None),)),
        (packed(format="float-quantized", weights=BLOCKS), (Fp8("weight_scale", (128, 64)),)),
        (packed(sparsity_config={"format": "dense"}, kv_cache_scheme={}), (PackedInt4(16, True),)),
        (packed(weights={"actorder": "group", "num_bits": "4"}), (PackedInt4(16, True),)),
        (gptq_config(bits="4", group_size="128"), (Gptq(128, is_v2=False),)),
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, (Gptq(None, is_v2=False),)),
        (gptq_config(checkpoint_format=None, format="gptq_v2"), (Gptq(16, is_v2=True),)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}, (Awq(32),)),
        ({**AWQ_CONFIG, "modules_to_not_convert": None, "backend": "autoawq"}, (Awq(16),)),
        ({**FP8_CONFIG, "activation_scheme": "static"}, (Fp8("weight_scale_inv", (32, 16)),)),
        ({"quant_method": "fbgemm_fp8"}, (Fp8("weight_scale", None),)),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, (Fp8("weight_scale", None),)),
        (
            {"quant_method": "modelopt", "producer": {"name": "modelopt"}}
            | {"quantization": {"quant_algo": "NVFP4", "group_size": 16}},
            (ModelOptNvfp4(),),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
            | {"quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4"}}},
            (ModelOptNvfp4(), Fp8("weight_scale", None)),
        ),
        (packed(format="nvfp4-pack-quantized", weights=NVFP4), (PackedNvfp4(),)),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 64}
            | {"packing_format": "auto_round:auto_gptq", "data_type": "int"},
            (Gptq(64, is_v2=False),),
        ),
    ],
)
def test_what_tools_write_is_read(raw: dict[str, Any], expected: tuple[Scheme, ...]) -> None:
    assert check_quantization_fields(raw) == ()
    assert schemes(raw) == expected


def rotated(location: str) -> dict[str, Any]:
    applied = {"targets": ["re:.*down_proj$"], "location": location}
    group = {"type": "hadamard", "apply": [applied]}
    return packed(transform_config={"config_groups": {"R4": group}})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (rotated("input"), "R4.*location 'input'"),
        (rotated("k_cache"), "k_cache"),
        (packed(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (packed(rotation="hadamard"), "quantization_config.rotation"),
        (gptq_config(adapter={"rank": 64}), "quantization_config.adapter"),
        (gptq_config(pack_dtype="int16"), "pack_dtype 'int16'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:x"}, "auto_round"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_quantization(raw)


@pytest.mark.parametrize("raw", [rotated("input"), packed(sparsity_config={"format": "bitmask"})])
def test_it_is_refused_before_the_files_are_there(raw: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="_config"):
        architecture_of({**tiny_config("LlamaForCausalLM"), "quantization_config": raw})


def test_a_field_of_it_that_nobody_knows_is_named() -> None:
    raw = packed(wobble=3, weights={"sharpness": 2.0})
    config = {**tiny_config("LlamaForCausalLM"), "quantization_config": raw}
    assert architecture_of(config).unknown_fields == (
        "quantization_config.wobble",
        "quantization_config.group_0.weights.sharpness",
    )


def test_rules_of_gptqmodel_apply_in_their_order() -> None:
    rules = {
        "-:model\\.layers\\.0\\.self_attn\\..*": {},
        "+:.*\\.0\\..*up_proj.*": {"group_size": 32},
        ".*down_proj": {"bits": 8},
        ".*mlp.*": {"group_size": -1, "bits": "4"},
    }
    raw = gptq_config(dynamic=rules)
    assert schemes(raw, "model.layers.0.self_attn.q_proj") == ()
    assert schemes(raw, "model.layers.0.mlp.up_proj") == (Gptq(32, is_v2=False),)
    assert schemes(raw, "model.layers.1.mlp.up_proj") == (Gptq(None, is_v2=False),)
    assert schemes(raw, "model.layers.1.self_attn.q_proj") == (Gptq(16, is_v2=False),)
    with pytest.raises(UnsupportedModelError, match="down_proj in 8 bits"):
        schemes(raw, "model.layers.1.mlp.down_proj")
    with pytest.raises(UnsupportedModelError, match="pattern"):
        schemes(gptq_config(dynamic={"-:(a+)+b": {}}))
    with pytest.raises(CheckpointError, match="dynamic"):
        schemes(gptq_config(dynamic=["-:x"]))


@pytest.fixture
def golden(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """A plain and a quantized checkpoint of one row of GOLDEN."""

    def make(name: str) -> tuple[Path, Path]:
        folders = tmp_path / "plain", tmp_path / "quantized"
        config = tiny_config("Qwen2ForCausalLM", hidden_size=48, intermediate_size=80)
        write_golden(folders, config, *GOLDEN[name])
        return folders

    return make


def change(folder: Path, quantization: dict[str, Any] | None, **tensors: torch.Tensor) -> None:
    """Another `quantization_config`, and more tensors."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, **tensors}, folder / "model.safetensors")


def assert_alike(plain: Path, quantized: Path) -> None:
    expected, _ = logits_of(plain, "float32")
    found, _ = logits_of(quantized, "float32")
    assert torch.allclose(found, expected, atol=1e-4)


def test_scales_of_caches_and_inputs_are_no_left_overs(
    golden: Callable[..., tuple[Path, Path]],
) -> None:
    plain, quantized = golden("packed")
    layer = "model.layers.0.self_attn."
    names = ("kv_scale", "q_scale", "prob_scale", "k_proj.output_scale", "v_proj.output_scale")
    names += ("attn.k_scale", "k_zero_point", "q_proj.input_scale", "q_proj.input_zero_point")
    change(quantized, packed(), **{layer + name: torch.ones(1) for name in names})
    assert_alike(plain, quantized)


@pytest.mark.parametrize(
    ("own", "method"),
    [
        ({"quant_method": "GPTQ"}, "gptq"),
        ({"quant_method": "compressed_tensors"}, "compressed-tensors"),
        ({"config_groups": {}}, "compressed-tensors"),
        ({"quant_algo": "FP8", "producer": {"name": "modelopt"}}, "modelopt"),
        ({"bits": 4}, None),
    ],
)
def test_a_method_is_known_by_its_other_names(
    tmp_path: Path, own: dict[str, Any], method: str | None
) -> None:
    found = with_quantization({"quantization_config": own}, tmp_path)["quantization_config"]
    assert found == {**own, "quant_method": method}


def test_weights_of_mlx_are_refused_by_their_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="MLX"):
        with_quantization({"quantization": {"group_size": 64, "bits": 4}}, tmp_path)


@pytest.mark.parametrize("where", ["quantize_config.json", "compression_config"])
def test_a_quantization_named_elsewhere_is_found(
    golden: Callable[..., tuple[Path, Path]], where: str
) -> None:
    is_file = where.endswith(".json")
    plain, quantized = golden("gptq" if is_file else "packed")
    change(quantized, None)
    config = json.loads((quantized / "config.json").read_text())
    if is_file:
        own = {"bits": 4, "group_size": 16, "desc_act": False, "sym": False}
        (quantized / where).write_text(json.dumps(own))
    else:
        own = {k: v for k, v in packed().items() if k != "quant_method"}
        (quantized / "config.json").write_text(json.dumps({**config, where: own}))
    assert read_architecture(quantized).unknown_fields == ()
    assert_alike(plain, quantized)


def test_a_group_size_of_its_own_by_a_rule_computes_what_its_weights_say(
    golden: Callable[..., tuple[Path, Path]],
) -> None:
    plain, quantized = golden("gptq")
    up, query = UP, "model.layers.0.self_attn.q_proj"
    weights = load_file(plain / "model.safetensors")
    # One linear with one scale a row, and one that is not quantized.
    scales = torch.full((80, 1), 0.1).half()
    codes = torch.randint(1, 16, (80, 48), dtype=torch.uint8)
    weight = Int4Weight(pack_nibbles(codes), scales, torch.full((80, 1), 7, dtype=torch.uint8))
    weights[f"{up}.weight"] = weight.dequantize(torch.float32)
    save_file(weights, plain / "model.safetensors")
    stored = load_file(quantized / "model.safetensors")
    stored = {name: each for name, each in stored.items() if not name.startswith((query, up))}
    stored |= {name: each for name, each in weights.items() if name.startswith(query)}
    parts = Gptq(None, is_v2=False).write(weight)
    stored |= {f"{up}.{name}": each for name, each in parts.items()}
    save_file(stored, quantized / "model.safetensors")
    change(quantized, gptq_config(dynamic={f"-:{query}": {}, f"{up}$": {"group_size": -1}}))
    assert_alike(plain, quantized)


def test_plain_weights_beside_scales_are_plain(golden: Callable[..., tuple[Path, Path]]) -> None:
    plain, _ = golden("packed")
    name, scales = "model.layers.0.self_attn.q_proj", torch.ones(64, 3)
    expected, _ = logits_of(plain, "float32")
    more = {f"{name}.weight_scale": scales, f"{name}.weight_zero_point": scales.to(torch.int8)}
    for raw in (packed(quantization_status="frozen"), packed(format="int-quantized", weights=INT8)):
        change(plain, raw, **more)
        assert torch.equal(logits_of(plain, "float32")[0], expected)


class Halves(nn.Module):
    """Two linears in a row, by the names of a model's."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        self.v_proj, self.o_proj = (
            nn.Linear(weight.shape[1], weight.shape[0], bias=False) for weight in (first, second)
        )
        self.v_proj.weight.data, self.o_proj.weight.data = first, second


def test_rotations_that_are_in_the_weights_change_no_answer(tmp_path: Path) -> None:
    """compressed-tensors turns the values of each head, and turns them back in the output."""
    config = tiny_config("LlamaForCausalLM", num_key_value_heads=4)
    plain, turned = tmp_path / "plain", tmp_path / "turned"
    tensors = random_tensors(config)
    write_checkpoint(plain, config)
    save_file(tensors, plain / "model.safetensors")
    applied = [
        TransformArgs(targets=["re:.*v_proj$"], location="weight_output"),
        TransformArgs(targets=["re:.*o_proj$"], location="weight_input", inverse=True),
    ]
    scheme = TransformScheme(type="hadamard", head_dim=16, apply=applied)
    transforms = TransformConfig(config_groups={"R2": scheme})
    for i in range(config["num_hidden_layers"]):
        names = [f"model.layers.{i}.self_attn.{name}.weight" for name in ("v_proj", "o_proj")]
        halves = Halves(*(tensors[name].clone() for name in names))
        apply_transform_config(halves, transforms)
        assert not torch.allclose(halves.v_proj.weight, tensors[names[0]], atol=0.1)
        tensors[names[0]] = halves.v_proj.weight.detach()
        tensors[names[1]] = halves.o_proj.weight.detach()
    own = packed(transform_config=transforms.model_dump(mode="json"))
    write_checkpoint(turned, {**config, "quantization_config": own})
    save_file(tensors, turned / "model.safetensors")
    assert_alike(plain, turned)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1024, "num_experts": 1 << 16},
        {"num_hidden_layers": 1024, "num_experts": 1024},
        {"num_hidden_layers": 1024, "hidden_size": 1 << 20, "num_experts": 4},
        {"vocab_size": 1 << 24, "hidden_size": 1 << 20, "num_experts": 4},
    ],
)
def test_sizes_whose_product_is_absurd_are_refused_at_once(changes: dict[str, Any]) -> None:
    own = {"num_experts_per_tok": 2, "moe_intermediate_size": 1 << 16}
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=r"the limit is (200,000|8 trillion)"):
        architecture_of(tiny_config("Qwen3MoeForCausalLM", **own, **changes))
    assert time.monotonic() - started < 5
