"""The C products on Arm processors, whose instructions an emulator runs: the same bits everywhere.

A product is made by a library for vectors of four floats, as Arm's are; its weight goes to a
program for Arm as a file, with the places of pointers, and the outputs come back.
"""

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from blocks import random_blocks, random_e4m3
from c_products import OWN, linears_with, sources_of_products
from torch import Tensor

from localllm.quantize.rounding import round_fp8
from localllm.user.places import cache_folder
from localllm_kernels.cpu.build import load_library
from localllm_kernels.cpu.linear import CpuLinears
from localllm_kernels.cpu.product import CProduct
from localllm_kernels.cpu.structs import BlockRows, BlockWeight
from localllm_kernels.cpu.team import Team
from localllm_kernels.cpu.traits import C_BLOCKS
from localllm_kernels.linears import CodedWeight

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"
# Without instructions for products of bytes, with those of signed ones, and with all.
PROCESSORS = ("armv8-a", "armv8.2-a+dotprod", "armv8.6-a")
# Reads buffers and where they hold each other's addresses; multiplies; writes the outputs.
PROGRAM = f"""
#include <stdio.h>
#include "{OWN / "products.h"}"
int multiply(const Product *p, const float *x, float *y, int64_t rows, int64_t threads);
static int64_t number(void) {{
  int64_t found = 0;
  if (fread(&found, 8, 1, stdin) != 1) exit(3);
  return found;
}}
int main(void) {{
  char *buffers[64];
  int64_t sizes[64];
  const int64_t count = number();
  for (int64_t i = 0; i < count; i++) {{
    sizes[i] = number();
    buffers[i] = aligned_alloc(64, (size_t)(sizes[i] + 127) / 64 * 64);
    if (fread(buffers[i], 1, (size_t)sizes[i], stdin) != (size_t)sizes[i]) return 4;
  }}
  for (int64_t left = number(); left > 0; left--) {{
    const int64_t in = number(), at = number(), to = number();
    memcpy(buffers[in] + at, &buffers[to], 8);
  }}
  const int64_t rows = number();
  if (multiply((Product *)buffers[0], (float *)buffers[1], (float *)buffers[2], rows, 2)) return 5;
  return fwrite(buffers[2], 1, (size_t)sizes[2], stdout) != (size_t)sizes[2];
}}
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The commands of the program, for each kind of processor."""
    for needed in (COMPILER, EMULATOR):
        if shutil.which(needed) is None:
            pytest.skip(f"{needed} is missing (packages gcc-aarch64-linux-gnu and qemu-user)")
    folder = tmp_path_factory.mktemp("arm")
    (folder / "main.c").write_text(PROGRAM)
    sources = [str(path) for path in sources_of_products()]
    commands = []
    for i, processor in enumerate(PROCESSORS):
        program = folder / f"multiply{i}"
        flags = [f"-march={processor}", "-O2", "-ffp-contract=off", "-pthread", "-Wno-psabi"]
        command = [COMPILER, *flags, *sources, str(folder / "main.c"), "-lm", "-o", str(program)]
        subprocess.run(command, check=True)
        commands.append([EMULATOR, "-L", LIBRARIES, str(program)])
    return commands


@pytest.mark.slow
def test_every_source_compiles_for_arm_without_a_warning(tmp_path: Path) -> None:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} is missing (package gcc-aarch64-linux-gnu)")
    for processor in PROCESSORS:
        flags = [f"-march={processor}", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
        for source in sorted(OWN.glob("*.c")):
            command = [COMPILER, *flags, "-c", str(source), "-o", str(tmp_path / "object.o")]
            subprocess.run(command, check=True)


@pytest.mark.slow
def test_products_have_the_same_bits_on_arm(
    programs: Sequence[Sequence[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = CpuLinears(load_library(cache_folder("kernels")), Team())
    by_fours = linears_with(("-mno-avx",), tmp_path, monkeypatch)
    x = torch.randn(9, 256)
    scales, zeros = torch.rand(48, 4).bfloat16(), torch.randint(16, (48, 4), dtype=torch.uint8)
    codes = torch.randint(16, (48, 256), dtype=torch.uint8)
    weights = [
        CodedWeight("int4", codes, scales, zeros),
        CodedWeight("int4", codes, scales),
        CodedWeight("int8", torch.randint(-128, 128, (48, 256), dtype=torch.int8), scales[:, :1]),
        CodedWeight("int8", codes.to(torch.int8), scales[:, :1], is_in_place=True),
        CodedWeight("mxfp4", codes, torch.randint(100, 140, (48, 8), dtype=torch.uint8)),
        CodedWeight("nvfp4", codes, random_e4m3(48, 16), factors=torch.rand(48)),
        CodedWeight("trellis3", codes[:, :96] * 17, torch.rand(48, 1)),
        *(random_blocks(name, 48, 256).coded() for name in sorted(C_BLOCKS)),
    ]
    for weight in weights:
        product, own = (each.packed(weight, None, torch.bfloat16) for each in (here, by_fours))
        assert isinstance(own, CProduct)
        assert product is not None
        for rows in (x, x[:1]):
            expected = product(rows)
            for program in programs:
                assert torch.equal(run_product(program, own, rows), expected)
    fp8 = round_fp8(torch.randn(48, 256), (16, 64))
    product = by_fours.packed(fp8.coded(), None, torch.bfloat16)
    assert isinstance(product, CProduct)
    rows = x.bfloat16().float()
    for program in programs:
        found = run_product(program, product, rows)
        torch.testing.assert_close(found, F.linear(rows, fp8.dequantize()), atol=1e-4, rtol=1e-5)
    for dtype in (torch.float32, torch.bfloat16):
        weight, bias = torch.randn(48, 250).to(dtype), torch.randn(48)
        plain = by_fours.plain(weight, bias)
        assert isinstance(plain, CProduct)
        rows = x[:, :250].to(dtype).float()
        for program in programs:
            expected = F.linear(rows, weight.float(), bias)  # in another order
            found = run_product(program, plain, rows)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def run_product(program: Sequence[str], product: CProduct, x: Tensor) -> Tensor:
    """The outputs of `program` for the rows `x`."""
    y = torch.zeros(len(x), product.weight.width_out)
    structs: list[ctypes.Structure | ctypes.Array[ctypes.Structure]] = [product.weight]
    if isinstance(product.weight, BlockWeight):
        first = ctypes.cast(product.weight.parts, ctypes.c_void_p).value
        assert first is not None
        structs.append((BlockRows * product.weight.num_parts).from_address(first))
    # Each buffer's address here, and its bytes.
    tensors = [x.contiguous(), y, *(each for each in product.kept if each is not None)]
    known = [(ctypes.addressof(each), bytes(each)) for each in (product.struct, *structs)]
    known[1:1] = [(each.data_ptr(), each.view(torch.uint8).numpy().tobytes()) for each in tensors]
    places = {address: i for i, (address, _) in enumerate(known)}
    references = [
        (i, at, places[word])
        for i, (_, data) in enumerate(known)
        if i == 0 or i > len(tensors)
        for at, (word,) in zip(range(0, len(data), 8), struct.iter_unpack("q", data), strict=True)
        if word in places
    ]
    asked = struct.pack("q", len(known))
    for _, data in known:
        asked += struct.pack("q", len(data)) + data
    asked += struct.pack("q", len(references))
    asked += b"".join(struct.pack("qqq", *each) for each in references)
    asked += struct.pack("q", len(x))
    done = subprocess.run(program, input=asked, stdout=subprocess.PIPE, check=True)
    return torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view_as(y)
