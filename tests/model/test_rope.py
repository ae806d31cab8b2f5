"""Rotary tables that the comparison with transformers does not reach."""

import torch

from localllm.model.rope import RopeTable
from localllm.model.rope_config import NO_ROPE
from localllm_kernels.rotary import apply_rotary_reference


def test_without_rotary_embedding_heads_keep_their_bits() -> None:
    table = RopeTable.build(NO_ROPE, 16, 100, torch.device("cpu"))
    heads = torch.randn(100, 3, 16) * 1e3
    assert torch.equal(apply_rotary_reference(heads, table.cos, table.sin), heads)
