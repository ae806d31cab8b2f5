"""Weights on a trellis: their bits, rotation, the search for the best ones, and the products."""

from collections.abc import Callable

import pytest
import torch
from engines import library_folder
from guards import GuardedMemory, needs_interpreter
from torch import Tensor

from localllm_kernels import TORCH_OPS, Ops, cpu_ops
from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.linears import CodedWeight
from localllm_kernels.pointwise.rotate_rows import rotate_rows
from localllm_kernels.products.trellis_matmul import (
    PackedTrellis,
    trellis_matmul,
    trellis_matmul_reference,
)
from localllm_kernels.trellis import (
    STEP,
    TABLE,
    num_mixed,
    pack_windows,
    rotated,
    signs,
    turned_back,
    unpack_windows,
)
from localllm_kernels.trellis_ways import MOST_COLUMNS

WIDTHS = [16, 48, 256, 576, 896, 4864]
TABLES = {"torch": lambda: TORCH_OPS, "c": lambda: cpu_ops(library_folder())}


def random_codes(width_out: int, width_in: int) -> Tensor:
    return torch.randint(256, (width_out, width_in // 8 * 3), dtype=torch.uint8)


def test_a_window_is_the_newest_bits_of_a_row() -> None:
    codes = random_codes(5, 64)
    windows = unpack_windows(codes)
    assert torch.equal(pack_windows(windows), codes)
    for row, found in zip(codes.tolist(), windows.tolist(), strict=True):
        bits = int.from_bytes(row, "little") << 4
        assert found == [bits >> 3 * i & 127 for i in range(64)]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_rotation_keeps_products_and_spreads_what_stands_out(width: int) -> None:
    x, w, by = torch.randn(3, width), torch.randn(4, width), signs(width)
    torch.testing.assert_close(rotated(x, by) @ rotated(w, by).T, x @ w.T, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(turned_back(rotated(x, by), by), x, atol=1e-5, rtol=1e-5)
    alone = torch.zeros(width)
    alone[width // 3] = 1.0
    spread = rotated(alone, by)
    assert int((spread != 0).sum()) == num_mixed(width)
    assert float(spread.abs().max()) == pytest.approx(num_mixed(width) ** -0.5)
    if width > 100:
        assert abs(int(by.sign().sum())) < 3 * width**0.5


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_the_ways_found_are_the_best(table: Callable[[], Ops]) -> None:
    """Against all ways through a few columns, whose errors are fed back to those ahead."""
    torch.manual_seed(3)
    work, factor = 25 * torch.randn(6, 3), torch.rand(3, 3).triu() + torch.eye(3)
    before = torch.randint(16, (6,), dtype=torch.uint8)
    own = torch.cartesian_prod(*[torch.arange(8)] * 3)
    least = []
    for row, state in zip(work, before.tolist(), strict=True):
        found, states, cost = row.expand(len(own), 3).clone(), torch.full((len(own),), state), 0.0
        for i in range(3):
            windows = own[:, i] << 4 | states
            errors = (found[:, i] - torch.tensor(TABLE)[windows]) / factor[i, i]
            found -= errors[:, None] * factor[i]
            states, cost = windows >> 3, cost + errors.square()
        least.append(float(torch.as_tensor(cost).min()))
    states = before.clone()
    windows, errors = table().best_ways(work, factor, states, 3)
    assert errors.square().sum(1).tolist() == pytest.approx(least, rel=1e-4)
    # A way goes on from where it was, and says where it is.
    assert torch.equal(windows[:, 0] & 15, before)
    assert torch.equal(windows[:, 1] & 15, windows[:, 0] >> 3)
    assert torch.equal(states, windows[:, 2] >> 3)


def test_both_searches_find_the_same() -> None:
    work, factor = 25 * torch.randn(70, 200)[:, 40:88], torch.randn(90, 90).triu() / 10
    factor = (factor + torch.eye(90))[10:58, 10:58]
    found = []
    for table in TABLES.values():
        states = torch.arange(70, dtype=torch.uint8) % 16
        windows, errors = table().best_ways(work, factor, states, 32)
        found.append((windows, states))
        assert windows.shape == errors.shape == (70, 32)
    # A tie may go to either.
    same = (found[0][0] == found[1][0]).all(1) & (found[0][1] == found[1][1])
    assert int(same.sum()) >= 69
    with pytest.raises(ValueError, match="more than 64"):
        TABLES["c"]().best_ways(torch.zeros(1, 65), torch.eye(65), states[:1], MOST_COLUMNS)


def test_the_table_codes_normal_numbers_nearly_as_well_as_its_rate_allows() -> None:
    """A scale for eight levels loses 0.0345 of the power (Lloyd and Max), the bound is 1 / 64."""
    x, states = torch.randn(8192, 64) / STEP, torch.zeros(8192, dtype=torch.uint8)
    _, errors = TABLES["c"]().best_ways(x, torch.eye(64), states, 64)
    # The first ones have few choices.
    assert 1 / 64 < float(errors[:, 8:].square().mean()) * STEP**2 < 0.0223


@needs_interpreter
@pytest.mark.parametrize("width", [16, 48, 256, 640])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_rotated_alike_on_a_gpu(width: int, dtype: torch.dtype) -> None:
    x, by = torch.randn(37, width).to(dtype), signs(width)
    found = rotate_rows(x, by)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(
        found.float(), rotated(x.float(), by), atol=tolerance, rtol=tolerance
    )
    assert torch.equal(rotate_rows(x[20:21], by), found[20:21])
    assert rotate_rows(x[:0], by).shape == (0, width)


@needs_interpreter
@pytest.mark.parametrize(
    ("shape", "num_rows", "dtype"),
    [
        ((16, 1), 3, torch.float32),
        ((208, 70), 17, torch.float16),
        ((256, 33), 1, torch.float32),
        ((1040, 40), 130, torch.float16),
        ((64, 40), 0, torch.float32),
    ],
)
def test_products_on_a_gpu(shape: tuple[int, int], num_rows: int, dtype: torch.dtype) -> None:
    width_in, width_out = shape
    codes, scales = random_codes(width_out, width_in), torch.rand(width_out, 1) / 100
    weight = CodedWeight("trellis3", codes, scales)
    bias = torch.randn(width_out).to(dtype) if width_out > 35 else None
    x = torch.randn(num_rows, width_in).to(dtype)
    workspace = Workspace(torch.device("cpu"))
    workspace.num_processors = 3
    packed = PackedTrellis.pack(weight, bias, dtype)
    with GuardedMemory() as memory:
        found = trellis_matmul(memory.guarded(x), packed, workspace)
    memory.check()
    expected = trellis_matmul_reference(x, weight, bias)
    tolerance = 1e-5 if dtype == torch.float32 else 6e-3
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
