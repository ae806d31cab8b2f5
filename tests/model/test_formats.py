"""Quantized file formats: read back by readers that are not ours, and bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import random_e4m3
from checkpoints import tiny_config
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import (
    ModelOptNvfp4Converter,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from golden import (
    AWQ_CONFIG,
    GOLDEN,
    logits_of,
    packed_config,
    write_golden,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.errors import CheckpointError, UnsupportedModelError
from localllm.model.linear import SplitLinear
from localllm.model.packed.fp8 import Fp8Weight
from localllm.model.packed.fp8_schemes import Fp8
from localllm.model.packed.int4 import Int4Weight, pack_nibbles
from localllm.model.packed.int4_schemes import Awq, Gptq, PackedInt4
from localllm.model.packed.int8 import Int8Weight
from localllm.model.packed.int8_schemes import PackedInt8, PlainInt8
from localllm.model.packed.mxfp4 import Mxfp4Weight
from localllm.model.packed.mxfp4_schemes import BlocksMxfp4, PackedMxfp4
from localllm.model.packed.nvfp4 import Nvfp4Weight
from localllm.model.packed.nvfp4_schemes import ModelOptNvfp4, PackedNvfp4
from localllm.model.packed.scheme import Scheme
from localllm.model.packed.table import PACKED_TYPES
from localllm.model.packed.trellis_schemes import Trellis
from localllm.model.quantization_config import read_quantization

OUT, IN = 48, 128


def random_int4(
    group_size: int = 32,
    *,
    symmetric: bool = False,
    permuted: bool = False,
    dtype: torch.dtype = torch.float16,
    least_zero: int = 0,
    width_out: int = OUT,
) -> Int4Weight:
    num_groups = IN // group_size
    zeros = torch.randint(least_zero, 16, (width_out, num_groups), dtype=torch.uint8)
    permutation = None
    if permuted:
        # In a group the features stand in their own order, as the files have no other.
        groups = torch.randperm(IN) // group_size
        permutation = torch.sort(groups, stable=True).indices
    return Int4Weight(
        pack_nibbles(torch.randint(16, (width_out, IN), dtype=torch.uint8)),
        (torch.rand(width_out, num_groups) + 0.1).to(dtype),
        None if symmetric else zeros,
        permutation,
    )


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    for name in a.__dataclass_fields__:
        left, right = getattr(a, name), getattr(b, name)
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            assert left.dtype == right.dtype, name
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), name
        else:
            assert left == right, name


def random_int8(dtype: torch.dtype = torch.float32) -> Int8Weight:
    codes = torch.randint(-127, 128, (OUT, IN), dtype=torch.int8)
    return Int8Weight(codes, torch.rand(OUT).to(dtype))


def random_fp8(scales_shape: tuple[int, int], block: tuple[int, int]) -> Fp8Weight:
    return Fp8Weight(torch.randn(OUT, IN).to(torch.float8_e4m3fn), torch.rand(scales_shape), block)


def random_mxfp4() -> Mxfp4Weight:
    """With exponents such as weights have, and the least and the greatest."""
    codes = torch.randint(256, (OUT, IN // 2), dtype=torch.uint8)
    exponents = torch.randint(100, 130, (OUT, IN // 32), dtype=torch.uint8)
    exponents[0, 0], exponents[-1, -1] = 0, 252
    return Mxfp4Weight(codes, exponents)


def random_nvfp4(divisor: float = 1300.7) -> Nvfp4Weight:
    codes = torch.randint(256, (OUT, IN // 2), dtype=torch.uint8)
    return Nvfp4Weight(codes, random_e4m3(OUT, IN // 16), torch.full((OUT,), divisor))


SCHEMES: list[tuple[Scheme, Any]] = [
    (PackedInt4(32, symmetric=True), random_int4(symmetric=True)),
    (PackedInt4(64, symmetric=False), random_int4(64, dtype=torch.bfloat16)),
    (PackedInt4(None, symmetric=True), random_int4(IN, symmetric=True)),
    (PackedInt8(), random_int8()),
    (PlainInt8(), random_int8()),
    (Awq(32), random_int4()),
    (Gptq(32, is_v2=False), random_int4(least_zero=1)),
    (Gptq(32, is_v2=True), random_int4()),
    (Gptq(32, is_v2=True), random_int4(permuted=True)),
    (Gptq(64, is_v2=False), random_int4(64, symmetric=True)),
    (PackedMxfp4(), random_mxfp4()),
    (BlocksMxfp4(), random_mxfp4()),
    (PackedNvfp4(), random_nvfp4()),
    (ModelOptNvfp4(), random_nvfp4(512.0)),
    (Trellis(), PACKED_TYPES["trellis3"].draw((OUT, IN), torch.Generator())),
    (Fp8("weight_scale", None), random_fp8((OUT, 1), (1, IN))),
    (Fp8("weight_scale_inv", (32, 128)), random_fp8((2, 1), (32, 128))),
]


@pytest.mark.parametrize(
    ("scheme", "weight", "suffix"),
    [
        (PackedNvfp4(), random_nvfp4(), "input_global_scale"),
        (ModelOptNvfp4(), random_nvfp4(512.0), "input_scale"),
        (Fp8("weight_scale", None), random_fp8((OUT, 1), (1, IN)), "input_scale"),
        (Fp8("weight_scale_inv", None), random_fp8((OUT, 1), (1, IN)), "activation_scale"),
    ],
)
def test_the_scales_of_inputs_are_read(scheme: Scheme, weight: Any, suffix: str) -> None:
    """compressed-tensors' of NVFP4 divides; of weights in one product the widest counts."""
    tensors = scheme.write(weight)
    plain = scheme.read(tensors)
    assert isinstance(plain, Nvfp4Weight | Fp8Weight)
    assert plain.coded().input_scale is None
    read = [scheme.read({**tensors, suffix: torch.tensor([size])}) for size in (4.0, 0.5)]
    scales = [each.coded().input_scale for each in read]  # type: ignore[union-attr]
    expected = [0.25, 2.0] if suffix == "input_global_scale" else [4.0, 0.5]
    assert [float(each) for each in scales if each is not None] == expected  # type: ignore[arg-type]
    fused = type(plain).stack(read)
    assert float(fused.coded().input_scale) == max(expected)  # type: ignore[arg-type,union-attr]
    assert type(plain).stack([*read, plain]).coded().input_scale is None  # type: ignore[union-attr]
    for bad in (0.0, -1.0, torch.inf, torch.nan, 1e-40):
        broken = scheme.read({**tensors, suffix: torch.tensor([bad])})
        assert broken.coded().input_scale is None  # type: ignore[union-attr]
    taken = fused.take_rows(torch.tensor([OUT, 1]))
    assert float(taken.coded().input_scale) == max(expected)  # type: ignore[arg-type,union-attr]


@pytest.mark.parametrize(("scheme", "weight"), SCHEMES, ids=lambda x: type(x).__name__)
def test_what_is_written_is_read_back(scheme: Scheme, weight: Any) -> None:
    tensors = scheme.write(weight)
    stored = scheme.stored(OUT, IN)
    for name, tensor in tensors.items():
        assert tuple(tensor.shape) in stored[name].shapes
        assert tensor.is_contiguous()
    assert tensors.keys() >= {name for name, each in stored.items() if not each.is_optional}
    assert scheme.marker in tensors
    assert_same(scheme.read(tensors), weight)


@pytest.mark.parametrize("width_out", [OUT, 44])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 128, None])
def test_compressed_tensors_reads_packed_int4_bit_for_bit(
    group_size: int | None, symmetric: bool, width_out: int
) -> None:
    weight = random_int4(
        group_size or IN, symmetric=symmetric, dtype=torch.bfloat16, width_out=width_out
    )
    tensors = PackedInt4(group_size, symmetric).write(weight)
    args = QuantizationArgs(
        num_bits=4,
        type="int",
        symmetric=symmetric,
        strategy="group" if group_size else "channel",
        group_size=group_size,
    )
    assert torch.equal(decompressed("pack-quantized", args, tensors), weight.dequantize())


def test_compressed_tensors_reads_packed_int8_bit_for_bit() -> None:
    weight = random_int8(torch.bfloat16)
    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    tensors = PackedInt8().write(weight)
    assert torch.equal(decompressed("pack-quantized", args, tensors), weight.dequantize())


def test_compressed_tensors_reads_fp8_bit_for_bit() -> None:
    weight = Fp8Weight(
        torch.randn(OUT, IN).to(torch.float8_e4m3fn), torch.rand(OUT, 1).bfloat16(), (1, IN)
    )
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel")
    tensors = Fp8("weight_scale", None).write(weight)
    theirs = decompressed("float-quantized", args, tensors)
    assert torch.equal(theirs, weight.dequantize(torch.bfloat16))


def test_compressed_tensors_reads_mxfp4_bit_for_bit() -> None:
    weight = random_mxfp4()
    args = QuantizationArgs(
        num_bits=4, type="float", symmetric=True, strategy="group", group_size=32
    )
    args.scale_dtype = torch.uint8
    theirs = decompressed("mxfp4-pack-quantized", args, PackedMxfp4().write(weight))
    # Theirs are computed in bfloat16, whose subnormals torch keeps.
    assert torch.equal(theirs.float(), weight.dequantize(torch.bfloat16).float())


def nvfp4_args() -> QuantizationArgs:
    args = QuantizationArgs(
        num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16
    )
    args.scale_dtype = torch.float8_e4m3fn
    return args


def test_compressed_tensors_reads_nvfp4_bit_for_bit() -> None:
    weight = random_nvfp4()
    theirs = decompressed("nvfp4-pack-quantized", nvfp4_args(), PackedNvfp4().write(weight))
    assert torch.equal(theirs, weight.dequantize(theirs.dtype))


def test_what_modelopt_calls_the_second_scale_divides_in_compressed_tensors() -> None:
    tensors = ModelOptNvfp4().write(random_nvfp4())
    named = {f"m.{name}": tensor for name, tensor in tensors.items()}
    converted = ModelOptNvfp4Converter(targets=["re:.*"]).process(named)
    # A scalar would not be divided by in float32.
    parts = {name.removeprefix("m."): torch.atleast_1d(each) for name, each in converted.items()}
    theirs = decompressed("nvfp4-pack-quantized", nvfp4_args(), parts)
    assert torch.equal(theirs, ModelOptNvfp4().read(tensors).dequantize(theirs.dtype))


@pytest.mark.parametrize("scheme", [PackedNvfp4(), ModelOptNvfp4()])
def test_scales_of_nvfp4_that_are_not_numbers_are_refused(scheme: Scheme) -> None:
    tensors = scheme.write(random_nvfp4())
    name = next(name for name in tensors if name in ("weight_global_scale", "weight_scale_2"))
    for broken in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="global scale"):
            scheme.read({**tensors, name: torch.tensor([broken])})
    tensors["weight_scale"].view(torch.uint8)[3, 1] = 0x7F
    with pytest.raises(ValueError, match="NaN"):
        scheme.read(tensors)


def test_a_scale_that_is_not_a_number_is_refused() -> None:
    for scheme in (PackedMxfp4(), BlocksMxfp4()):
        tensors = scheme.write(random_mxfp4())
        next(each for name, each in tensors.items() if "scale" in name)[3, 1] = 255
        with pytest.raises(ValueError, match="NaN"):
            scheme.read(tensors)


def decompressed(layout: str, args: QuantizationArgs, tensors: dict[str, Tensor]) -> Tensor:
    compressor = BaseCompressor.get_value_from_registry(layout)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight: Tensor = compressor.decompress(tensors, scheme)["weight"]
    return weight


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_the_awq_converter_of_compressed_tensors_reads_awq_bit_for_bit(group_size: int) -> None:
    weight = random_int4(group_size)
    tensors = {f"m.{name}": t for name, t in Awq(group_size).write(weight).items()}
    converted = AutoAWQConverter(group_size=group_size).process(tensors)
    args = QuantizationArgs(
        num_bits=4, type="int", symmetric=False, strategy="group", group_size=group_size
    )
    parts = {name.removeprefix("m."): tensor for name, tensor in converted.items()}
    assert torch.equal(decompressed("pack-quantized", args, parts), weight.dequantize())


@pytest.mark.parametrize("is_v2", [True, False])
@pytest.mark.parametrize("permuted", [True, False])
def test_gptq_unpacks_as_its_description_says(is_v2: bool, permuted: bool) -> None:
    """Value by value, from the format's description: no packing function of ours is used."""
    weight = random_int4(permuted=permuted, least_zero=1)
    tensors = Gptq(32, is_v2=is_v2).write(weight)
    qweight, qzeros = tensors["qweight"].tolist(), tensors["qzeros"].tolist()
    scales, groups = tensors["scales"], tensors["g_idx"].tolist()
    expected = weight.dequantize()
    for row in range(OUT):
        for column in range(IN):
            group = groups[column]
            code = (qweight[column // 8][row] >> (4 * (column % 8))) & 15
            zero = (qzeros[group][row // 8] >> (4 * (row % 8))) & 15
            value = (code - zero - (0 if is_v2 else 1)) * scales[group, row]
            assert value.half() == expected[row, column]


def test_a_zero_of_0_does_not_fit_into_the_first_gptq_format() -> None:
    with pytest.raises(ValueError, match="zero of 0"):
        Gptq(32, is_v2=False).write(random_int4(least_zero=0))


# Whole checkpoints: made as other tools make them, loaded, held against the dequantized model.


@pytest.fixture
def golden(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    def make(
        quantization: dict[str, Any], scheme: Scheme, kind: dict[str, bool]
    ) -> tuple[Path, Path]:
        config = tiny_config("Qwen2ForCausalLM", hidden_size=48, intermediate_size=80)
        folders = tmp_path / "plain", tmp_path / "quantized"
        write_golden(folders, config, quantization, scheme, kind)
        return folders

    return make


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_checkpoint_loads_and_computes_what_its_weights_say(
    golden: Callable[..., tuple[Path, Path]], name: str
) -> None:
    plain, quantized = golden(*GOLDEN[name])
    expected, _ = logits_of(plain, "float32")
    found, model = logits_of(quantized, "float32")
    assert torch.allclose(found, expected, atol=1e-4)
    # Where the projections of a layer were permuted alike they stay one product.
    assert not isinstance(model.layers[0].sublayers[1].block.products[0], SplitLinear)


def test_projections_whose_groups_disagree_stay_apart(
    golden: Callable[..., tuple[Path, Path]],
) -> None:
    _, quantized = golden(*GOLDEN["gptq v2"])
    _, model = logits_of(quantized, "float32")
    # The permutation above depends on the width: query and key have different ones.
    assert isinstance(model.layers[0].sublayers[0].block.products[0], SplitLinear)


def test_group_of_tensors_that_contradict_the_config_is_refused(
    golden: Callable[..., tuple[Path, Path]],
) -> None:
    _, quantized = golden(*GOLDEN["awq"])
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["group_size"] = 8
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"qzeros' has shape .* config.json asks for"):
        logits_of(quantized, "float32")
    config["quantization_config"]["group_size"] = 7
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="not a multiple of the group size 7"):
        logits_of(quantized, "float32")


def test_a_broken_group_index_is_refused(golden: Callable[..., tuple[Path, Path]]) -> None:
    _, quantized = golden(*GOLDEN["gptq act-order"])
    tensors = load_file(quantized / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.g_idx"
    for value, message in ((99, "names a group"), (0, "every group 16 features")):
        tensors[name] = tensors[name].clone().fill_(value)
        save_file(tensors, quantized / "model.safetensors")
        with pytest.raises(CheckpointError, match=message) as caught:
            logits_of(quantized, "float32")
        assert "self_attn.o_proj" in str(caught.value)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_scale_that_is_not_finite_is_refused(
    golden: Callable[..., tuple[Path, Path]], name: str
) -> None:
    _, quantized = golden(*GOLDEN[name])
    tensors = load_file(quantized / "model.safetensors")
    scales = next(key for key in tensors if key.endswith(("o_proj.scales", "o_proj.weight_scale")))
    tensors[scales].view(-1)[-1] = torch.nan
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(CheckpointError, match="not finite") as caught:
        logits_of(quantized, "float32")
    assert scales in caught.value.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"bits": 3}, "bits 3"),
        ({"version": "gemv"}, "gemv"),
        ({"zero_point": False}, "zero_point"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 8}, "bits 8"),
    ],
)
def test_an_unknown_kind_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        read_quantization({**AWQ_CONFIG, **changes})
    assert "vLLM" in caught.value.hint


@pytest.mark.parametrize(
    "raw",
    [
        "awq",
        {**AWQ_CONFIG, "group_size": "many"},
        {"quant_method": "compressed-tensors", "config_groups": []},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"]}}},
        {"quant_method": "fp8", "weight_block_size": [0, 1]},
    ],
)
def test_a_broken_config_is_refused(raw: Any) -> None:
    with pytest.raises(CheckpointError):
        read_quantization(raw)


def test_groups_of_compressed_tensors_are_found_by_name_first() -> None:
    raw = packed_config(True)
    eight = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    raw["config_groups"]["group_1"] = {"targets": ["re:.*lm_head$"], "weights": eight}
    quantization = read_quantization(raw)
    assert quantization is not None
    assert quantization.schemes_of("lm_head") == (PackedInt8(),)
    assert quantization.schemes_of("model.layers.0.mlp.up_proj") == (PackedInt4(16, True),)
    raw["config_groups"]["group_1"]["targets"] = ["re:(a+)+b"]
    with pytest.raises(UnsupportedModelError, match="pattern"):
        read_quantization(raw).schemes_of("lm_head")  # type: ignore[union-attr]
