"""Freed memory goes back to the system."""

import subprocess
import sys

import pytest

HELD_AFTER_LARGE_BODIES = """
import sys
from concurrent.futures import ThreadPoolExecutor
from localllm.process.memory import resident_bytes, return_large_blocks

if sys.argv[1] == "returned":
    return_large_blocks()

def read(number):
    body = bytes(7 << 20)
    del body  # from here on, glibc serves such blocks from an arena
    bodies = [bytes(5 << 20) for _ in range(4)]
    kept.append(bytes(1000))

kept = []
before = resident_bytes()
with ThreadPoolExecutor(4) as pool:
    list(pool.map(read, range(40)))
print((resident_bytes() - before) >> 20)
"""


def growth_megabytes(how: str) -> int:
    command = [sys.executable, "-c", HELD_AFTER_LARGE_BODIES, how]
    return int(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the C library is not glibc")
def test_large_blocks_go_back_when_they_are_freed() -> None:
    assert growth_megabytes("kept") > 20
    assert growth_megabytes("returned") < 5
