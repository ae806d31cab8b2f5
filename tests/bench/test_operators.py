"""The cases that the operators' benchmark measures."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from every_family import small_config
from torch import Tensor

from localllm.bench.operators import _Inputs
from localllm.model.families.table import architecture_of
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
        calls.add((name, *qkv.shape[1:], how["query_norm"] is not None))
        return TORCH_OPS.rotate_and_store(qkv, *args, **how)

    ops = replace(TORCH_OPS, rotate_and_store=watched)
    architecture = architecture_of(small_config(family))
    bench = _Inputs(architecture, ops, torch.float32, torch.device("cpu"))
    for sizes in architecture.rotations():
        case = bench.rotation(3, sizes)
        name = case.name
        case.own()
        case.plain()
        assert case.num_bytes > 0
    assert calls == expected
