"""Counting in machine code: loops, pipes, widths. (What is counted is checked with the AOT.)"""

import pytest

from localllm_kernels.compiling.ahead_of_time import all_specs, declared_shared
from localllm_kernels.compiling.figures import figure_of
from localllm_kernels.compiling.machine_code import (
    _programs,
    busiest_pipe,
    innermost_loops,
    largest_loop,
    read_listing,
)

LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;        /* 0x00000a00ff017b82 */
        /*0010*/                   LDG.E.128 R4, [R2] ;          /* 0x00000a00ff017b82 */
        /*0020*/                   FFMA R4, R4, R5, R6 ;         /* 0x00000a00ff017b82 */
        /*0030*/              @!P0 BRA 0x20 ;                    /* 0x00000a00ff017b82 */
        /*0040*/                   LOP3.LUT R4, R4, R5, RZ ;     /* 0x00000a00ff017b82 */
        /*0050*/                   I2F.RP R4, R4 ;               /* 0x00000a00ff017b82 */
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ; /* 0x00000a00ff017b82 */
        /*0070*/              @P1  BRA 0x50 ;                    /* 0x00000a00ff017b82 */
        /*0080*/               @P1 BRA 0x10 ;                    /* 0x00000a00ff017b82 */
        /*0090*/                   EXIT ;                        /* 0x00000a00ff017b82 */
        /*00a0*/                   BRA 0xa0;                     /* 0x00000a00ff017b82 */
"""


def test_the_largest_of_the_innermost_loops() -> None:
    listing = read_listing(LISTING)
    assert [line.name for line in listing[:3]] == ["MOV", "LDG", "FFMA"]
    assert [len(body) for body in innermost_loops(listing)] == [2, 3]
    assert [line.opcode for line in largest_loop(listing)] == [
        "I2F.RP",
        "BAR.SYNC.DEFER_BLOCKING",
        "BRA",
    ]


def test_a_slow_instruction_is_no_cheaper_than_several_fast_ones() -> None:
    body = largest_loop(read_listing(LISTING))
    assert busiest_pipe(body, 90) == ("special", 8.0)
    assert busiest_pipe(read_listing(LISTING)[2:3], 80) == ("fma", 2.0)
    assert busiest_pipe(read_listing(LISTING)[2:3], 90) == ("issue", 1)


@pytest.mark.parametrize(
    ("name", "spec"), [(n, s) for n, s in all_specs() if s.work], ids=lambda each: str(each)[:40]
)
def test_a_figure_stands_for_every_kernel_that_is_counted(name: str, spec: object) -> None:
    assert figure_of(name, spec) is not None


@pytest.mark.parametrize(
    ("listed", "arch", "declared"), [(0, 90, 0), (1024, 90, 0), (3072, 90, 2048), (512, 80, 512)]
)
def test_a_kernel_without_shared_memory_has_none_whatever_the_tool_counts(
    listed: int, arch: int, declared: int
) -> None:
    """Triton's own cuobjdump lists a KiB of the system's for some kernels only."""
    assert declared_shared(listed, arch) == declared
    assert _programs(32, declared_shared(listed, arch), 128, arch) == 16
