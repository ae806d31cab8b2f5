"""Threads that compute together: the same bits whatever their number, and nobody waits for ever."""

import multiprocessing
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.operators.cpu_products import products_ignore_threads
from localllm.user.places import cache_folder
from localllm_kernels.cpu.build import load_library
from localllm_kernels.cpu.linear import CpuLinears
from localllm_kernels.cpu.team import Team
from localllm_kernels.linears import CodedWeight

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def _number_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def products() -> list[Tensor]:
    """Of every kind of weight, with outputs that no number of threads divides."""
    linears = CpuLinears(load_library(cache_folder("kernels")), Team())
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(333, 128, generator=generator)
    x = torch.randn(19, 128, generator=generator)
    codes = torch.randint(0, 16, (333, 128), generator=generator, dtype=torch.uint8)
    scales = torch.rand(333, 1, generator=generator)
    kinds = [
        linears.plain(weight, None),
        linears.plain(weight.bfloat16(), None),
        linears.packed(CodedWeight("int8", codes.to(torch.int8), scales), None, torch.bfloat16),
    ]
    assert all(kind is not None for kind in kinds)
    return [kind(x) for kind in kinds if kind is not None]


@pytest.mark.parametrize("threads", [2, 3, 7, 64, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_number_of_threads_gives_the_bits_of_one(threads: int) -> None:
    torch.set_num_threads(1)
    expected = products()
    torch.set_num_threads(threads)
    for _ in range(20):
        for found, alone in zip(products(), expected, strict=True):
            assert torch.equal(found, alone)


def test_engines_in_two_threads_of_a_program_do_not_wait_for_each_other() -> None:
    torch.set_num_threads(1)
    expected = products()
    torch.set_num_threads(2)
    wrong: list[int] = []

    def work(which: int) -> None:
        torch.set_num_threads(2)  # of this thread, with torch's OpenMP
        for _ in range(200):
            if not all(map(torch.equal, products(), expected)):
                wrong.append(which)

    both = [threading.Thread(target=work, args=(which,), daemon=True) for which in range(4)]
    for each in both:
        each.start()
    for each in both:
        each.join(timeout=60)
    assert not any(each.is_alive() for each in both)
    assert wrong == []


def test_torch_has_one_thread_while_the_library_computes_alone() -> None:
    torch.set_num_threads(3)
    team = Team()
    assert team.size == 3

    def fail() -> None:
        with team.alone():
            assert (team.size, torch.get_num_threads()) == (3, 1)
            raise ValueError("in between")

    with pytest.raises(ValueError, match="in between"):
        fail()
    assert (team.size, torch.get_num_threads()) == (3, 3)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_was_forked_has_threads_of_its_own() -> None:
    torch.set_num_threads(2)
    linears = CpuLinears(load_library(cache_folder("kernels")), Team())
    product, x = linears.plain(torch.randn(64, 64), None), torch.randn(3, 64)
    expected = product(x).tolist()
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    child = context.Process(target=lambda: answer.put(product(x).tolist()))
    child.start()
    child.join(timeout=60)
    assert child.exitcode == 0
    assert answer.get() == expected


@pytest.mark.parametrize(
    ("flags", "dtype", "expected"),
    [
        ("fma avx512f avx512_bf16", torch.bfloat16, True),
        ("fma avx512f amx_bf16", torch.bfloat16, True),
        ("fma avx512f avx512_vnni", torch.bfloat16, False),
        ("fma avx512f avx512_vnni", torch.float32, True),
    ],
)
def test_bits_depend_on_threads_where_bfloat16_has_no_instructions(
    tmp_path: Path, flags: str, dtype: torch.dtype, expected: bool
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags : fpu {flags}\n")
    assert products_ignore_threads(dtype, cpuinfo) is expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [8, 64, 200])
def test_torch_s_products_have_the_same_bits_with_any_number(dtype: torch.dtype, rows: int) -> None:
    if not products_ignore_threads(dtype):
        pytest.skip("this processor does not multiply bfloat16: threads stay as many as they are")
    x, weight = torch.randn(rows, 1024).to(dtype), torch.randn(1500, 1024).to(dtype)
    torch.set_num_threads(1)
    expected = F.linear(x, weight)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(F.linear(x, weight), expected)
