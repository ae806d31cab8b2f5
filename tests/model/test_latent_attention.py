"""What latent attention keeps, and the products of its heads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import small_config
from golden import GOLDEN, write_golden

from localllm.cost.planning import shape_of
from localllm.errors import CheckpointError, UnsupportedModelError
from localllm.hub.catalog import resolve_model
from localllm.model.families.table import architecture_of, read_architecture
from localllm.model.linear import FixedRows, HeadByHead, HeadsTogether, Linear
from localllm.model.packed.scheme import RESIDENT_SHARE
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.model.weight_check import check_weights
from localllm.model.weight_files import find_weight_files

CPU = torch.device("cpu")
DEEPSEEK, GLM = "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"
V2 = "DeepseekV2ForCausalLM"
UNEVEN = {"type": "longrope", "short_factor": [1] * 8, "long_factor": [2] * 7}


def test_a_token_takes_one_row_in_each_layer() -> None:
    architecture = architecture_of({"architectures": [GLM]})
    assert architecture.token_bytes(lambda width: 2 * width) == 47 * (512 + 64) * 2
    assert [group.state.num_heads for group in architecture.cache_groups] == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_block_is_kept_once_and_copied_once(dtype: torch.dtype) -> None:
    architecture = architecture_of(small_config(DEEPSEEK))
    cache = PagedKVCache.allocate(architecture, [4], 16, dtype, CPU)
    [stack] = cache.stacks
    assert stack.values_are_keys
    assert cache.layer(1).values_are_keys  # type: ignore[union-attr]
    row = 48 * dtype.itemsize + (4 if dtype == torch.int8 else 0)
    assert cache.block_bytes(0) == 2 * 16 * row
    stack.key[:, 1].copy_(torch.randint(-100, 100, stack.key[:, 1].shape))
    if stack.key_scales is not None:
        stack.key_scales[:, 1].copy_(torch.rand(stack.key_scales[:, 1].shape))
    kept = cache.read_block(0, 1)
    assert len(kept) == cache.block_bytes(0)
    cache.copy_block(0, 1, 2)
    cache.write_block(0, 3, kept)
    for block in (2, 3):
        assert torch.equal(cache.read_block(0, block), kept)
        assert torch.equal(stack.value[:, block], stack.key[:, 1])


@pytest.mark.parametrize("rows", [1, 7, 64, 100])
def test_heads_have_products_of_their_own(rows: int) -> None:
    weights, x = torch.randn(5, 12, 9), torch.randn(rows, 5 * 12)
    expected = torch.einsum("rhi,hio->rho", x.view(rows, 5, 12).double(), weights.double())
    one_by_one = HeadByHead(tuple(Linear(each.t().contiguous()) for each in weights))
    fixed = FixedRows(HeadsTogether(weights))
    for product in (one_by_one, HeadsTogether(weights), fixed):
        found = product(x).double()
        torch.testing.assert_close(found, expected.flatten(1), atol=1e-5, rtol=1e-5)


def test_a_quantized_expansion_is_counted_as_it_is_loaded(tmp_path: Path) -> None:
    folders = tmp_path / "plain", tmp_path / "quantized"
    write_golden(folders, small_config(DEEPSEEK), *GOLDEN["awq"])
    architecture = read_architecture(folders[1])
    found = check_weights(find_weight_files(folders[1]), architecture)
    dense = {name for name in found.quantized if name.endswith("kv_b_proj")}
    assert dense == {f"model.layers.{i}.self_attn.kv_b_proj" for i in range(2)}
    num_values = 4 * (16 + 16) * 32
    assert {found.linear_bytes(name, 2) for name in dense} == {2 * num_values}
    assert found.layouts(dense) == {None}
    # The prediction of speed reads it so too, and takes no kernel for packed weights for it.
    shape = shape_of(resolve_model(str(folders[1])), None)
    assert {shape.linear_bytes(name) for name in dense} == {shape.dtype.itemsize * num_values}
    assert replace(found, quantized={name: found.quantized[name] for name in dense}).kinds == set()
    packed = sum(
        info.num_bytes
        for name, each in found.quantized.items()
        if name not in dense
        for info in each.parts.values()
    )
    plain = sum(torch.Size(info.shape).numel() for info in found.plain.values())
    expected = int(packed * RESIDENT_SHARE) + 2 * (plain + 2 * num_values)
    assert found.resident_bytes(2) == expected


@pytest.mark.parametrize(
    ("family", "changes", "error", "message"),
    [
        (DEEPSEEK, {"q_lora_rank": None, "attention_bias": True}, UnsupportedModelError, "a bias"),
        (DEEPSEEK, {"partial_rotary_factor": 0.5}, UnsupportedModelError, "in part"),
        (DEEPSEEK, {"kv_lora_rank": 31}, CheckpointError, "even"),
        (DEEPSEEK, {"n_group": 4}, CheckpointError, "n_group"),
        (GLM, {"mlp_layer_types": ["sparse"]}, CheckpointError, "mlp_layer_types"),
        (DEEPSEEK, {"n_group": 3, "num_experts_per_tok": 3}, CheckpointError, "enough groups"),
        (V2, {"topk_method": "noaux_tc"}, UnsupportedModelError, "'topk_method' is 'noaux_tc'"),
        (DEEPSEEK, {"moe_layer_freq": 2}, UnsupportedModelError, "'moe_layer_freq' is 2"),
        (V2, {"moe_layer_freq": 2}, UnsupportedModelError, "'moe_layer_freq' is 2"),
        (DEEPSEEK, {"rope_scaling": UNEVEN}, CheckpointError, "lists of 8 numbers"),
        (DEEPSEEK, {"first_k_dense_replace": None}, CheckpointError, "first_k_dense_replace"),
    ],
)
def test_what_is_not_computed_is_refused(
    family: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = small_config(family)
    architecture_of(config)
    with pytest.raises(error, match=message):
        architecture_of({**config, **changes})


def test_what_configs_say_beside_the_point() -> None:
    """Groups of none are one; and V2 turns neighbours as pairs, whatever a config says."""
    config = small_config(DEEPSEEK)
    whole = {"n_group": 1, "topk_group": 1, "moe_layer_freq": 1}
    without = architecture_of({**config, "n_group": None, "topk_group": None})
    assert without == architecture_of({**config, **whole})
    turned = {**small_config(V2), "rope_interleave": False}
    assert [rope.is_interleaved for rope in architecture_of(turned).ropes] == [True]
    plain = {**config, "rope_interleave": False}
    assert [rope.is_interleaved for rope in architecture_of(plain).ropes] == [False]
