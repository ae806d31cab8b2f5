"""A table of operators does what its traits say, which is what planning goes by."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blocks import random_blocks
from checkpoints import tiny_config, write_checkpoint
from engines import load_folder
from guards import needs_interpreter

from localllm.cli.models.plan import plan_table
from localllm.cost.planning import machine_with, plan_model, shape_of
from localllm.engine.chosen_operators import library_folder
from localllm.engine.config import EngineConfig
from localllm.hub.catalog import resolve_model
from localllm.model.linear import DequantizedLinear, packed_linear
from localllm.model.packed.int4 import Int4Weight
from localllm.model.packed.table import PACKED_TYPES
from localllm.model.packed.weight import PackedWeight
from localllm.quantize.calibrate import CalibrationRequest
from localllm.quantize.recipe import Recipe
from localllm.quantize.run import QuantizeRequest, quantize_model
from localllm_kernels import TORCH_OPS, cpu_ops, select_ops
from localllm_kernels.backend import find_traits
from localllm_kernels.coded_blocks import BLOCK_SIZES
from localllm_kernels.products.gpu_linears import Int4Product
from localllm_kernels.triton_ops import triton_ops

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
TABLES = [
    "torch",
    pytest.param("c", marks=needs_compiler),
    pytest.param("triton", marks=needs_interpreter),
]


def weights(width_in: int) -> list[PackedWeight]:
    """One of each type, and 4-bit ones in groups of other sizes."""
    generator = torch.Generator().manual_seed(0)
    widths = {"mxfp4": 32, "nvfp4": 16}
    kinds = [kind for kind in PACKED_TYPES if width_in % widths.get(kind, 1) == 0]
    drawn = [PACKED_TYPES[kind].draw((32, width_in), generator) for kind in kinds]
    codes = torch.zeros(32, width_in // 2, dtype=torch.uint8)
    groups = [size for size in (8, 16, 24, 48, 256) if width_in % size == 0]
    return drawn + [Int4Weight(codes, torch.ones(32, width_in // size), None) for size in groups]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width_in", [48, 128, 256, 264])
def test_there_is_a_kernel_where_the_traits_say_so(
    name: str, dtype: torch.dtype, width_in: int
) -> None:
    tables = {
        "torch": lambda: TORCH_OPS,
        "c": lambda: cpu_ops(library_folder()),
        "triton": lambda: triton_ops("cpu"),
    }
    ops = tables[name]()
    for weight in weights(width_in):
        product = packed_linear(weight, None, dtype, ops.linears)
        has_kernel = ops.traits.has_kernel(weight.layout, dtype, "cpu")
        assert isinstance(product, DequantizedLinear) != has_kernel, weight.layout


@needs_interpreter
def test_products_include_what_is_around_them_where_the_traits_say_so() -> None:
    ops = triton_ops("cpu")
    for weight in [*weights(256), *(random_blocks(name, 32, 256) for name in BLOCK_SIZES)]:
        product = packed_linear(weight, None, torch.bfloat16, ops.linears)
        has_kernel = not isinstance(product, DequantizedLinear)
        is_fused = has_kernel and weight.layout.kind in ops.traits.fused_kinds
        assert isinstance(product, Int4Product) == is_fused, weight.layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_what_is_planned_with_is_what_is_loaded(backend: str, dtype: torch.dtype) -> None:
    ops = select_ops("cpu", backend, dtype, library_folder=library_folder())
    assert find_traits("cpu", backend, dtype) is ops.traits


def test_without_a_compiler_torchs_operators_are_planned_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert find_traits("cpu", "auto", torch.bfloat16) is TORCH_OPS.traits
    assert select_ops("cpu", "auto", torch.bfloat16) is TORCH_OPS


@needs_compiler
def test_a_product_without_a_kernel_is_told_once_and_planned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config("Qwen3ForCausalLM", torch_dtype="bfloat16")
    source, folder = write_checkpoint(tmp_path / "plain", config), tmp_path / "fp8"
    recipe = Recipe("fp8")
    asked = CalibrationRequest(text="one two three " * 200, num_windows=1, length=16)
    request = QuantizeRequest(str(source), folder, recipe, asked, torch.device("cpu"), verify=False)
    quantize_model(request, lambda *done: None)
    with caplog.at_level(logging.WARNING):
        load_folder(folder, torch.float32, cpu_ops(library_folder()))
    told = [each.message for each in caplog.records if "no kernel" in each.message]
    assert told == [
        "no kernel multiplies with fp8 weights here: they are dequantized for each product, "
        "which is slow"
    ]
    engine = EngineConfig(device="cpu", dtype="float32")
    shape = replace(shape_of(resolve_model(str(folder)), None), dtype=torch.float32)
    gpu = machine_with(8 << 30)
    assert plan_model(shape, gpu, engine).as_json()["without_kernel"] == []
    here = plan_model(shape, replace(gpu, device="cpu"), engine)
    assert here.as_json()["without_kernel"] == ["fp8"]
    assert "no kernel" in plan_table(here, EngineConfig())
