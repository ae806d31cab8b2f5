"""4-bit products under Triton's interpreter against float64: shapes, groups, splits."""

import pytest
import torch
from guards import needs_interpreter
from int4_case import Case

from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.linears import CodedWeight
from localllm_kernels.products import int4_matmul as module
from localllm_kernels.products.int4_matmul import (
    dequantize_rows,
    int4_matmul,
    int4_matmul_reference,
)
from localllm_kernels.products.int4_weight import NOTHING, Around, PackedInt4

DTYPES = [torch.float32, torch.float16]
CPU = torch.device("cpu")
pytestmark = needs_interpreter


@pytest.mark.parametrize(
    ("num_rows", "is_symmetric", "dtype"),
    [
        pytest.param(rows, i == 0, dtype, marks=[] if i == (j + turn) % 2 else pytest.mark.slow)
        for turn, rows in enumerate((0, 1, 2, 17, 64, 65, 200))
        for i in (0, 1)
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_any_number_of_rows(num_rows: int, is_symmetric: bool, dtype: torch.dtype) -> None:
    Case(256, 72, 32, is_symmetric=is_symmetric, dtype=dtype).check(num_rows)


@pytest.mark.parametrize(
    ("width_in", "width_out", "group", "num_rows"),
    [
        pytest.param(*shape, rows, marks=[] if (i + j) % 3 == 0 else pytest.mark.slow)
        for i, shape in enumerate(
            [(16, 1, 16), (96, 5, 32), (192, 64, 64), (160, 33, 16), (640, 130, 128), (512, 8, 256)]
        )
        for j, rows in enumerate([1, 5, 200])
    ],
)
def test_odd_shapes_and_all_groups(
    width_in: int, width_out: int, group: int, num_rows: int
) -> None:
    Case(width_in, width_out, group, is_symmetric=False, has_bias=True).check(num_rows)


@pytest.mark.parametrize("num_rows", [1, 3, 66, 200])
def test_columns_in_the_order_of_a_permutation(num_rows: int) -> None:
    Case(256, 40, 64, is_permuted=True).check(num_rows)


@pytest.mark.parametrize(
    ("num_rows", "has_bias", "is_permuted"),
    [
        (1, True, False),
        (4, False, True),
        pytest.param(1, False, True, marks=pytest.mark.slow),
        pytest.param(4, True, False, marks=pytest.mark.slow),
    ],
)
def test_norm_gate_and_residual_around_the_product(
    num_rows: int, has_bias: bool, is_permuted: bool
) -> None:
    case = Case(384, 140, 32, is_symmetric=False, has_bias=has_bias, is_permuted=is_permuted)
    norm, residual = torch.rand(384) + 0.5, torch.randn(num_rows, 140)
    case.check(num_rows, Around(norm=norm, eps=1e-5))
    case.check(num_rows, Around(norm=norm, eps=1e-5, is_gated=True))
    case.check(num_rows, Around(residual=residual))


@pytest.mark.parametrize(
    ("width_in", "width_out", "group", "num_rows", "dtype"),
    [
        pytest.param(*shape, *rows, marks=[] if i == j else pytest.mark.slow)
        for i, shape in enumerate([(32, 1, 16), (96, 50, 32), (512, 40, 256), (640, 32, 64)])
        for j, rows in enumerate([(1, torch.bfloat16), (7, torch.float16), (20, torch.bfloat16)])
    ],
)
def test_fragments_of_matrix_units(
    width_in: int, width_out: int, group: int, num_rows: int, dtype: torch.dtype
) -> None:
    """Steps of the units as every thread sees them; what PTX does with them is the GPU's tests'."""
    case = Case(
        width_in, width_out, group, is_symmetric=group > 32, has_bias=True, dtype=dtype,
        fragments=True,
    )  # fmt: skip
    norm = (torch.rand(width_in) + 0.5).to(dtype)
    residual = torch.randn(num_rows, width_out).to(dtype)
    case.check(num_rows, Around(norm=norm, eps=1e-5, residual=residual))
    if width_out == 32:
        case.check(num_rows, Around(norm=norm, eps=1e-5, is_gated=True))


@pytest.mark.parametrize("fragments", [False, True])
@pytest.mark.parametrize("num_rows", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("is_wide", [pytest.param(True, marks=pytest.mark.slow), False])
def test_inputs_split_among_programs_leave_the_counters_at_zero(
    is_wide: bool, num_rows: int, fragments: bool
) -> None:
    dtype = torch.bfloat16 if fragments else torch.float32
    # Tiles are split at fewer inputs.
    width = 4096 if is_wide or num_rows == 1 or fragments else 1024
    case = Case(width, 32, 128, is_symmetric=False, dtype=dtype)
    workspace = Workspace(CPU, fragment_rows=range(1, 65 if fragments else 1))
    workspace.num_processors = 4  # so that the inputs are split
    packed = PackedInt4.pack(CodedWeight("int4", case.codes, case.scales, case.zeros), None)
    x, norm = case.rows(num_rows), torch.rand(width).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for around in (NOTHING, Around(norm=norm, eps=1e-6, is_gated=True)):
        expected = int4_matmul_reference(x, case.codes, case.scales, case.zeros, around=around)
        for _ in range(2):
            found = int4_matmul(x, packed, workspace, around)
            torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
            assert not workspace.counters(1).any()
    for way, rows, blocks in (("row", 1, 64), ("tiles", 16, 16), ("fragments", 8, 64)):
        assert module._choose(way, rows, 32, blocks, workspace, False).num_splits > 1


def test_the_default_is_about_what_an_h100_was_found_to_take() -> None:
    """For the products of Llama 3.1 8B: query, key and value; output; gate and up; down."""
    workspace = Workspace(CPU)
    workspace.num_processors, workspace.overlaps = 132, True
    shapes = ((6144, 64, False), (4096, 64, False), (14336, 64, True), (4096, 224, False))

    def chosen(way: module.Way, rows: int) -> list[tuple[int, int, int, int]]:
        configs = [module._choose(way, rows, n, k, workspace, gated) for n, k, gated in shapes]
        return [
            (each.block_k // module.TURN, module._wide(each), each.num_splits, each.ahead)
            for each in configs
        ]

    assert chosen("row", 1) == [(8, 1, 1, 4), (16, 1, 1, 4), (4, 1, 1, 0), (16, 1, 1, 0)]
    assert chosen("fragments", 8) == [(8, 1, 1, 4), (16, 1, 1, 4), (4, 2, 1, 0), (16, 1, 1, 0)]
    assert chosen("fragments", 16) == [(4, 2, 2, 0), (4, 2, 4, 0), (2, 4, 1, 0), (4, 2, 4, 0)]
    assert chosen("fragments", 64) == [(4, 2, 1, 0), (4, 2, 2, 0), (2, 4, 1, 0), (4, 2, 2, 0)]


@pytest.mark.parametrize(("way", "rows"), [("row", 1), ("fragments", 8), ("fragments", 64)])
def test_what_tuning_tries_is_what_a_kernel_can_take(way: module.Way, rows: int) -> None:
    workspace = Workspace(CPU)
    workspace.num_processors, workspace.overlaps = 132, True
    known = [module._choose(way, rows, 6144, 64, workspace, False)]
    for config in known:  # grows meanwhile
        known += [other for other in module._vary_ahead(config) if other not in known]
    assert len(known) > 20
    for config in known:
        deep, wide = config.block_k // module.TURN, module._wide(config)
        assert deep * wide == config.num_warps <= (8 if rows == 64 else 16)
        assert config.block_n == 32 * wide
        assert 1 <= wide <= (1 if way == "row" else module.MAX_WIDE)


@pytest.mark.parametrize("has_bias", [False, True])
def test_slices_of_a_dequantized_weight(has_bias: bool) -> None:
    case = Case(256, 150, 32, is_symmetric=False, has_bias=has_bias)
    case.workspace.slice_bytes = 256 * 4 * 64
    case.check(200)
    packed = PackedInt4.pack(CodedWeight("int4", case.codes, case.scales, case.zeros), None)
    whole = torch.empty(150, 256)
    dequantize_rows(packed, 0, 150, whole)
    assert case.zeros is not None
    codes = case.codes.view(150, 8, 32).float() - case.zeros[:, :, None]
    torch.testing.assert_close(whole, (codes * case.scales[:, :, None]).flatten(1))


def test_what_is_not_meant_is_refused() -> None:
    case = Case(192, 8, 96)
    with pytest.raises(ValueError, match="96"):
        PackedInt4.pack(CodedWeight("int4", case.codes, case.scales), None)
    case = Case(128, 8, 128)
    packed = PackedInt4.pack(CodedWeight("int4", case.codes, case.scales), None)
    around = Around(norm=torch.ones(128))
    with pytest.raises(ValueError, match="65 rows"):
        int4_matmul(case.rows(65), packed, Workspace(CPU), around)
