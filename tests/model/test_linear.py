"""Products with weights in fewer bits compute what the dequantized weights do."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checkpoints import random_tensors, tiny_config, write_checkpoint
from safetensors.torch import save_file
from torch import Tensor

from localllm.model.families.table import read_architecture
from localllm.model.linear import DequantizedLinear, fuse, packed_linear
from localllm.model.packed.fp8 import Fp8Weight
from localllm.model.packed.int4 import CpuInt4Linear, Int4Weight, int4_block_rows, pack_nibbles
from localllm.model.packed.int4_schemes import PackedInt4
from localllm.model.packed.int8 import CpuInt8Linear, Int8Weight
from localllm.model.packed.scheme import RESIDENT_SHARE
from localllm.model.packed.weight import MAX_OPERATOR_ROWS
from localllm.model.weight_check import check_weights
from localllm.model.weight_files import find_weight_files

IN = 256
needs_operator = pytest.mark.skipif(
    int4_block_rows() is None, reason="torch's int4 operator has an unknown layout here"
)


def int4(width_out: int, group_size: int, *, symmetric: bool, permuted: bool = False) -> Int4Weight:
    num_groups = IN // group_size
    zeros = torch.randint(16, (width_out, num_groups), dtype=torch.uint8)
    return Int4Weight(
        pack_nibbles(torch.randint(16, (width_out, IN), dtype=torch.uint8)),
        ((torch.rand(width_out, num_groups) + 0.1) / 40).bfloat16(),
        None if symmetric else zeros,
        torch.randperm(IN) if permuted else None,
    )


def fp8(width_out: int) -> Fp8Weight:
    codes = torch.randn(width_out, IN).to(torch.float8_e4m3fn)
    return Fp8Weight(codes, torch.rand(-(-width_out // 32), 2), (32, 128))


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@needs_operator
@pytest.mark.parametrize("rows", [1, 3, MAX_OPERATOR_ROWS, MAX_OPERATOR_ROWS + 1, 33])
@pytest.mark.parametrize("width_out", [16, 44, 64, 200])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_on_a_cpu(rows: int, width_out: int, group_size: int) -> None:
    for symmetric, permuted in ((True, False), (False, False), (False, True)):
        weight = int4(width_out, group_size, symmetric=symmetric, permuted=permuted)
        bias = torch.randn(width_out).bfloat16()
        linear = packed_linear(weight, bias, torch.bfloat16)
        assert isinstance(linear, CpuInt4Linear)
        x = torch.randn(rows, IN).bfloat16()
        expected = F.linear(x.float(), weight.dequantize(torch.float32), bias.float())
        out = linear(x)
        assert out.shape == (rows, width_out)
        assert out.dtype == torch.bfloat16
        assert relative_error(out, expected) < 0.01


@needs_operator
def test_a_symmetric_weight_loses_nothing_in_the_operator_s_layout() -> None:
    weight = int4(72, 64, symmetric=True)
    linear = packed_linear(weight, None, torch.bfloat16)
    assert isinstance(linear, CpuInt4Linear)
    # The product of more rows goes through the layout and back.
    found = linear(torch.eye(IN).bfloat16()).T
    assert torch.equal(found, weight.dequantize(torch.bfloat16))


@pytest.mark.parametrize("rows", [1, MAX_OPERATOR_ROWS, 9])
def test_int8_on_a_cpu(rows: int) -> None:
    weight = Int8Weight(torch.randint(-127, 128, (40, IN), dtype=torch.int8), torch.rand(40) / 99)
    bias = torch.randn(40).bfloat16()
    linear = packed_linear(weight, bias, torch.bfloat16)
    assert isinstance(linear, CpuInt8Linear)
    x = torch.randn(rows, IN).bfloat16()
    expected = F.linear(x.float(), weight.dequantize(torch.float32), bias.float())
    assert relative_error(linear(x), expected) < 0.01


def test_other_types_dequantize_and_are_exact() -> None:
    blocks = fp8(40)
    x = torch.randn(5, IN)
    for weight in (int4(40, 64, symmetric=False), blocks):
        linear = packed_linear(weight, None, torch.float32)
        assert isinstance(linear, DequantizedLinear)
        assert torch.equal(linear(x), F.linear(x, weight.dequantize(torch.float32)))
    rows = blocks.dequantize(torch.float32)
    assert torch.equal(rows[33, 200], blocks.codes[33, 200].float() * blocks.scales[1, 1])


def test_what_fuses_and_what_does_not() -> None:
    plain, other = int4(16, 64, symmetric=True), int4(32, 64, symmetric=False)
    fused = fuse([plain, other])
    assert isinstance(fused, Int4Weight)
    stacked = torch.cat([plain.dequantize(), other.dequantize()])
    assert torch.equal(fused.dequantize(), stacked)
    permuted = int4(16, 64, symmetric=True, permuted=True)
    assert fuse([plain, permuted]) is None
    assert fuse([plain, int4(16, 32, symmetric=True)]) is None
    assert fuse([permuted, Int4Weight(plain.codes, plain.scales, None, permuted.permutation)])
    first, last = fp8(64), fp8(40)
    whole = fuse([first, last])
    assert isinstance(whole, Fp8Weight)
    both = torch.cat([first.dequantize(), last.dequantize()])
    assert torch.equal(whole.dequantize(), both)
    # A block of the second weight would straddle the seam.
    assert fuse([last, first]) is None


@needs_operator
@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_resident_weights_are_little_larger_than_the_file(
    tmp_path: Path, group_size: int, symmetric: bool
) -> None:
    config = tiny_config("LlamaForCausalLM", hidden_size=IN, intermediate_size=2 * IN, head_dim=64)
    weights = {
        "num_bits": 4,
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group_size,
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    write_checkpoint(tmp_path, config)
    scheme = PackedInt4(group_size, symmetric)
    stored = random_tensors(config)
    resident = 0
    for name in [name for name in stored if "_proj" in name]:
        width_out, width_in = stored.pop(name).shape
        weight = int4(width_out, group_size, symmetric=symmetric)
        weight = Int4Weight(
            weight.codes.repeat(1, width_in // IN),
            weight.scales.repeat(1, width_in // IN),
            None if weight.zeros is None else weight.zeros.repeat(1, width_in // IN),
        )
        linear = packed_linear(weight, None, torch.bfloat16)
        assert isinstance(linear, CpuInt4Linear)
        resident += linear.packed.nbytes + linear.scales_and_offsets.nbytes
        for suffix, tensor in scheme.write(weight).items():
            stored[f"{name.removesuffix('.weight')}.{suffix}"] = tensor
    save_file(stored, tmp_path / "model.safetensors")
    architecture = read_architecture(tmp_path)
    weight_map = check_weights(find_weight_files(tmp_path), architecture)
    in_file = sum(
        info.num_bytes for each in weight_map.quantized.values() for info in each.parts.values()
    )
    assert in_file < resident <= RESIDENT_SHARE * in_file
    plain_bytes = sum(info.num_bytes // 2 for info in weight_map.plain.values())  # float32 stored
    assert weight_map.resident_bytes(2) == int(in_file * RESIDENT_SHARE) + plain_bytes
