"""The operators that `bench --ops` measures."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from every_family import small_config
from torch import Tensor

from localllm.bench.operators import model_lines
from localllm.model.families.table import architecture_of
from localllm.operators.case import Setting, Sizes
from localllm_kernels import TORCH_OPS

LATENT = {("rotate", 5, 16, False), ("rotate_and_store", 1, 48, False)}
NORMED = {("rotate_and_store", 4 + 2 * 2, 16, True)}


@pytest.mark.parametrize(
    ("family", "expected"), [("Glm4MoeLiteForCausalLM", LATENT), ("Qwen3ForCausalLM", NORMED)]
)
def test_rotations_are_those_that_a_model_computes(family: str, expected: set[Any]) -> None:
    """Their heads and widths, and whether heads are normed."""
    calls: set[tuple[object, ...]] = set()
    name = ""

    def watched(qkv: Tensor, *args: Any, **how: Any) -> Tensor:
        calls.add((name, *qkv.shape[1:], how.get("query_norm") is not None))
        return TORCH_OPS.rotate_and_store(qkv, *args, **how)

    ops = replace(TORCH_OPS, rotate_and_store=watched)
    sizes = Sizes(architecture_of(small_config(family)), torch.float32, torch.float32, 16)
    for line in model_lines(Setting(sizes, torch.device("cpu"), ops)):
        if line.name.startswith("rotate"):
            name = line.name
            line.case.own()
            line.case.plain()
            assert line.case.cost.num_bytes > 0
    assert calls == expected
