"""Every kernel compiles for every target, without spills and within its shared memory."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import localllm_kernels
from localllm_kernels.compiling.ahead_of_time import SHARED_KIB, all_specs, check_nvidia
from localllm_kernels.compiling.aot import AotSpec

FOLDER = Path(localllm_kernels.__file__).parent


def compile_all(
    tmp_path: Path, *arguments: str, module: str = "ahead_of_time"
) -> subprocess.CompletedProcess[str]:
    """In a process of its own: an interpreted kernel cannot be compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    return subprocess.run(
        [sys.executable, "-m", f"localllm_kernels.compiling.{module}", *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_every_kernel_compiles_for_every_target(tmp_path: Path) -> None:
    outcome = compile_all(tmp_path)
    lines = outcome.stdout.splitlines()
    assert outcome.returncode == 0, [line for line in lines if "FAILED" in line] or outcome.stderr
    expected = sum(len(spec.only or SHARED_KIB) for _, spec in all_specs())
    assert len(lines) == expected
    for line in lines:
        assert " registers, " in line or ": needs sm_" in line


@pytest.mark.slow
def test_nvfp4_is_multiplied_by_the_matrix_units(tmp_path: Path) -> None:
    code = (
        "from triton.backends.compiler import GPUTarget\n"
        "from localllm_kernels.compiling.ahead_of_time import compile_spec\n"
        "from localllm_kernels.products.nvfp4_matmul import AOT_SPECS\n"
        "for capability in (100, 120):\n"
        "    for spec in AOT_SPECS[:3]:\n"
        "        made = compile_spec(spec, GPUTarget('cuda', capability, 32))\n"
        "        print(made.asm['ptx'].count('kind::mxf4nvf4.block_scale'))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert all(int(count) > 0 for count in found.stdout.split())
    assert len(found.stdout.split()) == 6


@pytest.mark.slow
def test_kernels_take_as_many_instructions_as_stand_for_them(tmp_path: Path) -> None:
    outcome = compile_all(tmp_path, "--check", module="machine_code")
    lines = outcome.stdout.splitlines()
    assert outcome.returncode == 0, [line for line in lines if "FAILED" in line] or outcome.stderr
    counted = {line.partition(".")[0] for line in lines}
    assert counted == {name for name, spec in all_specs() if spec.work}


def test_what_does_not_compile_fails_with_the_first_cause(tmp_path: Path) -> None:
    code = (
        "import localllm_kernels.compiling.ahead_of_time as a\n"
        "import localllm_kernels.pointwise.gate_launch as gate\n"
        "gate.BLOCK = 1000\n"
        "print(a.check_nvidia('gate', gate.AOT_SPECS[0], 90))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "FAILED" in found
    assert "power of 2" in found
    assert "False" in found


def test_a_gpu_without_what_a_kernel_needs_is_named() -> None:
    spec, *_ = (spec for name, spec in all_specs() if name == "pointwise/gate_launch")
    needs = AotSpec(spec.kernel, "fp8", spec.call, min_capability=89)
    assert check_nvidia("x", needs, 80) == ("x._gate_kernel fp8 sm_80: needs sm_89", True)


def kernels() -> list[str]:
    """What is launched, by the name's ending."""
    return [
        node.name
        for path in sorted(FOLDER.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    ]


@pytest.mark.parametrize("name", kernels())
def test_a_kernel_has_specs_and_a_test_and_a_reference(name: str) -> None:
    files = {file for file, spec in all_specs() if spec.kernel.__name__ == name}
    assert files
    tests = "".join(other.read_text() for other in Path(__file__).parent.glob("test_*.py"))
    for file in files:
        operator = file.removesuffix("_launch")  # whose reference stands in a file of its own
        assert f"from localllm_kernels.{operator.replace('/', '.')}" in tests
        assert "reference" in (FOLDER / f"{operator}.py").read_text()
