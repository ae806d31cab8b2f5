"""Products in the tiles of AMX, as they are and, on other processors, by what they mean in C."""

from pathlib import Path

import pytest
import torch
from blocks import random_e4m3
from c_products import linears_with

import localllm_kernels
from localllm.quantize.rounding import round_fp8
from localllm.user.places import cache_folder
from localllm_kernels.cpu.build import load_library
from localllm_kernels.cpu.linear import CpuLinears, num_lanes
from localllm_kernels.cpu.team import Team
from localllm_kernels.linears import CodedWeight

# Intel 2023, "Architecture Instruction Set Extensions Programming Reference", chapter 3.
TILES = """
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>
static __thread struct { uint8_t rows, bytes, data[16][64]; } tiles[8];
static inline void load_shapes(const void *from) {
  const uint8_t *b = from;
  for (int i = 0; i < 8; i++) tiles[i].rows = b[48 + i], tiles[i].bytes = b[16 + 2 * i];
  for (int i = 0; i < 8; i++) memset(tiles[i].data, 0, sizeof tiles[i].data);
}
static inline void load_tile(int t, const void *from, int64_t stride) {
  memset(tiles[t].data, 0, sizeof tiles[t].data);
  for (int r = 0; r < tiles[t].rows; r++)
    memcpy(tiles[t].data[r], (const char *)from + r * stride, tiles[t].bytes);
}
static inline void store_tile(int t, void *to, int64_t stride) {
  for (int r = 0; r < tiles[t].rows; r++)
    memcpy((char *)to + r * stride, tiles[t].data[r], tiles[t].bytes);
}
static inline void add_tiles(int c, int a, int b, int is_bytes) {
  for (int m = 0; m < tiles[c].rows; m++)
    for (int k = 0; k < tiles[a].bytes / 4; k++)
      for (int n = 0; n < tiles[c].bytes / 4; n++) {
        const uint8_t *x = tiles[a].data[m] + 4 * k, *y = tiles[b].data[k] + 4 * n;
        if (is_bytes) {
          int32_t *sum = (int32_t *)tiles[c].data[m] + n;
          for (int i = 0; i < 4; i++) *sum += (int8_t)x[i] * y[i];
        } else {
          float *sum = (float *)tiles[c].data[m] + n, own[2], other[2];
          for (int i = 0; i < 2; i++) {
            const uint32_t u = (uint32_t)((const uint16_t *)x)[i] << 16;
            const uint32_t v = (uint32_t)((const uint16_t *)y)[i] << 16;
            memcpy(own + i, &u, 4), memcpy(other + i, &v, 4);
            *sum = __builtin_fmaf(own[i], other[i], *sum);
          }
        }
      }
}
#undef __AMX_INT8__
#undef __AMX_BF16__
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#undef _tile_zero
#define __AMX_INT8__ 1
#define __AMX_BF16__ 1
#define _tile_loadconfig load_shapes
#define _tile_release() (void)0
#define _tile_loadd load_tile
#define _tile_stored store_tile
#define _tile_zero(t) memset(tiles[t].data, 0, sizeof tiles[t].data)
#define _tile_dpbsud(c, a, b) add_tiles(c, a, b, 1)
#define _tile_dpbf16ps(c, a, b) add_tiles(c, a, b, 0)
#define syscall(...) 0 /* the kernel permits it */
"""


def in_tiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CpuLinears:
    """Products that are multiplied in tiles."""
    header = folder / "tiles.h"
    header.write_text(TILES)
    linears = linears_with(("-include", str(header)), folder, monkeypatch)
    if num_lanes(linears.library) != 16:
        pytest.skip("tiles are for processors with AVX512")
    assert linears.library.tiles_are_allowed()
    return linears


@pytest.mark.slow
def test_bytes_in_tiles_have_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = CpuLinears(load_library(cache_folder("kernels")), Team())
    linears = vectors, in_tiles(tmp_path, monkeypatch)
    x, bias = torch.randn(150, 384), torch.randn(45)
    for weight in coded_weights():
        expected, product = (each.packed(weight, bias, torch.bfloat16) for each in linears)
        assert expected is not None
        assert product is not None
        for rows in (1, 8, 9, 16, 33, 64, 100, 150):
            assert torch.equal(product(x[:rows]), expected(x[:rows]))


def coded_weights() -> list[CodedWeight]:
    codes = torch.randint(16, (45, 384), dtype=torch.uint8)
    scales = torch.rand(45, 3).bfloat16()
    return [
        CodedWeight("int4", codes, scales),
        CodedWeight("int4", codes, scales, torch.randint(16, (45, 3), dtype=torch.uint8)),
        CodedWeight("int4", codes, torch.rand(45, 12).bfloat16()),  # groups of 32
        CodedWeight("int8", torch.randint(-128, 128, (45, 384), dtype=torch.int8), scales[:, :1]),
        CodedWeight("mxfp4", codes, torch.randint(100, 140, (45, 12), dtype=torch.uint8)),
        CodedWeight("nvfp4", codes, random_e4m3(45, 24), factors=torch.rand(45)),
        CodedWeight("trellis3", codes[:, :144] * 17, torch.rand(45, 1)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("width", [384, 391])
def test_pairs_in_tiles_are_products_of_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    linears = in_tiles(tmp_path, monkeypatch)
    weight, bias = torch.randn(45, width).bfloat16(), torch.randn(45)
    x = torch.randn(150, width)
    product = linears.plain(weight, bias)
    exact = (x.bfloat16().double() @ weight.double().T + bias).float()
    for rows in (1, 7, 16, 33, 64, 100, 150):
        found = product(x[:rows])
        torch.testing.assert_close(found, exact[:rows], atol=1e-4, rtol=1e-5)
        assert torch.equal(found, product(x)[:rows])


@pytest.mark.slow
@pytest.mark.parametrize("block", [(1, 391), (32, 64)])
def test_numbers_of_eight_bits_in_tiles_are_products_of_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: tuple[int, int]
) -> None:
    linears = in_tiles(tmp_path, monkeypatch)
    weight, bias = round_fp8(torch.randn(45, 391), block), torch.randn(45)
    product = linears.packed(weight.coded(), bias, torch.bfloat16)
    assert product is not None
    x = torch.randn(150, 391)
    exact = (x.bfloat16().double() @ weight.dequantize(torch.float64).T + bias).float()
    for rows in (1, 7, 16, 33, 64, 100, 150):
        found = product(x[:rows])
        torch.testing.assert_close(found, exact[:rows], atol=1e-4, rtol=1e-5)
        assert torch.equal(found, product(x)[:rows])


@pytest.mark.slow
def test_without_the_kernel_s_permission_vectors_multiply_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    header = tmp_path / "tiles.h"
    header.write_text(TILES.replace("syscall(...) 0", "syscall(...) -1"))
    refused = linears_with(("-include", str(header)), tmp_path, monkeypatch)
    assert not refused.library.tiles_are_allowed()
    weight, x = torch.randn(45, 391).bfloat16(), torch.randn(20, 391)
    here = CpuLinears(load_library(cache_folder("kernels")), Team())
    assert torch.equal(refused.plain(weight, None)(x), here.plain(weight, None)(x))
    monkeypatch.setattr(localllm_kernels, "load_library", lambda folder: refused.library)
    localllm_kernels.cpu_ops()
    assert [record.getMessage() for record in caplog.records] == [
        "products are slower: the kernel does not let this process use AMX's tiles"
    ]
