"""The values of GGUF's blocks, bit for bit those of the format's own package."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from localllm.files.gguf import BLOCK_TYPES
from localllm.model.gguf.tensors import GgufInfo
from localllm.model.packed.block_schemes import KEPT_IN_EIGHT_BITS, Blocks
from localllm.model.packed.gguf_blocks import VALUES, dequantize_blocks
from localllm.model.packed.nvfp4_schemes import GgufNvfp4
from localllm.model.weight_check import StoredLinear

# The package is older.
NEWER = ("Q1_0", "Q2_0")


@pytest.mark.parametrize("name", sorted(VALUES.keys() - NEWER))
def test_values_are_those_of_the_package(name: str) -> None:
    [block] = [each for each in BLOCK_TYPES.values() if each.name == name]
    codes = np.random.default_rng(0).integers(0, 256, (60, 8 * block.num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # some of the scales are not finite
        expected = gguf.quants.dequantize(codes, gguf.GGMLQuantizationType[name])
    found = dequantize_blocks(block, torch.from_numpy(codes)).numpy()
    is_nan = np.isnan(expected)
    assert is_nan.mean() < 0.1
    assert (np.isnan(found) == is_nan).all()
    assert (found.view(np.uint32) == expected.view(np.uint32))[~is_nan].all()


def test_signs_are_bits_and_two_bits_begin_at_minus_one() -> None:
    """As `dequantize_row_q1_0` and `dequantize_row_q2_0` of ggml, value by value."""
    for name, per_byte in (("Q1_0", 8), ("Q2_0", 4)):
        [block] = [each for each in BLOCK_TYPES.values() if each.name == name]
        codes = torch.randint(256, (3, 2 * block.num_bytes)).byte()
        blocks = codes.view(-1, block.num_bytes)
        scales = torch.rand(len(blocks)).half()
        blocks[:, :2] = scales.view(torch.uint8).view(-1, 2)
        found = dequantize_blocks(block, codes).view(len(blocks), -1)
        width = 8 // per_byte
        for i, scale in enumerate(scales.tolist()):
            for j in range(block.num_values):
                code = (
                    int(blocks[i, 2 + j // per_byte]) >> width * (j % per_byte) & (1 << width) - 1
                )
                assert found[i, j] == (2 * code - 1 if width == 1 else code - 1) * scale


def test_nvfp4_is_read_as_the_package_reads_it() -> None:
    codes = torch.randint(256, (60, 3 * 36)).byte()
    codes.view(-1, 36)[:, :4] %= 127  # scales have no sign, and are numbers
    expected = gguf.quants.dequantize(codes.numpy(), gguf.GGMLQuantizationType.NVFP4)
    weight = GgufNvfp4().read({"weight": codes})
    assert torch.equal(weight.dequantize(torch.float32), torch.from_numpy(expected))
    doubled = GgufNvfp4().read({"weight": codes, "scale": torch.tensor([2.0])})
    assert torch.equal(doubled.dequantize(torch.float32), torch.from_numpy(2 * expected))
    assert torch.equal(GgufNvfp4().write(weight)["weight"], codes)


@pytest.mark.parametrize("name", sorted(KEPT_IN_EIGHT_BITS))
def test_few_bits_are_kept_in_eight(name: str) -> None:
    """Each value within half a step of its group of 32, and not more bytes than are planned."""
    [block] = [each for each in BLOCK_TYPES.values() if each.name == name]
    scheme, codes = Blocks(block), torch.randint(256, (2000, 2 * block.num_bytes)).byte()
    values = dequantize_blocks(block, codes)
    # Scales are random halves, some of them huge, tiny, or no numbers.
    groups = values.view(len(values), -1, 32).abs().amax(2)
    is_sane = ((groups > 0.01) & (groups < 1e4)).all(1)
    codes, values = codes[is_sane], values[is_sane].view(-1, 32)
    assert len(codes) > 100
    kept = scheme.read({"weight": codes})
    steps = values.abs().amax(1, keepdim=True) / 127
    away = (kept.dequantize().view(-1, 32) - values).abs()
    assert bool((away <= 0.54 * steps).all())
    assert kept.codes.numel() == round(codes.numel() * scheme.resident_share)
    info = GgufInfo("w", Path(), name, kept.shape, type=block)
    stored = StoredLinear(scheme, {"weight": info}, kept.layout)
    assert stored.read_bytes(2) == kept.codes.numel()


def test_sizes_are_those_of_the_package() -> None:
    known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    checked = 0
    for number, block in BLOCK_TYPES.items():
        if number in known:  # the package is older than the newest types
            assert block.name == known[number]
            sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
            assert sizes == (block.num_values, block.num_bytes)
            checked += 1
    assert checked > 25
